"""Ranks of one host whose gradients are added before they travel, as one of them sees the others' memory.

See store/shm/host_sums.py for when that happens. Ranks find each other by the files of their run and a digest of its
token; a later life of a rank beside the memory of the earlier ones, which owners may still need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_

import torch
from torch import Tensor

from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import HandshakeError, StoreError
from rayzero.kernels import choose_group_sum
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import Contribution, FinishReport, Pushed
from rayzero.slabs.arena import Arena
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import FoundSlab
from rayzero.store.rank.memory.shared_memory import SharedRank
from rayzero.store.shm.host_sums import Part, acting_sender, senders, settled
from rayzero.store.shm.shared_plan import RANK, SharedPlan, of_lineage
from rayzero.store.shm.words import Arrivals, Finishes, Stamps, bell_of, cell_of, has_left, key_digest

_Seen = Mapping["_Life", tuple[Pushed | None, dict[int, FinishReport]]]  # what each has announced of a unit


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSum:
    """The gradients of a host's ranks for one unit, added up."""

    contribution: Contribution
    values: Tensor  # 1D, unit.numel elements, fp32; only the shards that were asked for are there


class _Life:
    """One life of a rank: what it has announced, and its gradients."""

    def __init__(self, plan: SharedPlan, control: Slab, gradients: Arena) -> None:
        facts = control.header.facts
        self.rank, self.incarnation = facts.index, facts.incarnation
        self.control, self.gradients, self.stamps = control, gradients, Stamps(control, plan)
        self._memory = plan.gradient_memory(gradients)
        self.bell = bell_of(control)
        self._finishes = Finishes(control)
        self._reports: dict[int, FinishReport] = {}  # those that ``has_finished`` has seen
        self._arrivals = Arrivals(control)

    def reports(self) -> dict[int, FinishReport]:
        """Its last finishes, by step."""
        return self._finishes.read()

    def has_finished(self) -> bool:
        """Whether it has announced a finish since the last call."""
        before, self._reports = self._reports, self.reports()
        return self._reports != before

    @property
    def step(self) -> int:
        """The newest step that it has finished; -1: none."""
        return max(self.reports(), default=-1)

    @property
    def has_left(self) -> bool:
        """Whether it sends no more sums."""
        return has_left(self.control)

    def gradient(self, unit: int) -> Tensor | None:
        """What it has announced of a unit: 1D, unit.numel elements; None: it has given that back, because every owner
        has applied it."""
        pushed = self.stamps.read(unit)
        return None if pushed is None else self._memory.at(unit, pushed.place)

    def arrive(self) -> None:
        """Tell it that the caller is there."""
        self._arrivals.add()
        self.bell.ring()

    def close(self) -> None:
        for slab in (self.control, *self.gradients.slabs):
            slab.close(unlink=False)


