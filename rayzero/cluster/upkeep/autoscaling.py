"""Measures how long ranks wait for updates, and asks for as many optimizer actors as elastic/autoscaler.py wants."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray

from rayzero.cluster.actors.calls import control
from rayzero.cluster.actors.run_actors import RunActors
from rayzero.cluster.run import Load, Rescaled
from rayzero.elastic.autoscaler import Bounds, History, StepWindow, given_up, look
from rayzero.elastic.requests import ScaleRequest

log = logging.getLogger(__name__)

_ASK_S = 2.0  # between two questions
_STEPS = 5  # of a window, at least

Loads = Mapping[str, Load]  # by process


def window_of(before: Loads, now: Loads) -> StepWindow | None:
    """Seconds a step between two measurements of all processes; None: the ranks have taken too few, or
    the processes are others."""
    if before.keys() != now.keys() or any(now[who].count < before[who].count for who in now):
        return None
    taken = {who: _difference(before[who], now[who]) for who in now}
    ranks = [load for who, load in taken.items() if who.startswith("rank")]
    owners = [load for who, load in taken.items() if not who.startswith("rank")]
    if not ranks or not owners or min(load.count for load in (*ranks, *owners)) < _STEPS:
        return None
    return StepWindow(
        step_s=max(load.seconds / load.count for load in ranks),
        exposed_s=max(load.exposed / load.count for load in ranks),
        busy_s=max(load.seconds / load.count for load in owners),
    )


def _difference(before: Load, now: Load) -> Load:
    return Load(now.count - before.count, now.seconds - before.seconds, now.exposed - before.exposed)


class Autoscaling:
    """Looks at a run now and then, and asks for other optimizer actors.

    Knows what processes measure; not how owners change."""

    def __init__(
        self,
        actors: RunActors,
        bounds: Bounds,
        *,
        owners: Callable[[], int],
        request: Callable[[ScaleRequest, str], None],
    ) -> None:
        """``owners``: how many there are, 0 while they change. ``request``: asks for other ones, and says why."""
        self._actors, self._bounds, self._owners, self._request = actors, bounds, owners, request
        self._history = History()
        self._before: Loads | None = None
        self._asked: dict[Any, str] = {}  # calls of the present question -> whose
        self._answers: dict[str, Load] = {}
        self._next_s = 0.0
        self._wanted: ScaleRequest | None = None

    @property
    def calls(self) -> list[Any]:
        """The calls to wait for; give those that end to ``take``."""
        return list(self._asked)

    def patience_s(self, now: float) -> float:
        """Seconds until ``act`` has something to do."""
        return max(0.0, self._next_s - now)

    def act(self, now: float) -> None:
        """Ask every process what it has measured, if it is time, unless the owners change."""
        if now < self._next_s or self._asked:
            return
        self._next_s = now + _ASK_S
        if not self._owners():
            self._before = None
            return
        everyone = {**self._actors.with_shards, **self._actors.ranks}
        self._answers = {}
        self._asked = {control(actor.load).remote(): who for who, actor in everyone.items()}

    def take(self, call: Any) -> bool:
        """One of ``calls`` has ended. False: it is none of them."""
        if call not in self._asked:
            return False
        who = self._asked.pop(call)
        try:
            self._answers[who] = ray.get(call)
        except ray.exceptions.RayError as error:  # its death is noticed elsewhere; the window has another beginning
            log.debug("%s says nothing of its load: %s", who, error)
        if not self._asked:
            self._look(dict(self._answers))
        return True

    def _look(self, now: Loads) -> None:
        owners = self._owners()
        if not owners or self._before is None or self._before.keys() != now.keys():
            self._before = now if owners else None
            return
        window = window_of(self._before, now)
        if window is None:
            if any(now[who].count < load.count for who, load in self._before.items()):
                self._before = now
            return
        self._before = now
        self._history, resize = look(self._history, self._bounds, owners, window)
        if resize is not None:
            self._wanted = ScaleRequest(num_optimizers=resize.owners)
            self._request(self._wanted, resize.why)

    def ended(self, rescaled: Rescaled) -> None:
        self._before = None
        if rescaled.failed is not None and self._wanted is not None and rescaled.id == self._wanted.id:
            self._history = given_up(self._history, rescaled.before)
