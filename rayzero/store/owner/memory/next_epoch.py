"""Prepares an owner's control slab for the next epoch, while the owners of the present one stand still.

The tensors of shards stay where they are, in slabs that their first owners have made: ranks' windows over them stay as
they are, and nothing is copied. What an owner has to know of its shards (what was published and applied, where the
tensors lie, how often each slice was updated) is in the control slabs of their owners, and is written into a new one.
From there on, whoever serves as that owner takes over as a successor does. Nothing that is made here counts before the
new lead's slab is told that its epoch stands.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from rayzero.errors import HandshakeError, StateLostError, StoreError
from rayzero.kernels.stamps import STAMP, STAMP_BYTES
from rayzero.layout.model_layout import Shard
from rayzero.memory.planner import check_shared
from rayzero.protocol.messages import ModelSpec
from rayzero.protocol.ownership import Ownership, owner_map
from rayzero.slabs.header import lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.store.owner.memory.slabs import is_control, of_lineage
from rayzero.store.shm.plan import LINE_BYTES, PLACE_BYTES, PLACES, SLICE_BYTES, SharedPlan
from rayzero.store.shm.shard_lines import APPLIED, CONTENT, DECIDED, PUBLISHED, ShardLines
from rayzero.store.shm.words import region, write_ownership


class _Control:
    """An owner's control slab in one epoch, and where its shards' entries are."""

    def __init__(self, slab: Slab, plan: SharedPlan, owner: int) -> None:
        self.slab = slab
        self._line = {shard.index: i for i, shard in enumerate(plan.shards_of(owner))}
        self._tiles, self._slices = plan.first_tiles(owner), plan.first_slices(owner)

    def words(self, kind: str, offset: int = 0, size: int | None = None) -> torch.Tensor:
        """``size`` bytes of a region from ``offset`` on; None: all of it. 1D uint8."""
        found = region(self.slab, kind)
        return self.slab.tensor(found.offset + offset, found.bytes if size is None else size, torch.uint8)

    def line(self, shard: Shard) -> torch.Tensor:
        """A shard's version line: 8 int64."""
        return self.words("versions", self._line[shard.index] * LINE_BYTES, LINE_BYTES).view(torch.int64)

    def entries(self, shard: Shard, slices: int) -> list[torch.Tensor]:
        """All else that is here of a shard with so many slices, as bytes: places, tile stamps, slices."""
        found = [self.words("places", self._line[shard.index] * PLACES * PLACE_BYTES, PLACES * PLACE_BYTES)]
        if shard.index in self._tiles:
            tiles = -(-shard.numel // STAMP)
            found.append(self.words("tiles", self._tiles[shard.index] * STAMP_BYTES, tiles * STAMP_BYTES))
        if shard.index in self._slices:
            found.append(self.words("slices", self._slices[shard.index] * SLICE_BYTES, slices * SLICE_BYTES))
        return found


def prepare_control(
    spec: ModelSpec, owner: int, before: Ownership, after: Ownership, directory: Path, threads: int
) -> Slab:
    """Make the control slab of ``owner`` in the epoch of ``after``, from those of the epoch before, whose owners have
    published every decision. ``threads``: that update its shards. The caller closes the slab.

    Raises StateLostError if a shard's owner has none here, MemoryPlanError if there is no room."""
    former, plan = (SharedPlan.of(spec, each.num_owners, each) for each in (before, after))
    with ExitStack() as stack:
        _remove_abandoned(spec, owner, after.epoch, directory)
        there = _controls(stack, spec, former, directory)
        from_owner = {shard.index: former.shard_map.owner(shard.index) for shard in plan.shards_of(owner)}
        missing = sorted(set(from_owner.values()) - there.keys())
        if missing or not there:
            raise StateLostError(f"optimizer {owner} finds no control slabs of optimizers {missing} in {directory}")
        some = next(iter(there.values()))
        facts = plan.facts("control", owner, some.slab.header.facts.kernel, secrets.randbits(63))
        header = lay_out_slab(facts, plan.owner_control(owner, threads))
        check_shared(header.bytes, directory)
        slab = Slab.create(header, directory)
        try:
            new = _Control(slab, plan, owner)
            _fill(new, plan, owner, {shard: there[before] for shard, before in from_owner.items()})
            new.words("began").copy_(some.words("began"))
            write_ownership(slab, after)
            if plan.shard_map.owner(0) == owner:
                new.words("record").copy_(there[former.shard_map.owner(0)].words("record"))
        except BaseException:
            slab.close()
            raise
    return slab


def moved_bytes(spec: ModelSpec, owner: int, before: Ownership, after: Ownership) -> int:
    """Of the shards that ``owner`` has in the epoch of ``after``, but not in the one before."""
    was, now = (owner_map(spec, each.num_owners, each) for each in (before, after))
    return sum(now.sizes[shard] for shard in now.shards_of(owner) if was.owner(shard) != owner)


def _remove_abandoned(spec: ModelSpec, owner: int, epoch: int, directory: Path) -> None:
    """Remove what a process has left that died while the owners were to change, and did not."""
    for slab, facts in of_lineage(spec, directory):
        if is_control(facts, epoch) and facts.index == owner:
            slab.path.unlink(missing_ok=True)


def _controls(stack: ExitStack, spec: ModelSpec, plan: SharedPlan, directory: Path) -> dict[int, _Control]:
    """The control slabs of an epoch that are on this host, by owner."""
    found = {}
    for slab, facts in of_lineage(spec, directory):
        if is_control(facts, plan.ownership.epoch):
            mapped = plan.attach(str(slab.path), "the next epoch", writable=False)
            stack.callback(mapped.close)
            found[facts.index] = _Control(mapped, plan, facts.index)
    return found


def _fill(new: _Control, plan: SharedPlan, owner: int, old: Mapping[int, _Control]) -> None:
    """Write what is known of each shard. ``old``: by shard, where it is known."""
    lines = ShardLines(new.slab, plan.shards_of(owner))
    lines.describe(plan.first_tiles(owner))
    for shard in plan.shards_of(owner):
        was, line = old[shard.index].line(shard), new.line(shard)
        if not was[PUBLISHED // 8]:
            raise StoreError(f"shard {shard.index} has no values yet: ask again once the run has taken a step")
        if was[PUBLISHED // 8] != was[DECIDED // 8] and was[DECIDED // 8]:
            raise HandshakeError(f"shard {shard.index} has a decision that is not published: the owners do not stand")
        for word in (PUBLISHED, CONTENT, DECIDED, APPLIED):
            line[word // 8] = was[word // 8]
        slices = len(plan.spec.layout.slices(shard))
        for there, here in zip(old[shard.index].entries(shard, slices), new.entries(shard, slices), strict=True):
            here.copy_(there)