class HostRanks:
    """The ranks of a host whose gradients come to other hosts as one sum, seen from one of them.

    Knows their memory and what they have announced; not owners, or how bytes travel. Thread-safe."""

    def __init__(self, shared: SharedRank, plan: SharedPlan, ranks: Sequence[int], key: str, threads: int) -> None:
        """``ranks``: of the host, ascending, the caller's included. ``key``: a secret that all ranks of one start of a
        run have, and no others. ``threads``: that add."""
        self.rank, self.ranks, self._plan, self._shared = shared.rank, tuple(ranks), plan, shared
        self._senders = senders(plan.spec.layout.units, self.ranks)
        self._key = key_digest(key)
        self._lock = threading.RLock()
        self._lives: dict[int, list[_Life]] = {rank: [] for rank in ranks}  # the newest first. freed by: close()
        self._others: set[str] = set()  # files that are none of theirs
        self._arrived = -1
        self._adders = ThreadPoolExecutor(
            threads, f"rayzero-rank{self.rank}-adds", initializer=use_torch_threads, initargs=(1,)
        )  # freed by: close()
        self._gone: set[int] = set()  # ranks that had left when ``news`` looked
        self._wanted = False

    def want(self, *, sums: bool) -> None:
        """Whether there are owners elsewhere now; until then, ranks need not know of each other."""
        with self._lock:
            self._wanted = sums
            if sums:
                self._find()

    def on_news(self, look: Callable[[], None]) -> None:
        """Call ``look`` when something was announced, perhaps, and at least once a second."""
        self._shared.on_bell = look

    # ---- who is there

    def _find(self) -> bool:
        """Map ranks that have come; whether there were any."""
        found = of_lineage(self._plan.spec, self._shared.directory)
        known = {str(life.control.path) for lives in self._lives.values() for life in lives} | self._others
        came = []
        for slab, facts in found:
            if (facts.role, facts.kernel) == ("control", RANK) and str(slab.path) not in known:
                grads = [each for each in found if _belongs(each[1], facts)]
                life = self._open(slab, grads) if facts.index in self._lives else None
                came += [] if life is None else [life]
        for life in came:
            self._lives[life.rank] = sorted([*self._lives[life.rank], life], key=lambda each: -each.incarnation)
            if life.rank != self.rank:
                life.arrive()
        return bool(came)

    def _open(self, control: FoundSlab, grads: Sequence[tuple[FoundSlab, SlabFacts]]) -> _Life | None:
        """One life; None: it is of another start of the run, it has only begun, or its memory is gone."""
        plan, who = self._plan, f"rank {self.rank}"
        files = [slab for slab, _ in sorted(grads, key=lambda each: each[1].number)]
        attached: list[Slab] = []
        try:
            attached.append(plan.attach(str(control.path), who, writable=True))
            key = cell_of(attached[0], "key").read()
            if key is not None and key[1] == self._key and len(files) == len(plan.gradients().slabs):
                attached += [plan.attach(str(slab.path), who, writable=False) for slab in files]
                return _Life(plan, attached[0], Arena(plan.gradients(), attached[1:]))
        except (HandshakeError, StoreError):  # it is removed just now, or from another rayzero
            key = 0, b""
        for slab in attached:
            slab.close(unlink=False)
        if key is not None:  # else it will say so when it is ready
            self._others.add(str(control.path))
        return None

    def _forget_former(self) -> None:
        """Leave the memory of lives of which owners have applied everything."""
        for rank, lives in self._lives.items():
            for former in lives[1:]:
                if lives[0].step >= former.step + 3:
                    self._lives[rank] = [life for life in self._lives[rank] if life is not former]
                    self._others.add(str(former.control.path))
                    former.close()

    # ---- what they have announced

    def news(self) -> set[int]:
        """The units of which this rank sends the sums, and of which something has changed since the last call."""
        with self._lock:
            if not self._wanted:
                return set()
            gone = self._left()
            everything, self._gone = gone != self._gone, gone
            mine = {unit for unit in self._senders if self.sends(unit)}
            if (arrived := self._shared.arrivals) != self._arrived or not all(self._lives.values()):
                self._arrived = arrived
                everything = self._find()
            self._forget_former()
            changed: set[int] = set()
            for life in [life for lives in self._lives.values() for life in lives]:
                changed |= {unit for unit, _ in life.stamps.news()}
                everything |= life.has_finished()
            return mine if everything else mine & changed

    def announced(self, unit: int, pushed: Pushed) -> None:
        """This rank has announced what its memory holds: wake the unit's sender, if that may be all."""
        if self._wanted and pushed.count >= self._plan.spec.accumulation_steps:
            sender = acting_sender(self._senders[unit], self.ranks, self._left())
            self._ring([] if sender is None else [sender])

    def finished(self, report: FinishReport) -> None:
        """This rank finishes a step: announce how often it has pushed each unit."""
        self._shared.finished(report)
        if self._wanted:
            self._ring(self.ranks)

    # ---- who sends

    def sends(self, unit: int) -> bool:
        """Whether this rank sends the sums of a unit now."""
        return unit in self._senders and self.rank == acting_sender(self._senders[unit], self.ranks, self._left())

    def _left(self) -> set[int]:
        """The ranks that have left. One that all others have left is still there for itself."""
        with self._lock:
            left = {rank for rank, lives in self._lives.items() if lives and lives[0].has_left}
        return left - {self.rank} if len(left) == len(self.ranks) else left

    @property
    def is_last(self) -> bool:
        """Whether all others have left."""
        return self._left() >= {*self.ranks} - {self.rank}

    @property
    def is_known(self) -> bool:
        """Whether all others have found this one's memory, so that they can read it once this one is gone."""
        return self._shared.arrivals >= len(self.ranks) - 1

    def leave(self) -> None:
        """Let the others send what this rank would."""
        self._shared.left()
        self._ring(self.ranks)

    def _ring(self, ranks: Iterable[int]) -> None:
        with self._lock:
            bells = [self._lives[rank][0].bell for rank in ranks if self._lives[rank]]
        for bell in bells:
            bell.ring()

    # ---- sums

    @property
    def most_elements(self) -> int:
        """Of the largest unit that has a sum."""
        return max((self._plan.spec.layout.units[unit].numel for unit in self._senders), default=0)

    def sum(
        self,
        unit: int,
        shards: Sequence[Shard],
        *,
        after: Contribution | None = None,
        memory: Tensor | None = None,
    ) -> HostSum | None:
        """The sum over ranks of one unit's shards, of the newest step of which every part is settled. None: there is
        none, or none but ``after``, which the caller has sent; or no rank has a gradient. ``memory``: where it goes,
        1D, at least the unit's elements, fp32; None: memory of its own."""
        layout = self._plan.spec.layout.units[unit]
        found = self._parts(layout)
        if found is None:
            return None
        step, parts = found
        summands = tuple(part.summand for part, _ in parts)
        pushing = [(part.presence, life) for part, life in parts if part.summand.pushes]
        there = [(presence, values) for presence, life in pushing if (values := life.gradient(unit)) is not None]
        if not there or len(there) < len(pushing):
            return None
        if after is not None and (step < after.step or (step, summands) == (after.step, after.summands)):
            return None
        present = [int.from_bytes(presence, "little") for presence, _ in there]
        contribution = Contribution(
            step=step,
            attempt=0,
            rank=self.ranks[0],
            unit=unit,
            seq=0,
            presence=reduce(or_, present).to_bytes((len(layout.slots) + 7) // 8, "little"),
            summands=summands,
        )
        values = (
            torch.empty(layout.numel, dtype=torch.float32, device="cpu") if memory is None else memory[: layout.numel]
        )
        add_up = partial(_add, values, layout, gradients=[gradients for _, gradients in there], present=present)
        list(self._adders.map(add_up, shards))
        return HostSum(contribution=contribution, values=values)

    def newest_step(self, unit: int) -> int | None:
        """The newest step of which ``sum`` has one; None: of none."""
        parts = self._parts(self._plan.spec.layout.units[unit])
        return None if parts is None else parts[0]

    def _parts(self, unit: UnitLayout) -> tuple[int, list[tuple[Part, _Life]]] | None:
        """(the newest step of which every rank's part is settled, (part, whose) of each rank)."""
        with self._lock:
            lives = {rank: list(each) for rank, each in self._lives.items()}
        seen = {life: (life.stamps.read(unit.index), life.reports()) for each in lives.values() for life in each}
        steps = {pushed.step for pushed, _ in seen.values() if pushed is not None}
        steps |= {step for _, reports in seen.values() for step in reports}
        for step in sorted(steps, reverse=True):
            found = [self._part(unit.index, step, rank, lives[rank], seen) for rank in self.ranks]
            whole = [each for each in found if each is not None]
            if len(whole) == len(found):
                return step, whole
        return None

    def _part(self, unit: int, step: int, rank: int, lives: Sequence[_Life], seen: _Seen) -> tuple[Part, _Life] | None:
        """The part of a rank in its newest life that has one."""
        planned = self._plan.spec.accumulation_steps
        for life in lives:
            pushed, reports = seen[life]
            part = settled(rank, unit, step, planned, pushed, reports.get(step))
            if part is not None:
                return part, life
        return None

    def has(self, step: int) -> bool:
        """Whether what every rank has pushed of ``step``, which is decided, can still be read here."""
        with self._lock:
            return all(any(life.step >= step for life in lives) for lives in self._lives.values())

    def close(self) -> None:
        """Leave the others' memory. Idempotent."""
        with self._lock:
            lives, self._lives = self._lives, {rank: [] for rank in self.ranks}
        self._adders.shutdown()
        for life in [life for each in lives.values() for life in each]:
            life.close()


def _belongs(facts: SlabFacts, control: SlabFacts) -> bool:
    """Whether a slab has gradients of the rank and life of a control slab."""
    return facts.role == "grads" and (facts.index, facts.incarnation) == (control.index, control.incarnation)


# ---- adding


def _add(out: Tensor, unit: UnitLayout, shard: Shard, *, gradients: Sequence[Tensor], present: Sequence[int]) -> None:
    """Add gradients of ranks of one group, in their order, over one shard's range. ``gradients``: the unit's, of each
    rank, flat. ``present``: bits of the parameters that it has. Those that no rank has, and padding, are zero."""
    total, whole = choose_group_sum(), (1 << len(unit.slots)) - 1
    if all(bits & whole == whole for bits in present):
        total.sum_group(out[shard.start : shard.stop], [each[shard.start : shard.stop] for each in gradients])
        return
    out[shard.start : shard.stop].zero_()
    for start, stop, members in _ranges(unit, shard, present):
        total.sum_group(out[start:stop], [gradients[each][start:stop] for each in members])


def _ranges(unit: UnitLayout, shard: Shard, bits: Sequence[int]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(start, stop, which parts have it) of each parameter in a shard that any part has."""
    for i, slot in enumerate(unit.slots):
        start, stop = max(slot.start, shard.start), min(slot.stop, shard.stop)
        members = tuple(part for part, each in enumerate(bits) if each >> i & 1)
        if start < stop and members:
            yield start, stop, members
