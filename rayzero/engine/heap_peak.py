"""The height of a CPU rank's heap in its first steps: what activations and gradients take there, beyond what stays."""

from __future__ import annotations

from rayzero.memory.heap import heap_use

__all__ = ["HeapPeak"]

_STEPS = 3  # later ones are like them, and malloc's books cost up to a millisecond where they are long


class HeapPeak:
    """Looks at malloc's books where a step is high: its forward has ended, or a unit's gradients have all come."""

    def __init__(self, first_step: int | None) -> None:
        """``first_step``: that will be taken; None: look never."""
        self._end = 0 if first_step is None else first_step + _STEPS
        self.peak = 0  # bytes; 0: not looked yet

    def look(self, step: int) -> None:
        """It is high now, in ``step``."""
        if step < self._end and (use := heap_use()) is not None:
            self.peak = max(self.peak, use.used)
