"""Reads and writes what an owner's control slab notes of each of its shards."""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero.kernels.stamps import STAMP, STAMP_BYTES
from rayzero.layout.model_layout import Shard
from rayzero.slabs.slab import Slab
from rayzero.store.shm.shared_plan import LINE_BYTES, ON_DEVICE, PLACE_BYTES, PLACES, SLICE_BYTES, SharedPlan
from rayzero.store.shm.words import region


class ControlSlab:
    """An owner's control slab in one epoch, and where its shards' entries are.

    Knows places and sizes; not what the entries mean."""

    def __init__(self, slab: Slab, plan: SharedPlan, owner: int) -> None:
        """``plan``: of the slab's epoch."""
        self.slab, self._layout = slab, plan.spec.layout
        self._line = {shard.index: i for i, shard in enumerate(plan.shards_of(owner))}
        self._tiles, self._slices = plan.first_tiles(owner), plan.first_slices(owner)

    def words(self, kind: str, offset: int = 0, size: int | None = None) -> Tensor:
        """``size`` bytes of a region from ``offset`` on; None: all of it. 1D uint8."""
        found = region(self.slab, kind)
        return self.slab.tensor(found.offset + offset, found.bytes if size is None else size, torch.uint8)

    def line(self, shard: Shard) -> Tensor:
        """A shard's version line: 1D, 8 int64."""
        return self.words("versions", self._line[shard.index] * LINE_BYTES, LINE_BYTES).view(torch.int64)

    def places(self, shard: Shard) -> Tensor:
        """Where a shard's tensors lie: 1D uint8."""
        return self.words("places", self._line[shard.index] * PLACES * PLACE_BYTES, PLACES * PLACE_BYTES)

    def progress(self, shard: Shard) -> list[Tensor]:
        """A shard's line of its total, and its tile stamps and slices, if it is trained: each 1D uint8. On a device it
        has no stamps."""
        found = [self.words("totals", self._line[shard.index] * LINE_BYTES, LINE_BYTES)]
        if self._tiles.get(shard.index, ON_DEVICE) != ON_DEVICE:
            tiles = -(-shard.numel // STAMP)
            found.append(self.words("tiles", self._tiles[shard.index] * STAMP_BYTES, tiles * STAMP_BYTES))
        if shard.index in self._slices:
            slices = len(self._layout.slices(shard))
            found.append(self.words("slices", self._slices[shard.index] * SLICE_BYTES, slices * SLICE_BYTES))
            found.append(self.words("present", 2 * self._slices[shard.index], 2 * slices))
        return found
