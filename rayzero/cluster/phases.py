"""What a run does while it starts, said as it begins: for half a minute there is nothing else to see."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["OnPhase", "PhaseLines"]

OnPhase = Callable[[str], None]


class PhaseLines:
    """Writes each phase as a line on stderr, with the seconds since this object was made.

    Knows texts and a clock; not what a run is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()

    def __call__(self, phase: str) -> None:
        """``phase`` begins."""
        print(f"{self._clock() - self._started:5.1f} s  {phase}", file=sys.stderr, flush=True)
