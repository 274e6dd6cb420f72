"""Allocates an owner's tensors in slabs, so that ranks can map what it publishes; finds what dead processes of its run
have left there."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rayzero.errors import HandshakeError, StateLostError
from rayzero.layout.model_layout import Shard
from rayzero.owner.memory import HostMemory, ShardRoom, Sizes
from rayzero.protocol.gradient_sum import FormerRank, TotalLine
from rayzero.protocol.messages import FormerShard, ModelSpec
from rayzero.slabs.arena import Arena, ArenaPlan, SlabGroup, SlabPiece, plan_arena
from rayzero.slabs.header import SlabFacts
from rayzero.slabs.slab import FillProgress, Slab
from rayzero.store.shm.recovery import former_ranks
from rayzero.store.shm.shard_lines import LineJournal, ShardLines, TotalLines
from rayzero.store.shm.shared_plan import RANK, SharedPlan, of_lineage
from rayzero.store.shm.words import PARAMS, Places, SlabId

TENSORS = ("params", "state")  # the roles of slabs with tensors


class SlabRoom(ShardRoom):
    """The memory of one record, or total, in a slab."""

    def __init__(self, slab: Slab, offset: int, size: int) -> None:
        """``offset``: in bytes from the slab's start; ``size``: the most that is needed."""
        self._slab, self._offset, self._size = slab, offset, size

    def restore(self) -> None:
        self._slab.allocate(self._offset, self._size)

    def give_back(self, used: int) -> None:
        self._slab.punch(self._offset + used, self._size - used)


class FormerSlabs:
    """The slabs that a dead life of an owner has left.

    Knows files by what they are for; not what is in them."""

    def __init__(self, control: Path, tensors: Mapping[tuple[str, SlabId], Path], *, with_others: bool) -> None:
        """``tensors``: (role, slab) -> file, of all owners. ``with_others``: a file may have shards of several."""
        self._control, self._tensors, self._with_others = control, tensors, with_others

    @classmethod
    def find(cls, spec: ModelSpec, owner: int, directory: Path, epoch: int = 0) -> FormerSlabs | None:
        """Those of an owner of this run, lineage and epoch; None if there are none. Raises HandshakeError if they are
        of two lives."""
        found = of_lineage(spec, directory)
        controls = [slab.path for slab, f in found if is_control(f, epoch) and f.index == owner]
        if len(controls) > 1:
            raise HandshakeError(f"optimizer {owner} of run {spec.run!r} has left slabs of {len(controls)} lives")
        if not controls:
            return None
        tensors = {(f.role, SlabId.of(f)): slab.path for slab, f in found if f.role in TENSORS}
        return cls(controls[0], tensors, with_others=epoch > 0)

    def adopt(self, plan: ArenaPlan, role: str, places: Places, tensor: int) -> Arena:
        """Take over the slabs in which the shards of ``plan`` have this tensor. Raises StateLostError if one is
        missing."""
        at = {key: places.read(_shard(key), tensor, shape) for key, shape in plan.places.items()}
        slabs = sorted({slab for slab, _ in at.values()})
        moved = {
            key: replace(plan.places[key], slab=slabs.index(slab), offset=offset) for key, (slab, offset) in at.items()
        }
        return Arena.adopt(moved, [self._path(role, slab) for slab in slabs], with_others=self._with_others)

    def control(self) -> Slab:
        """Take over the control slab."""
        return Slab.adopt(self._control)

    def _path(self, role: str, slab: SlabId) -> Path:
        try:
            return self._tensors[role, slab]
        except KeyError:
            raise StateLostError(f"slab {slab.number} of role {role!r} is missing: {slab}") from None

    def remove(self) -> None:
        """Remove those that the dead life made: they hold nothing."""
        control = self.control()
        life = control.header.facts
        control.close()
        for (_, slab), path in self._tensors.items():
            if (slab.index, slab.incarnation) == (life.index, life.incarnation):
                Slab.adopt(path).close()


def is_control(facts: SlabFacts, epoch: int) -> bool:
    """Whether a slab is an owner's control slab of this epoch."""
    return facts.role == "control" and facts.kernel != RANK and facts.epoch == epoch


