"""How far ahead units must be asked for to be there in time, from how long fetches and compute took lately."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from rayzero.engine.units.schedule import Phase

_RECENT = 64  # measurements that count: a few passes of a usual model
_IN_TIME = 0.9  # share of the recent fetches that the depth is enough for


def wanted_depth(fetch_seconds: float, compute_seconds: float, limit: int) -> int:
    """The smallest number of units such that a fetch asked for that many uses ahead is there in time.

    fetch_seconds: from request to filled. compute_seconds: from one unit's use to the next one's. limit: the most
    units, and the answer where even that many are not enough. Between 1 and ``limit``; 0 where ``limit`` is."""
    if fetch_seconds >= limit * compute_seconds:
        return limit
    return min(limit, max(1, math.ceil(fetch_seconds / compute_seconds)))


def quantile(values: list[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class PrefetchPace:
    """The recent seconds of fetches and between uses.

    Knows durations; not units, budgets or who fetches. Counted per fetch, not per byte: a small unit's seconds are
    mostly latency, and per byte they would stand for hours of a large one's."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._fetches: deque[float] = deque(maxlen=_RECENT)
        self._gaps: dict[Phase, deque[float]] = {phase: deque(maxlen=_RECENT) for phase in Phase}
        self._last: tuple[Phase, float] | None = None  # phase and time of the last use

    def used(self, phase: Phase) -> None:
        """Another unit is used now."""
        now = self._clock()
        if self._last is not None and self._last[0] is phase:
            self._gaps[phase].append(now - self._last[1])
        self._last = (phase, now)

    def waited(self, seconds: float) -> None:
        """The use stood still for so long: that is not compute."""
        if self._last is not None:
            self._last = (self._last[0], self._last[1] + seconds)

    def fetched(self, seconds: float) -> None:
        """A unit was filled so long after it was asked for and published."""
        self._fetches.append(seconds)

    def pause(self) -> None:
        """What follows until the next use is nobody's compute: data loading, a step, an evaluation."""
        self._last = None

    def depth(self, limit: int) -> int:
        """How many units ahead to ask for, at most ``limit``, which is also the answer before anything was measured.

        The faster phase counts: forward and backward differ by a factor of two."""
        gaps = [median(seconds) for seconds in self._gaps.values() if seconds]
        if not gaps or not self._fetches:
            return limit
        return wanted_depth(quantile(list(self._fetches), _IN_TIME), min(gaps), limit)
