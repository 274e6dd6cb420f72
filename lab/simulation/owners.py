"""A group of owners in simulated time: norms, updates and publications, in the order of an owner's one thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lab.simulation.fluid import Demand, Fluid, Line
from lab.simulation.groups import OwnerGroup, Part
from lab.simulation.resources import Resources
from rayzero.concurrency.futures import settle
from rayzero.errors import StoreError, UnsupportedError
from rayzero.layout.model_layout import ModelLayout, UnitLayout
from rayzero.owner.gradients.contributions import EARLY
from rayzero.protocol.messages import Decision, FileEntry, FinishReport, NormParts, Record, Write

__all__ = ["Owners", "Peer", "Update"]

FP32 = 4  # bytes
Told = Callable[[list[int]], object]  # units that are published


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What the update of one element reads and writes; bytes."""

    contributions: int  # gradients that are added up
    state_bytes: float  # of the optimizer's states, per element
    sums: bool = False  # of ranks of a host, in fp32
    total: bool = False  # the norm's pass writes the sum over ranks, which the update reads

    def gradients(self, unit: UnitLayout, part: Part) -> int:
        """Bytes of the gradients of a part, which its norm reads; and its update once more, if there is no total."""
        return self.contributions * part.elements * (FP32 if self.sums else unit.dtype.itemsize)

    def squared(self, unit: UnitLayout, part: Part) -> int:
        """Bytes that the norm's pass over a part reads and writes."""
        return self.gradients(unit, part) + self.total * FP32 * part.elements

    def states(self, unit: UnitLayout, part: Part) -> float:
        """Bytes that the update of a part reads and writes beside gradients: master, states, what it publishes."""
        published = unit.dtype.itemsize if unit.dtype.itemsize < FP32 else 0
        return part.elements * (2 * (FP32 + self.state_bytes) + published)


@dataclass(slots=True)
class _Listeners:
    """Ranks that hear of publications in the same way."""

    told: Told
    remote: int  # how many are told by messages; 0: they see it in shared memory
    pending: list[int] = field(default_factory=list)
    busy: bool = False


