"""Who of a run was heard of when: told by the processes, read by the coordinator's exporter."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from rayzero.telemetry.names import ACTORS, HEARTBEAT_AGE_SECONDS, SHARD_IMBALANCE
from rayzero.telemetry.recorder import Reading

__all__ = ["BEAT_S", "Heartbeats", "Pulse"]

BEAT_S = 2.0  # between two heartbeats of a process
LATE_S = 10.0  # a process that was not heard of for as long is late


class Heartbeats:
    """The last heartbeat of each process, and what owners have worked.

    Knows names such as "rank 0"; not what a late process means for the run (supervision.py)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, float] = {}  # by process
        self._worked: dict[str, float] = {}  # owners: update seconds, all told
        self._before: dict[str, float] = {}  # the same when the imbalance was last taken
        self._imbalance: float | None = None

    def enlist(self, everyone: Sequence[str]) -> None:
        """Who is to be heard of from now on."""
        now = self._clock()
        self._heard = {who: self._heard.get(who, now) for who in everyone}
        self._worked = {who: seconds for who, seconds in self._worked.items() if who in self._heard}

    def beat(self, who: str, update_seconds: float | None) -> None:
        """A process is there; ``update_seconds``: an owner's, since its start."""
        if who not in self._heard:
            return
        self._heard[who] = self._clock()
        if update_seconds is not None:
            self._worked[who] = update_seconds
            self._compare()

    def _compare(self) -> None:
        """Once every owner has told of more work: how uneven it was."""
        owners = [who for who in self._heard if kind_of(who) == "optimizer"]
        done = [self._worked.get(who, 0.0) - self._before.get(who, 0.0) for who in owners]
        if done and min(done) > 0:
            self._imbalance = max(done) / fmean(done)
            self._before = dict(self._worked)

    def readings(self) -> Iterator[Reading]:
        """What the coordinator exports of it."""
        now, states = self._clock(), Counter[tuple[str, str]]()
        for who, heard in list(self._heard.items()):
            age = now - heard
            states[kind_of(who), "late" if age > LATE_S else "ready"] += 1
            yield Reading(HEARTBEAT_AGE_SECONDS, age, {"process": who})
        for kind in ("rank", "optimizer"):
            counts = {state: states[kind, state] for state in ("ready", "late")}
            for state, count in {"desired": sum(counts.values()), **counts}.items():
                yield Reading(ACTORS, count, {"kind": kind, "state": state})
        if self._imbalance is not None:
            yield Reading(SHARD_IMBALANCE, self._imbalance, {})


def kind_of(who: str) -> str:
    """``"rank 0"`` -> ``"rank"``."""
    return who.partition(" ")[0]


class Pulse:
    """Tells the coordinator, every ``BEAT_S``, that this process is there; waits for no answer."""

    def __init__(self, who: str, coordinator: Any, update_seconds: Callable[[], float] | None) -> None:
        """``coordinator``: its actor handle. ``update_seconds``: see :meth:`Heartbeats.beat`."""
        self._who, self._coordinator, self._update_seconds = who, coordinator, update_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rayzero-pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while True:
            worked = None if self._update_seconds is None else self._update_seconds()
            self._coordinator.beat.remote(self._who, worked)
            if self._ended.wait(BEAT_S):
                return

    def close(self) -> None:
        """Be silent. Idempotent."""
        self._ended.set()
        self._thread.join()
