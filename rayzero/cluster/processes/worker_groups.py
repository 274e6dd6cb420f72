"""Where ranks that another library starts learn which owners they have: an actor between them and the driver.

Such a library (Ray Train) knows groups: all ranks of a run at a time. If a worker dies, it ends the group and starts
another one. The ranks of a group ask here, and wait; the driver finds out what the group goes on from, and opens it.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import ray

from rayzero.cluster.janitor import Remains
from rayzero.protocol.ownership import Ownership
from rayzero.security.credentials import Credentials

_LOOK_S = 0.5  # between two looks whether a rank still wants its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """A group of ranks that asks for owners."""

    name: str  # no other group's
    run: str  # in the library: a group continues the one before if it has the same
    world_size: int
    nodes: tuple[str, ...]  # of its ranks (ids)
    resume: str | None  # the checkpoint that its loop would resume from


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStart:
    """What the ranks of a group begin with."""

    addresses: tuple[str, ...]  # of the owners, by index
    ownership: Ownership  # who owns what
    lineage: str  # of the run's states in shared memory
    life: int  # of every rank; 0: a fresh start
    repeats: int | None  # see RankContext
    resume: str | None  # the checkpoint that gave the run its first values
    token: str = field(repr=False)  # owners ask for it in every call
    tls: Credentials | None = None  # what every rank shows to owners; None: it uses no TLS
    remains: Remains | None = None  # what becomes of a rank's slabs if it is killed; None: others see to them


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    """A group has no owners, or has them no more."""

    why: str


class WorkerGroups:
    """The actor. Knows the newest group and what it begins with; not why."""

    def __init__(self) -> None:
        self._news = asyncio.Condition()
        self._newest: WorkerGroup | None = None
        self._former: set[str] = set()  # names of groups before it
        self._processes: dict[int, str] = {}  # of the newest, by rank
        self._start: GroupStart | None = None  # of the newest, once it is open
        self._failed: str | None = None  # why the newest has no owners any more
        self._over: str | None = None  # why no group ever has

    # ---- for ranks

    async def join(self, group: WorkerGroup, rank: int, process: str) -> GroupStart | GroupEnded:
        """Ask for a rank's place in ``group``, which is the newest if nobody has asked for it before; waits until the
        driver has opened it. ``process``: whose place it is, the same in every call."""
        async with self._news:
            if group.name not in self._former and not self._is_newest(group.name):
                self._begin(group)
            if self._is_newest(group.name) and self._processes.setdefault(rank, process) != process:
                before = self._processes[rank]
                return GroupEnded(
                    why=f"rank {rank} was {before} and is now {process}, in the same group of workers; start the whole "
                    "group again, not one of its workers"
                )
            return await self._answer(group.name, None)

    def _begin(self, group: WorkerGroup) -> None:
        if self._newest is not None:
            self._former.add(self._newest.name)
        self._newest, self._processes, self._start, self._failed = group, {}, None, None
        self._news.notify_all()

    async def news(self, group: str, known: GroupStart) -> GroupStart | GroupEnded:
        """What the ranks of the group would begin with now, as soon as it is not ``known``: an owner has moved, or
        ranks are to show another certificate."""
        async with self._news:
            return await self._answer(group, known)

    async def _answer(self, group: str, known: GroupStart | None) -> GroupStart | GroupEnded:
        await self._news.wait_for(lambda: self._end_of(group) is not None or self._start not in (None, known))
        end = self._end_of(group)
        if end is not None:
            return end
        assert self._start is not None
        return self._start

    def _end_of(self, group: str) -> GroupEnded | None:
        if self._over is not None:
            return GroupEnded(why=self._over)
        if group in self._former:
            return GroupEnded(why="another group of workers has been started in the place of this one")
        return None if self._failed is None else GroupEnded(why=self._failed)

    # ---- for the driver

    async def next_group(self, after: str | None) -> WorkerGroup:
        """The newest group, as soon as it is not ``after``."""
        async with self._news:
            await self._news.wait_for(lambda: self._newest is not None and self._newest.name != after)
            assert self._newest is not None
            return self._newest

    async def open(self, group: str, start: GroupStart) -> None:
        """Answer the ranks of ``group``, unless there is a newer one; also anew, once an owner is at another address or
        ranks are to show something else."""
        async with self._news:
            if self._is_newest(group):
                self._start = start
                self._news.notify_all()

    async def fail(self, group: str, why: str) -> None:
        """``group`` has lost its owners; the next one gets others."""
        async with self._news:
            if self._is_newest(group):
                self._failed = why
                self._news.notify_all()

    async def end(self, why: str) -> None:
        """No group gets owners any more."""
        async with self._news:
            self._over = why
            self._news.notify_all()

    def _is_newest(self, group: str) -> bool:
        return self._newest is not None and self._newest.name == group


@dataclass(frozen=True, slots=True)
class GroupsAsked:
    """The actor, as ranks reach it."""

    actor: Any

    def join(self, group: WorkerGroup, rank: int, process: str) -> GroupStart | GroupEnded:
        return _answer(self.actor.join.remote(group, rank, process))

    def news(self, group: str, known: GroupStart, unwanted: threading.Event) -> GroupStart | GroupEnded | None:
        """See ``WorkerGroups.news``; None once the answer is ``unwanted``."""
        call = self.actor.news.remote(group, known)
        while not ray.wait([call], timeout=_LOOK_S)[0]:
            if unwanted.is_set():
                return None
        return _answer(call)


def _answer(call: Any) -> GroupStart | GroupEnded:
    try:
        answer: GroupStart | GroupEnded = ray.get(call)
    except ray.exceptions.RayError as error:
        said = str(error).strip().partition("\n")[0]
        return GroupEnded(why=f"the process that knows them has ended, perhaps with its driver: {said}")
    return answer
