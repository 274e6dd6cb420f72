"""Simulated time: events, and work that shares resources.

[Note: sharing] Work has the seconds that it takes alone, and what it takes of each resource meanwhile (cores, bytes
per second). Where works want more than there is, all that use the scarce resource are slowed by the same factor, and
what they leave of other resources goes to the rest (max-min fairness over factors, by progressive filling). So a
process with two threads gets twice what one with a single thread gets, as from a scheduler, and equal flows share a
link equally.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Demand", "Fluid", "Line"]

Act = Callable[[], object]
Demand = tuple[int, float]  # (resource, how much of it per second at full speed)
Begin = Callable[[], tuple[float, Sequence[Demand]]]  # what a work takes: seconds alone, and of resources

_WIDEST = 8  # demands of one work; a row of the table
_ROWS = 64  # at first
_ROUNDING = 1e-9  # relative


@dataclass(slots=True)
class _Running:
    act: Act
    order: int


class Fluid:
    """A clock, a heap of timed events, and the works that run now.

    Knows seconds and resources; not what they stand for. Deterministic: what happens at one moment happens in the order
    in which it was asked for."""

    def __init__(self, capacities: Sequence[float], *, resolution: float = 0.0) -> None:
        """``capacities``: per resource, per second. ``resolution``: seconds; works that would end within it of each
        other end together, which bounds the number of events of large simulations."""
        self.now = 0.0
        self.events = 0
        self._resolution = resolution
        self._capacity = np.append(np.asarray(capacities, dtype=float), np.inf)  # the last one: no demand
        self.used = np.zeros(len(capacities))  # of each resource, so far
        self._timed: list[tuple[float, int, Act]] = []
        self._order = 0
        self._running: dict[int, _Running] = {}
        none = len(capacities)
        self._resource, self._amount = np.full((_ROWS, _WIDEST), none), np.zeros((_ROWS, _WIDEST))  # by row and demand
        self._left, self._speed = np.full(_ROWS, np.inf), np.zeros(_ROWS)  # seconds alone, and the share of full speed
        self._free = list(reversed(range(_ROWS)))
        self._changed = False  # since the speeds were set

    def _grow(self) -> None:
        """Make the table twice as long."""
        rows = len(self._left)
        self._resource = np.concatenate([self._resource, np.full((rows, _WIDEST), len(self._capacity) - 1)])
        self._amount = np.concatenate([self._amount, np.zeros((rows, _WIDEST))])
        self._left = np.concatenate([self._left, np.full(rows, np.inf)])
        self._speed = np.concatenate([self._speed, np.zeros(rows)])
        self._free = list(reversed(range(rows, 2 * rows)))

    # ---- what is asked for

    def after(self, seconds: float, act: Act) -> None:
        """Call ``act`` in so many seconds."""
        heapq.heappush(self._timed, (self.now + seconds, self._next(), act))

    def work(self, seconds: float, demands: Sequence[Demand], act: Act) -> None:
        """Begin work that takes ``seconds`` alone; call ``act`` at its end."""
        if seconds <= 0:
            self.after(0.0, act)
            return
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._resource[row], self._amount[row] = len(self._capacity) - 1, 0.0
        for column, (resource, amount) in enumerate(demands):
            self._resource[row, column], self._amount[row, column] = resource, amount
        self._left[row] = seconds
        self._running[row] = _Running(act, self._next())
        self._changed = True

    def _next(self) -> int:
        self._order += 1
        return self._order

    # ---- time

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._timed or self._running:
            self._step()

    def _step(self) -> None:
        if self._changed:
            self._share()
            self._changed = False
        ends = self._ends()
        until = min(ends, self._timed[0][0] if self._timed else np.inf)
        self._advance(until - self.now)
        self.now = until
        over = self._over() if ends <= until + self._resolution else []
        for act in over:
            act()
        while self._timed and self._timed[0][0] <= self.now:
            heapq.heappop(self._timed)[2]()
            self.events += 1

    def _ends(self) -> float:
        """When the next work ends."""
        if not self._running:
            return float("inf")
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = np.where(self._speed > 0, self._left / self._speed, np.inf)
        return self.now + float(seconds.min())

    def _advance(self, seconds: float) -> None:
        if seconds <= 0 or not self._running:
            return
        done = self._speed * seconds
        self._left -= done
        taken = np.bincount(
            self._resource.ravel(), (self._amount * done[:, None]).ravel(), minlength=len(self._capacity)
        )
        self.used += taken[:-1]

    def _over(self) -> list[Act]:
        """Take the works that have ended, in the order in which they began."""
        slack = self._speed * max(self._resolution, _ROUNDING * max(self.now, 1e-6))
        rows = [int(row) for row in np.flatnonzero((self._left <= slack) & (self._speed > 0))]
        ended = sorted((self._running.pop(row) for row in rows), key=lambda each: each.order)
        for row in rows:
            for resource, amount in zip(self._resource[row], self._amount[row], strict=True):
                if amount:  # what rounding, or the resolution, has left of it
                    self.used[resource] += amount * self._left[row]
            self._left[row], self._speed[row] = np.inf, 0.0
            self._amount[row] = 0.0
            self._free.append(row)
        self.events += len(rows)
        self._changed = self._changed or bool(rows)
        return [each.act for each in ended]

    def _share(self) -> None:
        """Set every work's speed, a share of its full one. [Note: sharing]"""
        open_ = np.isfinite(self._left)
        self._speed[:] = 0.0
        rest, most = self._capacity.copy(), 1.0
        while open_.any():
            wanted = np.bincount(
                self._resource[open_].ravel(), self._amount[open_].ravel(), minlength=len(self._capacity)
            )
            level = np.full(len(rest), np.inf)
            np.divide(np.maximum(rest, 0.0), wanted, out=level, where=wanted > 0)
            share = min(most, float(level.min()))
            if share >= most:
                self._speed[open_] = most
                return
            scarce = level <= share * (1 + _ROUNDING)
            held = open_ & ((self._amount > 0) & scarce[self._resource]).any(axis=1)
            self._speed[held] = share
            rest -= share * np.bincount(
                self._resource[held].ravel(), self._amount[held].ravel(), minlength=len(self._capacity)
            )
            open_ &= ~held


class Line:
    """Works that run one after another, as those of a thread or a stream."""

    def __init__(self, fluid: Fluid) -> None:
        self._fluid = fluid
        self._waiting: deque[tuple[Begin, Act]] = deque()
        self._busy = False
        self.seconds = 0.0  # in which something ran, so far
        self._began = 0.0

    def add(self, seconds: float, demands: Sequence[Demand], act: Act) -> None:
        """Do this work behind those that were added before; call ``act`` at its end."""
        self.add_later(lambda: (seconds, demands), act)

    def add_later(self, begin: Begin, act: Act) -> None:
        """The same for work of which it is said when it begins what it takes."""
        self._waiting.append((begin, act))
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        begin, act = self._waiting.popleft()
        seconds, demands = begin()
        self._busy, self._began = True, self._fluid.now

        def over() -> None:
            self._busy = False
            self.seconds += self._fluid.now - self._began
            if self._waiting:
                self._begin()
            act()

        self._fluid.work(seconds, demands, over)
