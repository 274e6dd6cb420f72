"""Gradients that wait on the device (``offload_grads=False``): summed there over the backwards of a step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rayzero.engine.units.param_unit import ParamUnit


class GradientSums:
    """fp32 sums of each unit's gradients, slot by slot.

    Knows what has come since the last step; not when gradients come, nor where they go."""

    def __init__(self) -> None:
        self._sums: dict[int, list[Tensor | None]] = {}  # by unit. freed by: take(), clear()

    def __contains__(self, unit: int) -> bool:
        """Whether anything has come for the unit."""
        return unit in self._sums

    def slots(self, unit: int) -> set[int]:
        """The slots of a unit that something has come for."""
        return {slot for slot, held in enumerate(self._sums.get(unit, ())) if held is not None}

    def add(self, unit: ParamUnit, grads: Sequence[Tensor | None]) -> None:
        """Add one backward's gradients, per slot, of any dtype."""
        sums = self._sums.setdefault(unit.index, [None] * len(grads))
        for i, grad in enumerate(grads):
            if grad is not None:
                held = sums[i]
                sums[i] = grad.float() if held is None else held.add_(grad)

    def take(self, unit: ParamUnit) -> list[Tensor | None]:
        """A unit's sums, per slot, in its dtype; they are no longer kept. ``unit`` is in this."""
        return [s if s is None else s.to(unit.layout.dtype) for s in self._sums.pop(unit.index)]

    def clear(self) -> None:
        """Forget them."""
        self._sums.clear()
