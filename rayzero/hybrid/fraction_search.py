"""Chooses how much to offload from measured times: as much as hides behind the computation. Pure arithmetic."""

from __future__ import annotations

from statistics import median

_STEPS = 5  # steps per decision, which takes medians over them
_SLACK = 0.02  # share of the updates' time: shorter waits are noise
_GROWTH = 1.25  # growth of the fraction while nothing waits
_LEAST_MOVE = 0.05  # a move copies states, so smaller changes are not worth it


class FractionSearch:
    """Searches for the largest fraction whose updates finish before the computation needs their parameters.

    An update's time grows with the fraction; the part that the computation waits for does not hide. While there is no
    wait, the fraction grows, but not back to a value that caused one."""

    def __init__(self, least: float = 0.0) -> None:
        """``least``: never go below."""
        self._least = least
        self._too_much = float("inf")
        self._busy: list[float] = []
        self._stalls: list[float] = []

    def note(self, fraction: float, busy_s: float, stall_s: float) -> float | None:
        """Record one step at ``fraction``: seconds that updates took, and seconds that the computation waited for them.
        Every few steps, returns the fraction to move to; None where a move does not pay."""
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
