"""One shard of an owner: its memory, its version, and where it is in its life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate

import torch
from torch import Tensor

from rayzero.errors import StoreError
from rayzero.layout.model_layout import ALIGN, ModelLayout, Shard, SlotSlice, UnitLayout, aligned
from rayzero.messages import COMPUTE, MASTER


class ShardState(Enum):
    """What a shard's memory holds."""

    EMPTY = auto()  # allocated, no values yet
    PUBLISHED = auto()  # version `published`, readable; ranks land gradients of the open step
    DECIDED = auto()  # still readable; decisions wait in the updater's queue, so its gradients are fixed
    UPDATING = auto()  # tiles are being overwritten: nobody reads


S = ShardState
_MOVES = {
    S.EMPTY: {S.PUBLISHED},
    S.PUBLISHED: {S.DECIDED},
    S.DECIDED: {S.UPDATING, S.PUBLISHED},  # straight to PUBLISHED: the content does not change
    S.UPDATING: {S.PUBLISHED},
}


@dataclass(eq=False, kw_only=True)
class OwnedShard:
    """A shard of this owner.

    Knows its memory, version and state; not gradients, other shards, or who computes the update. Its fields are
    written by the service alone, under the service's lock; tensor contents by the updater thread alone."""

    shard: Shard
    unit: UnitLayout
    slices: tuple[SlotSlice, ...]
    groups: tuple[int, ...]  # parameter group of each slice
    params: Tensor  # 1D, unit dtype: what COMPUTE reads
    master: Tensor | None  # 1D fp32; the same memory as params in an fp32 unit, None in a frozen one
    states: dict[str, Tensor]  # kind -> 1D fp32
    steps: list[int] = field(init=False)  # updates each slice's parameter has had
    padding: tuple[tuple[int, int], ...] = field(init=False)  # ranges from a slice's end to a multiple of 64 elements
    state: ShardState = field(default=S.EMPTY, init=False)
    published: int = field(default=-1, init=False)
    content: int = field(default=-1, init=False)  # the version at which the published parameters last changed
    pending: int = field(default=0, init=False)  # decisions queued or being worked on
    pending_reads: int = field(default=0, init=False)  # of them, those that still read this shard's gradients

    def __post_init__(self) -> None:
        self.steps = [0] * len(self.slices)
        self.padding = tuple((s.stop, s.start + aligned(s.numel)) for s in self.slices if s.numel % ALIGN)

    @property
    def trainable(self) -> bool:
        """True when the shard has a master and gradients."""
        return self.unit.trainable

    def move(self, state: ShardState) -> None:
        """Change state; raises StoreError when the table does not allow it."""
        if state not in _MOVES[self.state]:
            raise StoreError(f"shard {self.shard.index} of {self.unit.name!r} cannot go {self.state} -> {state}")
        self.state = state

    def fill(self, values: Tensor) -> None:
        """Take initial values (1D, the shard's elements): the master, and from it the published parameters."""
        target = self.params if self.master is None else self.master
        target.copy_(values)
        for start, stop in self.padding:
            target[start:stop].zero_()
        self.publish_master()

    def publish_master(self) -> None:
        """Write the published parameters from the master, where they are two."""
        if self.master is not None and self.master is not self.params:
            self.params.copy_(self.master)

    def read(self, kind: str) -> Tensor:
        """The memory that holds ``kind``; raises StoreError naming the kinds there are."""
        if kind == COMPUTE:
            return self.params
        found = self.master if kind == MASTER else self.states.get(kind)
        if found is None:
            kinds = [COMPUTE, *([MASTER] if self.trainable else []), *self.states]
            raise StoreError(f"{self.unit.name!r} has no {kind!r} to fetch; it has {', '.join(kinds)}")
        return found


def allocate(
    layout: ModelLayout, shards: Sequence[int], group_of: Sequence[Sequence[int]], kinds: Sequence[str]
) -> dict[int, OwnedShard]:
    """Allocate and touch the memory of an owner's shards: one block per dtype and kind, freed with the owner."""
    owned = [layout.shards[index] for index in shards]
    units = [layout.units[shard.unit] for shard in owned]
    trained = [shard for shard, unit in zip(owned, units, strict=True) if unit.trainable]
    master = carve([(shard.index, shard.numel) for shard in trained], torch.float32)
    states = {kind: carve([(shard.index, shard.numel) for shard in trained], torch.float32) for kind in kinds}
    params = dict(master)  # what an fp32 unit publishes is its master
    for dtype in {unit.dtype for unit in units}:
        apart = [
            (shard.index, shard.numel)
            for shard, unit in zip(owned, units, strict=True)
            if unit.dtype is dtype and not (unit.trainable and dtype is torch.float32)
        ]
        params |= carve(apart, dtype)
    return {shard.index: _owned_shard(layout, shard, group_of, params[shard.index], master, states) for shard in owned}


def carve(sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> dict[int, Tensor]:
    """One zeroed block cut into 1D tensors: ``sizes`` is (key, elements), elements multiples of 64."""
    block = torch.zeros(sum(numel for _, numel in sizes), dtype=dtype)
    ends = accumulate(numel for _, numel in sizes)
    return {key: block[end - numel : end] for (key, numel), end in zip(sizes, ends, strict=True)}


def _owned_shard(
    layout: ModelLayout,
    shard: Shard,
    group_of: Sequence[Sequence[int]],
    params: Tensor,
    master: Mapping[int, Tensor],
    states: Mapping[str, Mapping[int, Tensor]],
) -> OwnedShard:
    unit, slices = layout.units[shard.unit], layout.slices(shard)
    return OwnedShard(
        shard=shard,
        unit=unit,
        slices=slices,
        groups=tuple(group_of[shard.unit][part.slot] for part in slices) if unit.trainable else (),
        params=master[shard.index] if unit.trainable and unit.dtype is torch.float32 else params,
        master=master.get(shard.index),
        states={kind: region[shard.index] for kind, region in states.items()} if unit.trainable else {},
    )
