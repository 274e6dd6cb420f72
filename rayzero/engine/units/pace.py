"""How far ahead units must be prefetched to arrive in time, measured from recent fetches and compute."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from rayzero.engine.units.schedule import Phase

_RECENT = 64  # recent measurements kept: a few passes of a usual model
_IN_TIME = 0.9  # share of the recent fetches that the depth must be enough for


def wanted_depth(fetch_seconds: float, compute_seconds: float, limit: int) -> int:
    """The smallest depth at which a fetch, requested that many uses ahead, arrives in time.

    fetch_seconds: from request to filled. compute_seconds: from one unit's use to the next one's. limit: the most
        units; also the result if even that many are not enough. Returns 1 to ``limit``, or 0 if ``limit`` is 0."""
    if fetch_seconds >= limit * compute_seconds:
        return limit
    return min(limit, max(1, math.ceil(fetch_seconds / compute_seconds)))


def quantile(values: list[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class PrefetchPace:
    """The recent seconds of fetches and between uses.

    Knows durations; not units, budgets or who fetches. Counts per fetch, not per byte: a small unit's seconds are
    mostly latency, which scaled by bytes would predict hours for a large unit."""

    def __init__(self) -> None:
        self._fetches: deque[float] = deque(maxlen=_RECENT)
        self._gaps: dict[Phase, deque[float]] = {phase: deque(maxlen=_RECENT) for phase in Phase}

    def computed(self, phase: Phase, seconds: float) -> None:
        """The next use in a phase came after ``seconds`` of computing, waits not included."""
        self._gaps[phase].append(seconds)

    def fetched(self, seconds: float) -> None:
        """A unit was filled ``seconds`` after it was both requested and published."""
        self._fetches.append(seconds)

    def depth(self, limit: int) -> int:
        """How many units ahead to prefetch: at most ``limit``, and ``limit`` before anything was measured.

        The faster phase counts: forward and backward differ by a factor of two."""
        gaps = [median(seconds) for seconds in self._gaps.values() if seconds]
        if not gaps or not self._fetches:
            return limit
        return wanted_depth(quantile(list(self._fetches), _IN_TIME), min(gaps), limit)
