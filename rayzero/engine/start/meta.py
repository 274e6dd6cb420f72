"""Parameters and buffers without memory: ``empty_parameters()`` creates them, and they get memory with their values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from rayzero.engine.private_torch import swap_tensors


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules that this thread builds inside have their parameters on the meta device: shapes without memory.

    Buffers stay real, so that tables computed in a constructor (rotary embeddings, masks) are right, and no random
    number is drawn for a parameter by a constructor's ``reset_parameters``. ``rayzero.prepare`` takes such a model with
    ``weights=`` or ``init=``, or where the run resumes from a checkpoint."""
    before = _building.made
    _building.made = WeakTensorKeyDictionary() if before is None else before
    try:
        yield
    finally:
        _building.made = before


class _Building(threading.local):
    """The Parameters that this thread has emptied so far; None outside ``empty_parameters()``."""

    made: WeakTensorKeyDictionary | None = None  # a Parameter that two modules share stays one


_building = _Building()


def _empty(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter | None:
    made = _building.made
    if made is None or param.is_meta or is_lazy(param):
        return None
    if param not in made:
        made[param] = _emptied(param)
    return made[param]  # type: ignore[no-any-return]


# Once and for good: torch's table of these hooks must not change while another thread builds a module.
_register: Any = register_module_parameter_registration_hook  # typed as if hooks could return nothing
_register(_empty)


def _emptied(param: nn.Parameter) -> nn.Parameter:
    empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    empty.__class__ = type(param)
    empty.__dict__.update(param.__dict__)
    return empty


def materialise(param: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """Turn a meta Parameter into ``tensor`` (of its shape; of any dtype) and keep its hooks. Returns the old contents,
    to swap back."""
    other = nn.Parameter(tensor, requires_grad=param.requires_grad)
    swap_tensors(param, other)
    param._backward_hooks = param._backward_hooks  # puts the user's own hooks on the new tensor
    param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    return other