class OwnerSlabs(HostMemory):
    """An owner's tensors in slabs."""

    tier = "shm"

    def __init__(
        self,
        plan: SharedPlan,
        facts: SlabFacts,
        directory: Path | None,
        lines: ShardLines | None = None,
        places: Places | None = None,
        former: FormerSlabs | None = None,
        shards: Sequence[Shard] | None = None,
        totals: TotalLines | None = None,
    ) -> None:
        """``facts``: what the headers of the owner's slabs say, apart from their roles. ``directory``: where the files
        are; None: unnamed files, for one process. ``lines``: where shards have their journals; None: they have none.
        ``places``: where it is recorded what lies where; None: nowhere. ``former``: slabs to take over instead of
        making them; None: there are none. ``shards``: ascending; None: all of the owner's. ``totals``: where it is
        noted what is in totals; None: nowhere."""
        self._totals = totals
        self._plan, self._lines, self._places, self._former = plan, lines, places, former
        self._facts, self._directory = facts, directory
        self._journals: dict[int, LineJournal | None] = {}
        self._who = f"optimizer {facts.index}"
        self._state: list[Arena] = []
        params = plan.params_of(plan.shards_of(facts.index) if shards is None else shards)
        self._params = self._arena(params, "params", PARAMS)

    def _arena(self, plan: ArenaPlan, role: str, tensor: int, first: int = 0) -> Arena:
        """The slabs of ``role`` that have the shards' tensor of this number, taken over, or made from number ``first``
        on."""
        if self._former is not None and self._places is not None:
            return self._former.adopt(plan, role, self._places, tensor)
        facts = replace(self._facts, role=role, number=first)
        arena = Arena.create(plan, facts, self._directory, on_progress=FillProgress(self._who))
        if self._places is not None:
            for key, place in plan.places.items():
                slab = SlabId.of(arena.slabs[place.slab].header.facts)
                self._places.write(_shard(key), tensor, slab, place)
        return arena

    @property
    def arena(self) -> Arena:
        """The published parameters, by shard index."""
        return self._params

    def params(self, groups: Sequence[Sizes], dtype: torch.dtype) -> dict[int, Tensor]:
        return {key: self._params.tensor(key) for group in groups for key, _ in group}

    def state(self, sizes: Sizes, dtype: torch.dtype) -> dict[int, Tensor]:
        groups = [SlabGroup(pieces=(SlabPiece(key=key, numel=numel, dtype=dtype),)) for key, numel in sizes]
        first = sum(len(arena.slabs) for arena in self._state)
        self._state.append(self._arena(plan_arena(groups), "state", PARAMS + 1 + len(self._state), first))
        return {key: self._state[-1].tensor(key) for key, _ in sizes}

    def total_line(self, shard: int) -> TotalLine:
        return TotalLine() if self._totals is None else self._totals.line(shard)

    def total_room(self, shard: int) -> SlabRoom:
        return _room_in(self._state[-1], shard)  # totals come last

    def journal(self, shard: int) -> LineJournal | None:
        if self._lines is None:
            return None
        if shard not in self._journals:
            slices = len(self._plan.spec.layout.slices(self._plan.spec.layout.shards[shard]))
            first = self._plan.first_slices(self._facts.index)[shard]
            self._journals[shard] = self._lines.journal(shard, first, slices)
        return self._journals[shard]

    def former(self, shard: int) -> FormerShard | None:
        if self._former is None or self._lines is None:
            return None
        return self._lines.former(shard, self._journals.get(shard))

    def first_version(self, version: int) -> int:
        if self._lines is None:
            return version
        return self._lines.first_version(version, noted=self._former is not None)

    def former_ranks(self, step: int) -> Mapping[int, FormerRank]:
        if self._former is None or self._directory is None:
            return {}
        return former_ranks(self._plan, self._who, self._directory, step)

    def room(self, shard: int) -> SlabRoom:
        return _room_in(self._params, shard)

    def close(self) -> None:
        """Remove the files; memory that another process still maps lasts until that process unmaps it."""
        for arena in (self._params, *self._state):
            arena.close()

    def leave(self) -> None:
        for arena in (self._params, *self._state):
            arena.close(unlink=False)


def _room_in(arena: Arena, shard: int) -> SlabRoom:
    place = arena.plan.places[shard]
    return SlabRoom(arena.slabs[place.slab], place.offset, place.bytes)


def _shard(key: Hashable) -> int:
    """The shard of a tensor in an arena of an owner."""
    assert isinstance(key, int)
    return key
