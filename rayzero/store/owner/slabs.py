"""Allocates an owner's tensors in slabs, so that ranks can map what it publishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rayzero.errors import HandshakeError
from rayzero.owner.memory import Sizes
from rayzero.protocol.messages import FormerShard
from rayzero.slabs.arena import Arena, ArenaPlan, Group, Piece, plan_arena
from rayzero.slabs.fill_progress import FillProgress
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab, list_slabs
from rayzero.store.shm.plan import RANK, SharedPlan
from rayzero.store.shm.shard_lines import LineJournal, ShardLines

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
    def find(cls, run: str, owner: int, directory: Path) -> FormerSlabs | None:
        """Those of a run's owner; None if there are none. Raises HandshakeError if they are of two lives."""
        headers = [(found.path, found.header.facts) for found in list_slabs(directory) if found.header is not None]
        ours = [(path, f) for path, f in headers if (f.run, f.index) == (run, owner) and f.role in _ROLES]
        controls = [f for path, f in ours if f.role == "control" and f.kernel != RANK]
        if len(controls) > 1:
            raise HandshakeError(f"optimizer {owner} of run {run!r} has left slabs of {len(controls)} lives")
        if not controls:
            return None
        life = controls[0].incarnation
        return cls({(f.role, f.number): path for path, f in ours if f.incarnation == life})

    def adopt(self, plan: ArenaPlan, role: str, first: int = 0) -> Arena:
        """Take over the slabs of an arena, from number ``first`` on. Raises HandshakeError if one is missing."""
        return Arena.adopt(plan, [self._path(role, first + number) for number in range(len(plan.slabs))])

    def control(self) -> Slab:
        """Take over the control slab."""
        return Slab.adopt(self._path("control", 0))

    def _path(self, role: str, number: int) -> Path:
        try:
            return self._found[role, number]
        except KeyError:
            raise HandshakeError(f"slab {number} of role {role!r} is missing among {sorted(self._found)}") from None

    def remove(self) -> None:
        """Remove all of them: they hold nothing."""
        for path in self._found.values():
            Slab.adopt(path).close()


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

    def room(self, shard: int) -> SlabRoom:
        """See ``HostMemory.room``."""
        place = self._params.plan.places[shard]
        return SlabRoom(self._params.slabs[place.slab], place.offset, place.numel)

    def close(self) -> None:
        """Remove the files; memory that another process still maps lasts until that process unmaps it."""
        for arena in (self._params, *self._state):
            arena.close()
