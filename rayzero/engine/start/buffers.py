"""A model's buffers: which of them a checkpoint can hold, what it holds of them, and how they are filled from it.

Each rank has its own. An expanded buffer has one element in memory for several of its shape: these are read as they
are, and written once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from rayzero.checkpoint.files.tensor_file import CODES
from rayzero.engine.private_torch import has_memory
from rayzero.engine.units.partition import share_elements
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.layout.model_layout import dtype_name
from rayzero.protocol.bits import same_bits


def refuse_buffers(model: nn.Module) -> None:
    """Raise UnsupportedError, naming it, for a persistent buffer that no checkpoint can hold, and for one that is a
    view of a Parameter, whose memory goes to the owners."""
    for name, buffer in _persistent(model):
        _require_saveable(name, buffer)
    held = defaultdict(list)
    for name, param in model.named_parameters():
        if param.layout is torch.strided and has_memory(param):
            held[param.untyped_storage().data_ptr()].append((name, param))
    for name, buffer in model.named_buffers():
        if isinstance(buffer, nn.Parameter) or buffer.layout is not torch.strided or not has_memory(buffer):
            continue
        for other, param in held.get(buffer.untyped_storage().data_ptr(), ()):
            if not buffer.is_meta and share_elements(buffer, param):
                raise UnsupportedError(
                    f"buffer {name!r} is a view of parameter {other!r}, whose memory goes to the owners, so it would "
                    "not follow the parameter any more; give the buffer a clone, or compute it in forward"
                )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers in host memory, under each of their state_dict names. Raises UnsupportedError, naming it,
    for one that no checkpoint can hold: the user may have replaced it since ``prepare``."""
    found = {}
    for name, buffer in _persistent(model):
        _require_saveable(name, buffer)
        found[name] = buffer.detach().cpu().resolve_conj().resolve_neg()
    return found


def check_buffers(source: object, model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, naming it, for a buffer that ``values`` from ``source`` lack or have beside the model's,
    or have in another shape. One on the meta device may be absent: it has nothing that would silently stay."""
    ours = dict(_persistent(model))
    problems = [f"the model has no buffer {name!r}" for name in values.keys() - ours.keys()]
    for name, buffer in ours.items():
        value = values.get(name)
        if value is None and not buffer.is_meta:
            problems.append(f"it lacks buffer {name!r}")
        elif value is not None and value.shape != buffer.shape:
            problems.append(f"buffer {name!r} has shape {list(value.shape)}, the model's {list(buffer.shape)}")
    if problems:
        raise CheckpointError(f"{source} is a checkpoint of another model: {'; '.join(sorted(problems)[:4])}")


def fill_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy values, of the same shapes, into the named buffers. A buffer on meta becomes a CPU tensor everywhere it is
    registered. Raises CheckpointError for values of an expanded buffer that differ where it has one element."""
    made: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in values:
                target = torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer
                there, value = _in_memory(target), _in_memory(values[name], like=target)
                if there is not target and not same_bits(value.expand_as(target), values[name]).all():
                    raise CheckpointError(f"buffer {name!r} is expanded in the model, but not where it was saved")
                there.copy_(value)
                made[id(buffer)] = target
    replace_buffers(model, made)


def replace_buffers(model: nn.Module, made: Mapping[int, Tensor]) -> None:
    """Replace buffers: id of the registered tensor -> the new one."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in made:
                module._buffers[name] = made[id(buffer)]


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that ``state_dict`` has, under each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _require_saveable(name: str, buffer: Tensor) -> None:
    why = None
    if buffer.is_nested:
        why = "a nested tensor"
    elif buffer.layout is not torch.strided:
        why = f"a tensor of layout {buffer.layout}"
    elif buffer.dtype not in CODES:
        why = f"of dtype {dtype_name(buffer.dtype)}"
    elif not has_memory(buffer):
        why = f"a {type(buffer).__module__}.{type(buffer).__qualname__}, which wraps other tensors"
    if why is not None:
        raise UnsupportedError(
            f"persistent buffer {name!r} is {why}, and checkpoints hold dense tensors of safetensors' dtypes; register "
            "it with persistent=False, or register dense tensors (indices and values; real and imaginary parts) and "
            "build it from them"
        )


def _in_memory(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The elements that have memory of their own if ``like`` (default: the tensor itself) is expanded: one along each
    expanded dimension."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, (tensor if like is None else like).stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
