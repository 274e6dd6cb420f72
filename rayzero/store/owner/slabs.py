"""Allocates an owner's tensors in slabs, so that ranks can map what it publishes; finds what dead processes of its run
have left there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rayzero.errors import HandshakeError, StateLostError
from rayzero.owner.memory import FormerRank, Sizes
from rayzero.protocol.messages import FormerShard, ModelSpec, SharedPaths
from rayzero.slabs.arena import Arena, ArenaPlan, Group, Piece, plan_arena
from rayzero.slabs.fill_progress import FillProgress
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import FoundSlab, Slab, list_slabs
from rayzero.store.shm.loop_slab import LoopSlab
from rayzero.store.shm.plan import RANK, SharedPlan
from rayzero.store.shm.shard_lines import LineJournal, ShardLines
from rayzero.store.shm.words import Stamps

_ROLES = ("control", "params", "state")


class SlabRoom:
    """The memory of one record in a slab. A ``ShardRoom`` (owner/memory.py)."""

    def __init__(self, slab: Slab, offset: int, size: int) -> None:
        """``offset``: of the record, in bytes from the slab's start; ``size``: the most that it can need."""
        self._slab, self._offset, self._size = slab, offset, size

    def restore(self) -> None:
        """See ``ShardRoom.restore``."""
        self._slab.allocate(self._offset, self._size)

    def give_back(self, used: int) -> None:
        """See ``ShardRoom.give_back``."""
        self._slab.punch(self._offset + used, self._size - used)


class FormerSlabs:
    """The slabs that a dead life of an owner has left.

    Knows files by what they are for; not what is in them."""

    def __init__(self, found: Mapping[tuple[str, int], Path]) -> None:
        """``found``: (role, number) -> file."""
        self._found = found

    @classmethod
    def find(cls, spec: ModelSpec, owner: int, directory: Path) -> FormerSlabs | None:
        """Those of an owner of this run and lineage; None if there are none. Raises HandshakeError if they are of two
        lives."""
        ours = [(slab.path, f) for slab, f in of_lineage(spec, directory) if f.index == owner and f.role in _ROLES]
        controls = [f for path, f in ours if f.role == "control" and f.kernel != RANK]
        if len(controls) > 1:
            raise HandshakeError(f"optimizer {owner} of run {spec.run!r} has left slabs of {len(controls)} lives")
        if not controls:
            return None
        life = controls[0].incarnation
        return cls({(f.role, f.number): path for path, f in ours if f.incarnation == life})

    def adopt(self, plan: ArenaPlan, role: str, first: int = 0) -> Arena:
        """Take over the slabs of an arena, from number ``first`` on. Raises StateLostError if one is missing."""
        return Arena.adopt(plan, [self._path(role, first + number) for number in range(len(plan.slabs))])

    def control(self) -> Slab:
        """Take over the control slab."""
        return Slab.adopt(self._path("control", 0))

    def _path(self, role: str, number: int) -> Path:
        try:
            return self._found[role, number]
        except KeyError:
            raise StateLostError(f"slab {number} of role {role!r} is missing among {sorted(self._found)}") from None

    def remove(self) -> None:
        """Remove all of them: they hold nothing."""
        for path in self._found.values():
            Slab.adopt(path).close()


def of_lineage(spec: ModelSpec, directory: Path) -> list[tuple[FoundSlab, SlabFacts]]:
    """The slabs of a run and its lineage, of all its processes."""
    found = [(slab, slab.header.facts) for slab in list_slabs(directory) if slab.header is not None]
    return [(slab, facts) for slab, facts in found if (facts.run, facts.lineage) == (spec.run, spec.lineage)]


