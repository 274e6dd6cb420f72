"""Ranks of one host whose gradients are added before they travel, as their host's door sees their memory.

See store/shm/words.py for when that happens. The door finds them by the files of their run and a digest of its
token; a later life of a rank beside the memory of the earlier ones, which owners may still need."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from pathlib import Path

from torch import Tensor

from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import HandshakeError, StoreError
from rayzero.kernels import choose_adder
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import Contribution, FinishReport, Pushed
from rayzero.slabs.arena import Arena
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab
from rayzero.slabs.sweep import FoundSlab
from rayzero.store.shm.shared_plan import RANK, SharedPlan, of_lineage
from rayzero.store.shm.words import Finishes, Part, Stamps, cell_of, key_digest, settled

_Seen = Mapping["_Life", tuple[Sequence[Pushed], dict[int, FinishReport]]]  # what each has announced of a unit


class _Life:
    """One life of a rank: what it has announced, and its gradients."""

    def __init__(self, plan: SharedPlan, control: Slab, gradients: Arena) -> None:
        facts = control.header.facts
        self.rank, self.incarnation = facts.index, facts.incarnation
        self.control, self.gradients, self.stamps = control, gradients, Stamps(control, plan)
        self._memory = plan.gradient_memory(gradients)
        self._finishes = Finishes(control)
        self._reports: dict[int, FinishReport] = {}  # those that ``has_finished`` has seen

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

    def gradient(self, unit: int, part: Part) -> Tensor | None:
        """What it has pushed of a unit in a round: 1D, unit.numel elements; None: it has given that back, because no
        owner needs it any more."""
        assert part.pushed is not None
        return self._memory.at(unit, part.pushed.place) if part.pushed in self.stamps.read(unit) else None

    def close(self) -> None:
        for slab in (self.control, *self.gradients.slabs):
            slab.close(unlink=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledUnit:
    """What the ranks have pushed of a unit in one round of a step."""

    contribution: Contribution
    parts: tuple[tuple[Part, _Life], ...]  # of each rank that has a gradient, ascending


class SummedRanks:
    """The ranks of a host whose gradients come to other hosts as one sum.

    Knows their memory and what they have announced; not owners, or how bytes travel. Thread-safe."""

    def __init__(
        self, plan: SharedPlan, directory: Path, ranks: Sequence[int], key: str, who: str, threads: int
    ) -> None:
        """``ranks``: ascending. ``key``: a secret that all ranks of one start of a run have, and no others. ``who``:
        the process that maps their memory, for messages. ``threads``: that add up a unit."""
        self.ranks, self._plan, self._directory, self._who = tuple(ranks), plan, directory, who
        self._key = key_digest(key)
        self._lock = threading.RLock()
        self._lives: dict[int, list[_Life]] = {rank: [] for rank in ranks}  # the newest first. freed by: close()
        self._others: set[str] = set()  # files that are none of theirs
        self._adders = ThreadPoolExecutor(
            threads, f"{who}-adds", initializer=use_torch_threads, initargs=(1,)
        )  # freed by: close()

    # ---- who is there

    def find(self) -> None:
        """Map the memory of ranks that have come."""
        with self._lock:
            found = of_lineage(self._plan.spec, self._directory)
            known = {str(life.control.path) for lives in self._lives.values() for life in lives} | self._others
            for slab, facts in found:
                if (facts.role, facts.kernel) == ("control", RANK) and str(slab.path) not in known:
                    grads = [each for each in found if _belongs(each[1], facts)]
                    life = self._open(slab, grads) if facts.index in self._lives else None
                    if life is not None:
                        lives = [*self._lives[life.rank], life]
                        self._lives[life.rank] = sorted(lives, key=lambda each: -each.incarnation)

    def _open(self, control: FoundSlab, grads: Sequence[tuple[FoundSlab, SlabFacts]]) -> _Life | None:
        """One life; None: it is of another start of the run, it has only begun, or its memory is gone."""
        plan = self._plan
        files = [slab for slab, _ in sorted(grads, key=lambda each: each[1].number)]
        attached: list[Slab] = []
        try:
            attached.append(plan.attach(str(control.path), self._who, writable=False))
            key = cell_of(attached[0], "key").read()
            if key is not None and key[1] == self._key and len(files) == len(plan.gradients().slabs):
                attached += [plan.attach(str(slab.path), self._who, writable=False) for slab in files]
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
        """The trained units of which something has changed since the last call."""
        with self._lock:
            self._forget_former()
            everything, changed = False, set[int]()
            for life in [life for lives in self._lives.values() for life in lives]:
                changed |= {unit for unit, _ in life.stamps.news()}
                everything |= life.has_finished()
        return self.units if everything else changed

    @property
    def units(self) -> set[int]:
        """All that have sums."""
        return {unit.index for unit in self._plan.spec.layout.units if unit.trainable}

    @property
    def most_elements(self) -> int:
        """Of the largest unit that has a sum."""
        return max((self._plan.spec.layout.units[unit].numel for unit in self.units), default=0)

    # ---- sums

    def settled(self, unit: int, number: int = 0) -> SettledUnit | None:
        """What is to be added of a unit in a round, counted from 0: of the newest step of which every part of the first
        round is settled, and any rank has a gradient. None: there is none, or not all of it yet."""
        layout = self._plan.spec.layout.units[unit]
        found = self._parts(layout, number)
        if found is None:
            return None
        step, parts = found
        pushing = tuple((part, life) for part, life in parts if part.pushed is not None)
        present = reduce(or_, (_bits(part) for part, _ in pushing))
        contribution = Contribution(
            step=step,
            attempt=0,
            rank=self.ranks[0],
            unit=unit,
            seq=number,
            presence=present.to_bytes((len(layout.slots) + 7) // 8, "little"),
            summands=tuple(part.summand for part, _ in parts),
        )
        return SettledUnit(contribution=contribution, parts=pushing)

    def add(self, settled: SettledUnit, shards: Sequence[Shard], memory: Tensor) -> Tensor | None:
        """Add up some shards of a unit, in rank order. ``memory``: 1D, at least the unit's elements, fp32. Returns its
        first unit.numel elements; None: a rank has given its part back, because no owner needs it any more."""
        unit = self._plan.spec.layout.units[settled.contribution.unit]
        gradients = [life.gradient(unit.index, part) for part, life in settled.parts]
        there = [each for each in gradients if each is not None]
        if len(there) < len(gradients):
            return None
        values = memory[: unit.numel]
        present = [_bits(part) for part, _ in settled.parts]
        list(self._adders.map(partial(_add, values, unit, gradients=there, present=present), shards))
        return values

    def _parts(self, unit: UnitLayout, number: int) -> tuple[int, list[tuple[Part, _Life]]] | None:
        """(the newest step of which every rank's part of the first round is settled and any has a gradient, (part of
        round ``number``, whose) of each rank). Later rounds are of the same lives as the first."""
        with self._lock:
            lives = {rank: list(each) for rank, each in self._lives.items()}
        seen = {life: (life.stamps.read(unit.index), life.reports()) for each in lives.values() for life in each}
        steps = {pushed[0].step for pushed, _ in seen.values() if pushed}
        steps |= {step for _, reports in seen.values() for step in reports}

        def parts_of(step: int, number: int, lives: Mapping[int, Sequence[_Life]]) -> list[tuple[Part, _Life]] | None:
            found = [self._part(unit.index, step, number, rank, lives[rank], seen) for rank in self.ranks]
            whole = [each for each in found if each is not None]
            return whole if len(whole) == len(found) and any(part.pushed is not None for part, _ in whole) else None

        for step in sorted(steps, reverse=True):
            if (first := parts_of(step, 0, lives)) is not None:
                now = {life.rank: [life] for _, life in first}
                found = first if number == 0 else parts_of(step, number, now)
                return None if found is None else (step, found)
        return None

    def _part(
        self, unit: int, step: int, number: int, rank: int, lives: Sequence[_Life], seen: _Seen
    ) -> tuple[Part, _Life] | None:
        """The part of a rank in its newest life that has one."""
        for life in lives:
            pushed, reports = seen[life]
            part = settled(rank, unit, step, number, pushed, reports.get(step))
            if part is not None:
                return part, life
        return None

    def close(self) -> None:
        """Leave their memory. Idempotent."""
        with self._lock:
            lives, self._lives = self._lives, {rank: [] for rank in self.ranks}
        self._adders.shutdown()
        for life in [life for each in lives.values() for life in each]:
            life.close()


def _belongs(facts: SlabFacts, control: SlabFacts) -> bool:
    """Whether a slab has gradients of the rank and life of a control slab."""
    return facts.role == "grads" and (facts.index, facts.incarnation) == (control.index, control.incarnation)


def _bits(part: Part) -> int:
    return 0 if part.pushed is None else int.from_bytes(part.pushed.presence, "little")


# ---- adding


def _add(out: Tensor, unit: UnitLayout, shard: Shard, *, gradients: Sequence[Tensor], present: Sequence[int]) -> None:
    """Add gradients of ranks of one group, in their order, over one shard's range. ``gradients``: the unit's, of each
    rank, flat. ``present``: bits of the parameters that it has. Those that no rank has, and padding, are zero."""
    total, whole = choose_adder(), (1 << len(unit.slots)) - 1
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
