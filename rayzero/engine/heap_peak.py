"""Samples the peak of a CPU rank's heap in its first steps, which shows what activations and gradients take."""

from __future__ import annotations

from rayzero.memory.heap import heap_use

__all__ = ["HeapPeak"]

_STEPS = 3  # later steps are like them, and mallinfo2 takes up to a millisecond on a large heap


class HeapPeak:
    """Reads malloc's statistics when memory is high: at the end of a forward, and when a unit's gradients are
    complete."""

    def __init__(self, first_step: int | None) -> None:
        """``first_step``: the first step that this rank takes; None: never sample."""
        self._end = 0 if first_step is None else first_step + _STEPS
        self.peak = 0  # bytes; 0: not sampled yet

    def look(self, step: int) -> None:
        """Sample now, during ``step``."""
        if step < self._end and (use := heap_use()) is not None:
            self.peak = max(self.peak, use.used)
