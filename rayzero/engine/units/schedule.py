"""The order in which units are used: recorded as it happens, and predicted from the last pass.

A *pass* is a root forward and the backwards that follow it. The first pass is predicted from module order: every unit
forward, then every unit in reverse. How long uses wait and what they compute in between is measured; from that follows
how far to fetch ahead.

[Note: two clocks] The host issues a use long before a CUDA device comes to it. So what counts as a wait there is how
long the computing stream stood: the time between two of its events, around the use's wait. A copy takes two events of
its own stream. All are read once the device has passed them, which is some uses later, and nothing ever blocks for
that. What the host itself was blocked for counts in the phases of its step (step_clock.py), on the CPU in both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from rayzero.engine.step_clock import StepClock
from rayzero.engine.units.residency import Fetching, Waited
from rayzero.lanes import AT_ONCE_S, Event, Lane
from rayzero.layout.model_layout import UnitLayout
from rayzero.telemetry.names import (
    PREFETCH_GROUP_LATE_SECONDS,
    PREFETCH_LATE_SECONDS,
    PREFETCH_LEAD_SECONDS,
    PREFETCH_REQUESTS,
)
from rayzero.telemetry.recorder import Recorder
from rayzero.telemetry.stats import CopyTally


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


@dataclass(slots=True)
class _Stop:
    """The computation goes on after it has waited for a unit."""

    unit: UnitLayout
    fetching: Fetching
    was_there: bool  # the host did not have to wait
    host: Waited
    lead: float  # since when it was there, on the host's clock
    began: Event
    ended: Event


@dataclass(slots=True)
class _Gap:
    """From the begin of one use to that of the next one."""

    phase: Phase
    began: Event
    ended: Event | None = None
    stops: list[_Stop] = field(default_factory=list)  # within


class UseTimes:
    """The waits of one rank's uses, in their order.

    Knows events and seconds; not which units are up. Methods run on the computing thread."""

    def __init__(self, lane: Lane, clock: StepClock, recorder: Recorder, groups: Sequence[str]) -> None:
        """``lane``: copies units; its clock is that of the computation. ``groups``: by unit, labels in metrics."""
        self.arrived = CopyTally()  # of units that were then used
        self.pace = PrefetchPace()
        self._lane, self._clock, self._recorder, self._groups = lane, clock, recorder, groups
        self._gap: _Gap | None = None  # that is open
        self._pending: deque[_Stop | _Gap] = deque()  # not all of their events have passed

    def used(self, phase: Phase) -> None:
        """A unit's use begins now, the first one's or another one's than before."""
        now = self._lane.now()
        if self._gap is not None and self._gap.phase is phase:
            self._gap.ended = now
            self._pending.append(self._gap)
        self._gap = _Gap(phase, now)
        self.count()

    def pause(self) -> None:
        """The time until the next use is not compute: data loading, a step, an evaluation."""
        self._gap = None

    def now(self) -> Event:
        """The begin of a wait."""
        return self._lane.now()

    def waited(self, unit: UnitLayout, fetching: Fetching, was_there: bool, host: Waited, began: Event) -> None:
        """A use has waited for a unit since ``began``: the host for ``host``, a device for as long as it will find."""
        for cause, seconds, ago in (("optimizer", host.optimizer, host.fetch), ("fetch", host.fetch, 0.0)):
            if seconds:
                self._clock.blocked(cause, seconds, ago=ago)
        stop = _Stop(unit, fetching, was_there, host, fetching.lead - host.total, began, self._lane.now())
        self._pending.append(stop)
        if self._gap is not None:
            self._gap.stops.append(stop)
        self.count()

    def count(self) -> None:
        """Count what is known by now."""
        while self._pending and self._is_known(self._pending[0]):
            match self._pending.popleft():
                case _Stop() as stop:
                    self._count_stop(stop)
                case _Gap(phase, began, ended, stops):
                    assert ended is not None
                    self.pace.computed(phase, self._seconds(began, ended) - sum(map(self._stood, stops)))

    def _is_known(self, each: _Stop | _Gap) -> bool:
        assert each.ended is not None
        copied = each.fetching.copied if isinstance(each, _Stop) else None
        if copied is not None and copied.seconds(self._lane) is None:
            return False
        return self._lane.seconds(each.began, each.ended) is not None

    def _seconds(self, began: Event, ended: Event) -> float:
        seconds = self._lane.seconds(began, ended)
        assert seconds is not None, "both have passed"
        return seconds

    def _stood(self, stop: _Stop) -> float:
        """How long the computation stood."""
        if not stop.fetching.on_device:
            return stop.host.total
        stood = self._seconds(stop.began, stop.ended)
        return stood if stood > AT_ONCE_S else 0.0

    def _count_stop(self, stop: _Stop) -> None:
        fetching, stood = stop.fetching, self._stood(stop)
        copied = 0.0 if fetching.copied is None else self._seconds(*fetching.copied.moments)
        at_once = not stood if fetching.on_device else stop.was_there
        result = "miss" if not fetching.ahead else "hit" if at_once else "late"
        self._recorder.add(PREFETCH_REQUESTS, 1, result=result)
        if result == "hit":
            there = None if fetching.copied is None else fetching.copied.moments[-1]
            lead = stop.lead if there is None else self._seconds(there, stop.began)
            self._recorder.observe(PREFETCH_LEAD_SECONDS, max(0.0, lead))
        else:
            self._recorder.add(PREFETCH_GROUP_LATE_SECONDS, stood, group=self._groups[stop.unit.index])
        if result == "late":
            self._recorder.observe(PREFETCH_LATE_SECONDS, stood)
        self._expose(stop, stood, copied)
        if (seconds := fetching.seconds) is not None:
            self.arrived.add(stop.unit.size_bytes, seconds + copied)
            self.pace.fetched(seconds + copied)

    def _expose(self, stop: _Stop, stood: float, copied: float) -> None:
        """Put down what the computation stood for: the last part to the bytes, the rest to the update before them."""
        fetch = min(stood, stop.host.fetch + copied)
        optimizer = min(stop.host.optimizer, stood - fetch)
        for cause, seconds in (("optimizer", optimizer), ("fetch", stood - optimizer)):
            if seconds:
                self._clock.exposed(cause, seconds)
