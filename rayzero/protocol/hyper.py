"""What owners and the lead make of a rank's inputs: it checks hyper-parameters, finds the optimizer class, and folds
edits of the step's gradients. By the edits a rank also knows the norm that it returns."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.protocol.messages import Edit, EditKind, Hyper

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def require_numbers(group: int, options: Hyper, like: Hyper) -> None:
    """Raise ConfigError, naming the option, unless every option that is a number in ``like`` is one, and every one that
    is several numbers is as many."""
    for name, example in like.items():
        value = options.get(name)
        if _is_number(example) and not _is_number(value):
            raise ConfigError(f"{name} of parameter group {group} must be a number, got {value!r}")
        if _are_numbers(example) and not (_are_numbers(value) and len(value or ()) == len(example)):
            raise ConfigError(f"{name} of parameter group {group} must be {len(example)} numbers, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_number, value))


def resolve_optimizer(path: str) -> type[torch.optim.Optimizer]:
    """The class behind ``"module:qualname"``. Raises UnsupportedError if it cannot be imported, ConfigError if it is no
    optimizer class."""
    module, _, qualname = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise UnsupportedError(
            f"optimizer {path!r} cannot be imported where the optimizer actors run ({exc}); "
            "define the class at the top level of a module they can import"
        ) from exc
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer {path!r} is not a torch.optim.Optimizer class")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """The step's gradients after some edits."""

    scale: float  # multiplies the rank-summed gradient ...
    limit: float  # ... whose elements are then clamped to within +- this
    norm: float | None  # None: needs another pass over the gradients


def edited(edits: Iterable[Edit], norms: Sequence[float], world_size: int) -> Edited:
    """Fold a rank's edits into one: clamping and then scaling is scaling and then clamping to the scaled limit, so any
    order of calls is one multiplication and one clamp.

    ``norms``: of the averaged gradients, then of each further pass that clipping by norm after clipping by value
    needed. Clip factors are torch's."""
    later = iter(norms)
    norm: float | None = next(later)
    factor, limit = 1.0, math.inf
    for edit in edits:
        if edit.kind is EditKind.CLIP_VALUE:
            limit, norm = min(limit, edit.value), None
            continue
        by = edit.value
        if edit.kind is EditKind.CLIP_NORM:
            norm = next(later) if norm is None else norm
            by = min(1.0, edit.value / (norm + _EPSILON))
        factor, limit = factor * by, limit * by
        norm = None if norm is None else norm * by
    return Edited(scale=factor / world_size, limit=limit, norm=next(later, None) if norm is None else norm)
