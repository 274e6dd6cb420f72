"""In which order units are used: recorded as it happens, foretold from the last pass.

A *pass* is a root forward and the backwards that follow it. The first pass is foretold from module order: every
unit forward, then every unit in reverse.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class Phase(StrEnum):
    """What a unit is used for."""

    FORWARD = "forward"
    BACKWARD = "backward"


Use = tuple[Phase, int]  # phase, unit index


class UnitSchedule:
    """The recorded order of use, and what comes next in each phase.

    Knows unit indices and order; not units' states, budgets or who asks."""

    def __init__(self, num_units: int, always: Collection[int] = ()) -> None:
        """``always``: units that are kept throughout a pass (the root's): neither recorded nor looked ahead for."""
        self._always = frozenset(always)
        others = [unit for unit in range(num_units) if unit not in self._always]
        forward = [(Phase.FORWARD, unit) for unit in others]
        backward = [(Phase.BACKWARD, unit) for unit in reversed(others)]
        self._known: list[Use] = [*forward, *backward]  # the last pass
        self._recording: list[Use] = []
        self._longest = 64 * num_units + 1024  # uses of a pass that never begins anew are not recorded for ever
        self._at = -1  # where in the known pass we are
        self._ahead: dict[tuple[int, int], tuple[int, ...]] = {}  # (position, count) -> units, of the known pass

    def begin_pass(self) -> None:
        """A root forward starts. What was recorded becomes the foretelling, unless it had no backward (evaluation)."""
        if self._recording != self._known and any(phase is Phase.BACKWARD for phase, _ in self._recording):
            self._known, self._ahead = self._recording, {}
        self._recording, self._at = [], -1

    def used(self, phase: Phase, unit: int) -> None:
        """Record one use; repeats in a row count once."""
        use = (phase, unit)
        if self._recording and self._recording[-1] == use:
            return
        if len(self._recording) < self._longest:
            self._recording.append(use)
        self._at = self._find(use)

    def _find(self, use: Use) -> int:
        """Its next place in the known pass, else its first, else where we are."""
        for start, stop in ((self._at + 1, len(self._known)), (0, self._at + 1)):
            for position in range(start, stop):
                if self._known[position] == use:
                    return position
        return self._at

    def upcoming(self, count: int, *, wrap: bool) -> tuple[int, ...]:
        """The next ``count`` distinct units after the present use; ``wrap``: go on with the next pass."""
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
