"""One owner driven by hand: pushes bytes shard by shard, collects, decides. No store, no lead."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

from store.toy import WAIT, Grads, flatten, initial_values
from torch import Tensor

from rayzero.memory.planner import OwnerPlan
from rayzero.owner.owned_model import OwnerTerms
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import (
    Action,
    Contribution,
    Decision,
    FinishReport,
    ModelSpec,
    NormParts,
    Published,
    pack_presence,
)
from rayzero.telemetry.recorder import Recorder


@dataclass
class Owner:
    """A service that has all shards, and what ranks and the lead would say to it."""

    service: ShardService
    spec: ModelSpec

    @property
    def plan(self) -> OwnerPlan:
        """What it was planned to keep."""
        return self.service._attached().model.plan

    def header(self, rank: int, unit: int, step: int, grads: Grads, attempt: int = 0, seq: int = 0) -> Contribution:
        """What goes with a push."""
        present = [slot.name in grads for slot in self.spec.layout.units[unit].slots]
        return Contribution(step=step, attempt=attempt, rank=rank, unit=unit, seq=seq, presence=pack_presence(present))

    def part(self, shard: int, grads: Grads) -> Tensor:
        """A shard's part of its unit's flat gradients."""
        cut = self.spec.layout.shards[shard]
        unit = self.spec.layout.units[cut.unit]
        return flatten(unit, grads, unit.dtype)[cut.start : cut.stop]

    def push_shard(self, push: Contribution, shard: int, grads: Grads) -> bool:
        """Reserve, fill, land; False when the owner did not want it."""
        memory = self.service.reserve_when_free(push, shard).result(WAIT)
        if memory is None:
            return False
        memory.copy_(self.part(shard, grads))
        self.service.landed(push, shard)
        return True

    def push(self, rank: int, grads: Grads, step: int = 0, attempt: int = 0, seq: int = 0) -> None:
        """Push every trained unit."""
        for unit in self.spec.layout.units:
            if unit.trainable:
                push = self.header(rank, unit.index, step, grads, attempt, seq)
                for shard in self.spec.layout.shards_by_unit[unit.index]:
                    self.push_shard(push, shard.index, grads)

    def reports(
        self, step: int = 0, pushes: int = 1, attempts: Sequence[int] | None = None
    ) -> tuple[FinishReport, ...]:
        """Every rank pushed every trained unit ``pushes`` times."""
        counts = tuple(pushes * unit.trainable for unit in self.spec.layout.units)
        tries = attempts or [0] * self.spec.world_size
        return tuple(
            FinishReport(step=step, attempt=attempt, rank=rank, counts=counts) for rank, attempt in enumerate(tries)
        )

    def collect(self, step: int = 0, pushes: int = 1) -> Future[NormParts]:
        """Ask for the norm parts."""
        return self.service.collect(step, self.reports(step, pushes))

    def decision(self, step: int = 0, action: Action = Action.APPLY) -> Decision:
        """Apply without clipping."""
        world = self.spec.world_size
        return Decision(
            step=step, attempts=(0,) * world, action=action, scale=1 / world, norm=1.0, hyper=self.spec.hyper
        )

    def take_step(self, grads: Sequence[Grads], step: int = 0) -> None:
        """Push, collect, apply; the update may still run."""
        for rank, mine in enumerate(grads):
            self.push(rank, mine, step)
        self.collect(step).result(WAIT)
        self.service.apply(self.decision(step)).result(WAIT)

    def drain(self) -> None:
        """Wait until the updater's thread has done what it was given so far."""
        done = threading.Event()
        self.service._updater.submit(done.set)
        assert done.wait(WAIT)

    def read(self, shard: int, version: int, kind: str = "compute") -> Tensor:
        """The owner's memory once the version is there."""
        return self.service.read(shard, version, kind).result(WAIT)

    def read_all(self, version: int, kind: str = "compute") -> list[Tensor]:
        """A copy of every shard."""
        return [self.read(shard.index, version, kind).clone() for shard in self.spec.layout.shards]


@contextmanager
def owner_of(
    spec: ModelSpec,
    *,
    load: bool = True,
    recorder: Recorder | None = None,
    norms_every: int | None = None,
    budget: int | None = None,
) -> Iterator[Owner]:
    """An attached and loaded owner of everything. ``budget``: ``cpu_memory_budget``, in bytes."""
    service = ShardService(0, 1, OwnerTerms(norms_every=norms_every, memory_budget=budget), recorder=recorder)
    try:
        for rank in range(spec.world_size):
            service.attach(rank, spec)
        owner = Owner(service, spec)
        values = initial_values(spec)
        for shard in spec.layout.shards if load else ():
            unit = spec.layout.units[shard.unit]
            service.load(shard.index, flatten(unit, values, unit.dtype).float()[shard.start : shard.stop])
        yield owner
    finally:
        service.close()


class Gate:
    """Holds the updater thread: a publish listener that waits after a shard it was told to hold at."""

    def __init__(self, service: ShardService, hold_at: tuple[int, int] | None = None) -> None:
        """``hold_at``: stop the updater when it tells of this (shard, version), at once if that is published."""
        self.seen: list[list[tuple[int, int]]] = []
        self._hold = hold_at
        self._reached, self._open = threading.Event(), threading.Event()
        service.on_publish(self._listen)

    def wait(self) -> None:
        """Until the updater has stopped there."""
        assert self._reached.wait(WAIT)

    def release(self) -> None:
        """Let it go on."""
        self._open.set()

    def _listen(self, published: Sequence[Published]) -> None:
        self.seen.append([(each.shard, each.version) for each in published])
        if self._hold in self.seen[-1] and not self._reached.is_set():
            self._reached.set()
            assert self._open.wait(WAIT)


def counted(reports: Sequence[FinishReport], counts: tuple[int, ...]) -> tuple[FinishReport, ...]:
    """The same reports with other counts."""
    return tuple(replace(report, counts=counts) for report in reports)
