"""A model's buffers: which of them a checkpoint can hold, what it holds of them, and how they are filled from it.

Each rank has its own. An expanded buffer has one element in memory for several of its shape: these are read as they
are, and written once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from rayzero.checkpoint.tensor_file import CODES
from rayzero.engine.private_torch import has_memory
from rayzero.engine.units.partition import share_elements
from rayzero.errors import CheckpointError, UnsupportedError
from rayzero.layout.model_layout import dtype_name
from rayzero.protocol.messages import same_bits


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


class ChangingBuffers:
    """The buffers that a rank's loop needs to repeat a step: persistent ones, and others that were written to since
    ``prepare``. One that was replaced by a tensor of another shape is made anew by whatever made it.

    Knows buffers' names and version counters; not who writes."""

    def __init__(self, model: nn.Module, known: Collection[str] = ()) -> None:
        """``known``: names of those that a former life of the rank has written to."""
        self._model = model
        self._written = set(known)
        self._others = [
            (name, module._buffers, name.rpartition(".")[2], weakref.ref(buffer), _writes(buffer), buffer.shape)
            for name, module, buffer in _buffers(model, persistent=False)
        ]

    def values(self) -> dict[str, Tensor]:
        """Their values in host memory, by name. Raises as ``persistent_buffers``."""
        found = persistent_buffers(self._model)
        for name, table, key, began, writes, shape in self._others:
            buffer = table.get(key)
            if buffer is None:
                continue
            if began() is not buffer or _writes(buffer) != writes:
                self._written.add(name)
            if name in self._written and buffer.shape == shape and _why_not_saveable(buffer) is None:
                found[name] = _on_host(buffer)
        return found


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers in host memory, under each of their state_dict names. Raises UnsupportedError, naming it,
    for one that no checkpoint can hold: the user may have replaced it since ``prepare``."""
    found = {}
    for name, buffer in _persistent(model):
        _require_saveable(name, buffer)
        found[name] = _on_host(buffer)
    return found


def _on_host(buffer: Tensor) -> Tensor:
    return buffer.detach().cpu().resolve_conj().resolve_neg()


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
    return ((name, buffer) for name, _, buffer in _buffers(model, persistent=True))


def _buffers(model: nn.Module, *, persistent: bool) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Buffers with the modules that hold them, under each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if (name not in module._non_persistent_buffers_set) == persistent:
                yield f"{prefix}.{name}" if prefix else name, module, buffer


def _writes(buffer: Tensor) -> int:
    """A number that every write to the buffer raises."""
    return 0 if buffer.is_inference() else buffer._version


def _why_not_saveable(buffer: Tensor) -> str | None:
    if buffer.is_nested:
        return "a nested tensor"
    if buffer.layout is not torch.strided:
        return f"a tensor of layout {buffer.layout}"
    if buffer.dtype not in CODES:
        return f"of dtype {dtype_name(buffer.dtype)}"
    if not has_memory(buffer):
        return f"a {type(buffer).__module__}.{type(buffer).__qualname__}, which wraps other tensors"
    return None


def _require_saveable(name: str, buffer: Tensor) -> None:
    why = _why_not_saveable(buffer)
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
