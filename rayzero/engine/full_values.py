"""A prepared model's complete values: read as a state dict, present in its Parameters for a while, or given back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from rayzero.engine.prepare import engine_of


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Complete CPU tensors under plain names, in the model's own order; loads into the plain model.

    Parameters are the fp32 masters after exactly the last step, with what this rank has written since; tied ones appear
    under each of their names. A frozen parameter has the compute dtype if that holds its values exactly, else fp32.
    Persistent buffers keep their dtype. Reads unit by unit; waits for the last step's update, but for no other rank.
    Raises UnsupportedError if the model is not prepared, or if it was given parameters since."""
    engine = engine_of(model)
    engine.registered.refuse_added()
    values: dict[int, Tensor] = {}
    for unit in engine.units:
        flat = engine.values.masters(unit)
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            values[id(param)] = flat[slot.start : slot.stop].view(slot.shape).clone()
    return _in_model_order(model, values)


def _in_model_order(model: nn.Module, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            state[dot + name] = values[id(param)]
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                state[dot + name] = buffer.detach().cpu().clone()
    return state


@contextmanager
def full_parameters(model: nn.Module, *, modify: bool = False) -> Iterator[None]:
    """Inside the context every Parameter holds its full values after exactly the last step, in its compute dtype.

    The whole model must fit gpu_param_memory_budget. Writes that torch counts are always kept; with modify=True also
    others (numpy). They reach the owners with the next clip, step or save_checkpoint, and every rank must
    write the same values. Raises UnsupportedError if the model is not prepared, MemoryPlanError if it does not
    fit."""
    with engine_of(model).complete(modify=modify):
        yield


def release(model: nn.Module) -> None:
    """Give back the memory that this rank holds for a model, until the next forward and backward take it again.

    For the time in which something else has the device or the host: an engine that generates, an evaluation. It frees
    gathered parameters, prefetches, staging buffers, buffers of offloaded activations, the memory in which owners of
    this host read gradients (not where it is page-locked for a CUDA device), and what malloc and torch's allocator
    keep. Parameters that views or graphs hold stay; no value changes. Waits for the last step's update, and so for the
    other ranks' ``step()``.

    Raises UnsupportedError inside a forward or backward, while the open step may have a graph of a forward or
    gradients, and in another thread than the one that trains. If gradients find no room afterwards, the backward raises
    MemoryPlanError."""
    engine_of(model).release()