class Owners:
    """One group of owners.

    Knows counts and bytes; not ranks, nor what a step decides."""

    def __init__(
        self,
        fluid: Fluid,
        resources: Resources,
        group: OwnerGroup,
        layout: ModelLayout,
        update: Update,
        *,
        expected: int,
        early: bool,
    ) -> None:
        """``expected``: pushes of each unit in a step. ``early``: norms are summed as pushes come."""
        self.group, self._fluid, self._resources, self._layout = group, fluid, resources, layout
        self._update, self._expected, self._early = update, expected, early
        self._machine = resources.machine
        self.parts = dict(group.parts)
        self.published = dict.fromkeys(self.parts, 0)  # unit -> version
        self.updater = Line(fluid)
        self._notices = Line(fluid)
        self._listeners: list[_Listeners] = []
        self._came: Counter[int] = Counter()
        self._ripe: list[int] = []
        self._summed: set[int] = set()
        self._collecting = False
        self._version = 0

    def listen(self, told: Told, remote: int) -> None:
        """Tell ``told`` of every publication; see ``_Listeners``."""
        self._listeners.append(_Listeners(told, remote))

    # ---- gradients

    def landed(self, unit: int, pushes: int) -> None:
        """So many pushes of a unit have landed here."""
        self._came[unit] += pushes
        if self._came[unit] == self._expected and self._early:
            self._ripe.append(unit)
            if sum(self.parts[each].elements for each in self._ripe) >= EARLY:
                self._sum(self._ripe)
                self._ripe = []

    def _sum(self, units: list[int]) -> None:
        for unit in units:
            self._summed.add(unit)
            for _ in range(self.parts[unit].shards):
                self.updater.add_later(partial(self._begin_sum, unit), lambda: None)

    def _begin_sum(self, unit: int) -> tuple[float, Sequence[Demand]]:
        """Sum a shard of a unit: by one thread while nobody waits for it."""
        part = self.parts[unit]
        size = self._update.squared(self._layout.units[unit], part) / part.shards
        threads = None if self._collecting else 1
        load = self._resources.passes(self.group, [(size, self._reads(self._machine.norm_core))], 0, threads)
        return load.seconds, load.demands

    def _reads(self, alone: float) -> float:
        """Bytes of gradients that a thread reads per second; ``alone``: if there is nothing to add up."""
        return alone if self._update.contributions == 1 else self._machine.sum_core

    # ---- what the lead asks

    def collect(self, then: Callable[[], object]) -> None:
        """Sum what is not summed yet; call ``then`` at the end. Raises StoreError if a counted push is not here."""
        trained = [unit for unit in self.parts if self._layout.units[unit].trainable]
        if missing := [unit for unit in trained if self._came[unit] != self._expected]:
            raise StoreError(f"units {missing} were collected before all their pushes had landed")
        self._ripe, self._collecting = [], True
        self._sum([unit for unit in trained if unit not in self._summed])
        self.updater.add(0.0, (), then)

    def apply(self) -> None:
        """Update and publish every part, in forward order."""
        self._version += 1
        self._collecting = False
        self._came.clear()
        self._summed.clear()
        for unit, part in self.parts.items():
            layout, adam = self._layout.units[unit], self._machine.adam_core
            if self._update.total:
                gradients = (FP32 * part.elements, adam)
            else:
                gradients = (self._update.gradients(layout, part), self._reads(adam))
            sizes = [gradients, (self._update.states(layout, part), adam)]
            shards = part.shards if layout.trainable else 0
            load = self._resources.passes(self.group, sizes if layout.trainable else (), shards)
            self.updater.add(load.seconds, load.demands, partial(self._publish, unit))

    def _publish(self, unit: int) -> None:
        self.published[unit] += 1
        for each in self._listeners:
            each.pending.append(unit)
            if not each.busy:
                self._tell(each)

    def _tell(self, each: _Listeners) -> None:
        """Tell of all that is new. What is published meanwhile goes in the next message, as from a PublishStream."""
        each.busy = bool(each.remote)
        units, each.pending = each.pending, []

        def sent() -> None:
            each.busy = False
            self._fluid.after(self._resources.costs.latency_s, lambda: each.told(units))
            if each.pending:
                self._tell(each)

        if not each.remote:
            sent()
            return
        load = self._resources.notices(self.group, each.remote)
        self._notices.add(load.seconds, load.demands, sent)


class Peer:
    """One owner as the real lead reaches it; see ``OwnerPeer``. The owners of a group answer together."""

    def __init__(self, ask: Callable[[str, Peer, Future[Any]], object], parts: NormParts) -> None:
        """``ask``: takes what is asked, who, and the answer's future. ``parts``: what its norm consists of."""
        self._ask, self.parts = ask, parts

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """See ``OwnerPeer``."""
        answer: Future[NormParts] = Future()
        self._ask("collect", self, answer)
        return answer

    def apply(self, decision: Decision) -> Future[None]:
        """See ``OwnerPeer``."""
        answer: Future[None] = Future()
        self._ask("apply", self, answer)
        return answer

    def redo(self, record: Record) -> Future[None]:
        """Refused: nobody dies here."""
        raise UnsupportedError("a simulated owner redoes nothing: the simulation has no deaths")

    def begin_checkpoint(self, step: int, directory: Path) -> Future[None]:
        """Refused: a simulated step has no checkpoint."""
        raise UnsupportedError("a simulated owner writes no checkpoint: the simulation is of steps alone")

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """Refused: a simulated step has no checkpoint."""
        raise UnsupportedError("a simulated owner writes no checkpoint: the simulation is of steps alone")

    def write(self, number: int, write: Write) -> Future[None]:
        """Refused: ranks write nothing here."""
        raise UnsupportedError("a simulated owner takes no writes: the simulation is of steps alone")

    def trouble(self) -> str | None:
        """See ``OwnerPeer``: nothing breaks here."""
        return None

    def abort(self, error: StoreError) -> None:
        """Raise why the real lead would end the run."""
        raise error


def answer_all(answers: list[tuple[Peer, Future[Any]]], step: int, what: str) -> None:
    """Settle the answers of a group's owners to one question."""
    for peer, answer in answers:
        settle(answer, NormParts(step=step, parts=peer.parts.parts) if what == "collect" else None)