def former_ranks(plan: SharedPlan, who: str, directory: Path, step: int) -> Mapping[int, FormerRank]:
    """What dead ranks have pushed of ``step``, by rank. If several lives of a rank have, only the last one counts.
    ``who``: the process that maps it, for messages."""
    lives: dict[int, dict[int, dict[str, list[Path]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for slab, facts in of_lineage(plan.spec, directory):
        if not slab.alive and (facts.role == "grads" or (facts.role, facts.kernel) == ("control", RANK)):
            lives[facts.index][facts.incarnation][facts.role].append(slab.path)
    found = {}
    for rank, slabs in lives.items():
        for incarnation in sorted(slabs, reverse=True):
            control, grads = slabs[incarnation]["control"], slabs[incarnation]["grads"]
            if not control or len(grads) < len(plan.gradients().slabs):
                continue  # it died while it made them
            left = _former_rank(plan, who, SharedPaths(str(control[0]), tuple(map(str, grads))))
            if any(pushed.step == step for _, pushed in left.pushed):
                found[rank] = left
                break
    return found


def _former_rank(plan: SharedPlan, who: str, files: SharedPaths) -> FormerRank:
    control = plan.attach(files.control, who, writable=False)
    slabs = [plan.attach(path, who, writable=False, life=control.header.facts) for path in files.tensors]
    slabs.sort(key=lambda slab: slab.header.facts.number)
    arena = Arena(plan.gradients(), slabs)
    gradients = {key: arena.tensor(key) for key in arena.plan.places if isinstance(key, int)}
    left = FormerRank(gradients, Stamps(control, plan).news())
    for slab in (control, *slabs):
        slab.close()  # the tensors keep what is mapped
    return left


def former_loops(plan: SharedPlan, owner: int, directory: Path) -> dict[int, list[LoopSlab]]:
    """The loop slabs of the ranks whose states ``owner`` keeps, by rank, those of earlier lives first; of living ranks,
    too."""
    num_owners, found = plan.shard_map.num_owners, defaultdict(list)
    for slab, facts in of_lineage(plan.spec, directory):
        if facts.role == "loop" and facts.index % num_owners == owner:
            found[facts.index].append(LoopSlab(plan.attach(str(slab.path), f"optimizer {owner}", writable=False)))
    return {rank: sorted(slabs, key=lambda each: each.slab.header.facts.incarnation) for rank, slabs in found.items()}


class OwnerSlabs:
    """An owner's tensors in slabs. A ``HostMemory`` (owner/memory.py)."""

    tier = state_tier = "shm"
    apart = False

    def __init__(
        self,
        plan: SharedPlan,
        facts: SlabFacts,
        directory: Path | None,
        lines: ShardLines | None = None,
        former: FormerSlabs | None = None,
    ) -> None:
        """``facts``: what the headers of the owner's slabs say, apart from their roles. ``directory``: where the files
        are; None: unnamed files, for one process. ``lines``: where shards have their journals; None: they have none.
        ``former``: slabs to take over instead of making them; None: there are none."""
        self._plan, self._lines, self._former = plan, lines, former
        self._facts, self._directory = facts, directory
        self._journals: dict[int, LineJournal | None] = {}
        self._who = f"optimizer {facts.index}"
        self._state: list[Arena] = []
        self._params = self._arena(plan.params(facts.index), "params", 0)

    def _arena(self, plan: ArenaPlan, role: str, first: int) -> Arena:
        """The slabs of ``role`` from number ``first`` on, made or taken over."""
        if self._former is not None:
            return self._former.adopt(plan, role, first)
        facts = replace(self._facts, role=role, number=first)
        return Arena.create(plan, facts, self._directory, on_progress=FillProgress(self._who))

    @property
    def paths(self) -> list[Path]:
        """The files of the params slabs, in order."""
        return [slab.path for slab in self._params.slabs if slab.path is not None]

    @property
    def arena(self) -> Arena:
        """The published parameters, by shard index."""
        return self._params

    def params(self, groups: Sequence[Sizes], dtype: torch.dtype) -> dict[int, Tensor]:
        """See ``HostMemory.params``."""
        return {key: self._params.tensor(key) for group in groups for key, _ in group}

    def state(self, sizes: Sizes, dtype: torch.dtype) -> dict[int, Tensor]:
        """See ``HostMemory.state``."""
        groups = [Group(pieces=(Piece(key=key, numel=numel, dtype=dtype),)) for key, numel in sizes]
        first = sum(len(arena.slabs) for arena in self._state)
        self._state.append(self._arena(plan_arena(groups), "state", first))
        return {key: self._state[-1].tensor(key) for key, _ in sizes}

    def journal(self, shard: int) -> LineJournal | None:
        """See ``HostMemory.journal``."""
        if self._lines is None:
            return None
        if shard not in self._journals:
            slices = len(self._plan.spec.layout.slices(self._plan.spec.layout.shards[shard]))
            first = self._plan.first_slices(self._facts.index)[shard]
            self._journals[shard] = self._lines.journal(shard, first, slices)
        return self._journals[shard]

    def former(self, shard: int) -> FormerShard | None:
        """See ``HostMemory.former``."""
        if self._former is None or self._lines is None:
            return None
        return self._lines.former(shard, self._journals.get(shard))

    def first_version(self, version: int) -> int:
        """See ``HostMemory.first_version``."""
        if self._lines is None:
            return version
        return self._lines.first_version(version, noted=self._former is not None)

    def former_ranks(self, step: int) -> Mapping[int, FormerRank]:
        """See ``HostMemory.former_ranks``."""
        if self._former is None or self._directory is None:
            return {}
        return former_ranks(self._plan, self._who, self._directory, step)

    def room(self, shard: int) -> SlabRoom:
        """See ``HostMemory.room``."""
        place = self._params.plan.places[shard]
        return SlabRoom(self._params.slabs[place.slab], place.offset, place.numel)

    def close(self) -> None:
        """Remove the files; memory that another process still maps lasts until that process unmaps it."""
        for arena in (self._params, *self._state):
            arena.close()
