"""The order in which units are used: recorded as it happens, and predicted from the last pass.

A *pass* is a root forward and the backwards that follow it. The first pass is predicted from module order: every unit
forward, then every unit in reverse.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class Phase(StrEnum):
    """The part of a pass that uses a unit."""

    FORWARD = "forward"
    BACKWARD = "backward"


Use = tuple[Phase, int]  # phase, unit index


class UnitSchedule:
    """The recorded order of use, and what comes next in each phase.

    Knows unit indices and order; not units' states, budgets or who asks."""

    def __init__(self, num_units: int, always: Collection[int] = ()) -> None:
        """``always``: units that stay up throughout a pass (the root's); they are neither recorded nor predicted."""
        self._always = frozenset(always)
        others = [unit for unit in range(num_units) if unit not in self._always]
        forward = [(Phase.FORWARD, unit) for unit in others]
        backward = [(Phase.BACKWARD, unit) for unit in reversed(others)]
        self._known: list[Use] = [*forward, *backward]  # the last pass
        self._recording: list[Use] = []
        self._longest = 64 * num_units + 1024  # bounds the record of a pass that never ends
        self._at = -1  # position in the recorded pass
        self._ahead: dict[tuple[int, int], tuple[int, ...]] = {}  # (position, count) -> units, for the recorded pass

    def begin_pass(self) -> None:
        """A root forward starts. The record becomes the prediction, unless it has no backward (an evaluation)."""
        if self._recording != self._known and any(phase is Phase.BACKWARD for phase, _ in self._recording):
            self._known, self._ahead = self._recording, {}
        self._recording, self._at = [], -1

    def used(self, phase: Phase, unit: int) -> None:
        """Record one use. Consecutive uses of the same unit count once."""
        use = (phase, unit)
        if self._recording and self._recording[-1] == use:
            return
        if len(self._recording) < self._longest:
            self._recording.append(use)
        self._at = self._find(use)

    def _find(self, use: Use) -> int:
        """The use's next position in the recorded pass; else its first one; else the present position."""
        for start, stop in ((self._at + 1, len(self._known)), (0, self._at + 1)):
            for position in range(start, stop):
                if self._known[position] == use:
                    return position
        return self._at

    def upcoming(self, count: int, *, wrap: bool) -> tuple[int, ...]:
        """The next ``count`` distinct units after the present use. ``wrap``: continue with the next pass."""
        key = (self._at, -count if wrap else count)
        if key not in self._ahead:
            self._ahead[key] = self._look_ahead(count, wrap)
        return self._ahead[key]

    def _look_ahead(self, count: int, wrap: bool) -> tuple[int, ...]:
        current = self._known[self._at][1] if 0 <= self._at < len(self._known) else None
        rest = self._known[self._at + 1 :] + (self._known[: self._at + 1] if wrap else [])
        distinct = dict.fromkeys(unit for _, unit in rest if unit != current)
        return tuple(distinct)[:count]

    def first(self, count: int) -> tuple[int, ...]:
        """The units that are always kept, and the first ``count`` others of a pass in order of use."""
        others = dict.fromkeys(unit for _, unit in self._known)
        return (*sorted(self._always), *tuple(others)[:count])
