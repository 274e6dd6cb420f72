"""How much to offload, by what it costs: as much as hides behind the computation. Pure arithmetic over measurements."""

from __future__ import annotations

from statistics import median

_STEPS = 5  # steps that one decision is made from, by medians
_SLACK = 0.02  # of the updates' time: waits below are noise
_GROWTH = 1.25  # of the fraction, while nothing waits
_LEAST_MOVE = 0.05  # moving copies states: not for less


class FractionSearch:
    """Finds the largest fraction whose updates nobody waits for.

    Updates cost in proportion to the fraction; what of them is waited for does not hide. While nothing is, the
    fraction grows, but not to where it was seen to be too much."""

    def __init__(self, least: float = 0.0) -> None:
        """``least``: never go below."""
        self._least = least
        self._too_much = float("inf")
        self._busy: list[float] = []
        self._stalls: list[float] = []

    def note(self, fraction: float, busy_s: float, stall_s: float) -> float | None:
        """One step at ``fraction``: seconds of updates, seconds that the computation waited for them. The fraction to
        move to, every few steps and where it is worth it."""
        self._busy.append(busy_s)
        self._stalls.append(stall_s)
        if len(self._busy) < _STEPS:
            return None
        busy, stall = median(self._busy), median(self._stalls)
        self._busy, self._stalls = [], []
        wanted = min(1.0, max(self._least, self._better(fraction, busy, stall)))
        worth = abs(wanted - fraction) >= _LEAST_MOVE or wanted == 1.0 > fraction
        return wanted if worth else None

    def _better(self, fraction: float, busy: float, stall: float) -> float:
        if stall > _SLACK * busy:
            self._too_much = min(self._too_much, fraction)
            return fraction * max(0.0, busy - stall) / busy if busy > 0.0 else fraction
        grown = max(fraction * _GROWTH, fraction + _LEAST_MOVE)
        return min(grown, (fraction + self._too_much) / 2) if self._too_much < float("inf") else grown
