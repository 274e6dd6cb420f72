"""Sums gradients on the device over the backwards of a step (``offload_grads=False``)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rayzero.engine.units.param_unit import ParamUnit


class GradientSums:
    """fp32 sums of each unit's gradients, slot by slot.

    Knows the sums since the last step; not when gradients come, nor where they go."""

    def __init__(self) -> None:
        self._sums: dict[int, list[Tensor | None]] = {}  # by unit. freed by: take(), clear()

    def __contains__(self, unit: int) -> bool:
        """Whether the unit has a sum."""
        return unit in self._sums

    def slots(self, unit: int) -> set[int]:
        """The unit's slots that have a sum."""
        return {slot for slot, held in enumerate(self._sums.get(unit, ())) if held is not None}

    def add(self, unit: ParamUnit, grads: Sequence[Tensor | None]) -> None:
        """Add one backward's gradients: one per slot in the parameter's shape, of any dtype; None adds nothing."""
        sums = self._sums.setdefault(unit.index, [None] * len(grads))
        for i, grad in enumerate(grads):
            if grad is not None:
                held = sums[i]
                sums[i] = grad.float() if held is None else held.add_(grad)

    def take(self, unit: ParamUnit) -> list[Tensor | None]:
        """Remove and return a unit's sums, one per slot, in the unit's dtype. The unit must have some."""
        return [s if s is None else s.to(unit.layout.dtype) for s in self._sums.pop(unit.index)]

    def clear(self) -> None:
        """Forget them."""
        self._sums.clear()
