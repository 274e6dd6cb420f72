"""What a rank's edits do to the step's gradients. A rank knows the norm that it returns by it, the lead what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayzero.protocol.messages import Edit, EditKind

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


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
