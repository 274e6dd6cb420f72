"""Allocates an owner's tensors in slabs, so that ranks can map what it publishes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rayzero.owner.memory import Sizes
from rayzero.slabs.arena import Arena, Group, Piece, plan_arena
from rayzero.slabs.fill_progress import FillProgress
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import Slab
from rayzero.store.shm.plan import SharedPlan
from rayzero.store.shm.shard_lines import LineJournal, ShardLines


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
    ) -> None:
        """``facts``: what the headers of the owner's slabs say, apart from their roles. ``directory``: where the files
        are; None: unnamed files, for one process. ``lines``: where shards have their journals; None: they have none."""
        self._lines = lines
        self._facts, self._directory = facts, directory
        self._who = f"optimizer {facts.index}"
        self._params = Arena.create(
            plan.params(facts.index),
            replace(facts, role="params"),
            directory,
            on_progress=FillProgress(self._who),
        )
        self._state: list[Arena] = []

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
        number = sum(len(arena.slabs) for arena in self._state)
        arena = Arena.create(
            plan_arena(groups),
            replace(self._facts, role="state", number=number),
            self._directory,
            on_progress=FillProgress(self._who),
        )
        self._state.append(arena)
        return {key: arena.tensor(key) for key, _ in sizes}

    def journal(self, shard: int) -> LineJournal | None:
        """See ``HostMemory.journal``."""
        return self._lines.journal(shard) if self._lines is not None else None

    def room(self, shard: int) -> SlabRoom:
        """See ``HostMemory.room``."""
        place = self._params.plan.places[shard]
        return SlabRoom(self._params.slabs[place.slab], place.offset, place.numel)

    def close(self) -> None:
        """Remove the files; memory that another process still maps lasts until that process unmaps it."""
        for arena in (self._params, *self._state):
            arena.close()
