"""One version of all weights in a follower's own memory."""

from __future__ import annotations

import torch
from torch import Tensor

from rayzero.followers.host_shards import Content, HostShards
from rayzero.layout.model_layout import ModelLayout


class HeldVersion:
    """A copy of every unit's published parameters, all of one version once ``take`` has returned True.

    Knows layout and bytes; not where a version comes from, or who reads it. Nothing in it changes but by ``take``."""

    def __init__(self, layout: ModelLayout) -> None:
        self.layout, self.version = layout, -1  # -1: not whole
        self._units = [torch.empty(unit.numel, dtype=unit.dtype, device="cpu") for unit in layout.units]
        self._contents: list[Content | None] = [None] * len(layout.shards)

    def take(self, shards: HostShards, version: int) -> bool:
        """Become ``version``: copy what this does not have of it. False: it is overwritten already, or before all was
        copied."""
        self.version = -1
        for shard in self.layout.shards:
            values = self._units[shard.unit][shard.start : shard.stop]
            had, self._contents[shard.index] = self._contents[shard.index], None
            found = shards.copy(shard.index, version, values, had)
            if found is None:
                return False
            self._contents[shard.index] = found
        self.version = version
        return True

    def is_still(self, shards: HostShards) -> bool:
        """Whether this is what the owners have of its version, users' writes included."""
        return all(shards.has(shard.index, self.version, self._contents[shard.index]) for shard in self.layout.shards)

    def elements(self, unit: int, start: int, stop: int) -> Tensor:
        """A range of a unit's flat vector: 1D, the unit's dtype, a view."""
        return self._units[unit][start:stop]
