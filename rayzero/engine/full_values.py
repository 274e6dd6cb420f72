"""A prepared model's complete values: read as a state dict, or present in its Parameters for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from rayzero.engine.prepare import engine_of


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Complete CPU tensors under plain names, in the model's own order; loads into the plain model.

    Parameters are the fp32 masters after exactly the last step, with what this rank has written since; tied ones appear
    under each of their names. A frozen parameter has the compute dtype if that holds its values exactly, else fp32
    (with ``frozen_masters=False``: the compute dtype, rounded). Persistent buffers keep their dtype. Reads unit by
    unit; waits for the last step's update, but for no other rank. Raises UnsupportedError if the model is not
    prepared, or if it was given parameters since."""
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
    others (``.data``, numpy). They reach the owners with the next clip, step or save_checkpoint, and every rank must
    write the same values. Raises UnsupportedError if the model is not prepared, MemoryPlanError if it does not
    fit."""
    with engine_of(model).complete(modify=modify):
        yield
