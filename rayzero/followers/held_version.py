"""One version of all weights in a follower's own memory, and its tensors by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import add
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rayzero.layout.model_layout import ModelLayout

Content = tuple[str | int, ...]  # what a shard's bytes are, as far as their source tells them apart


class FollowerStats(NamedTuple):
    """What a follower has taken so far."""

    versions: int = 0  # that were taken whole
    whole_bytes: int = 0  # of shards that came as they are
    change_bytes: int = 0  # of what their versions have changed
    arrivals: int = 0  # of shards' versions that came soon enough to have their times taken
    arrival_s: float = 0.0  # of all those: seconds since their owners said that they are published


class Tally:
    """Adds them up. Several threads may."""

    def __init__(self) -> None:
        self._lock, self.stats = threading.Lock(), FollowerStats()

    def add(self, more: FollowerStats) -> None:
        """Count what has come."""
        with self._lock:
            self.stats = FollowerStats._make(map(add, self.stats, more))


class Shards(Protocol):
    """All published shards of one epoch of a run's owners, wherever they are read."""

    @property
    def layout(self) -> ModelLayout: ...

    @property
    def lineage(self) -> str:
        """Another one where the run has begun again, with lower versions."""
        ...

    @property
    def version(self) -> int:
        """The newest version that every shard has reached; -1: some have no values yet."""
        ...

    def has(self, shard: int, version: int, content: Content | None) -> bool:
        """Whether a shard surely has exactly ``version`` now, with this content."""
        ...

    def fill(self, version: int, values: Sequence[Tensor], contents: list[Content | None], tally: Tally) -> bool:
        """Make ``values`` those of ``version``: by shard, 1D, its elements, the unit's dtype. ``contents``: what they
        have, which this keeps; None: anything. False: some are of other versions now."""
        ...


class HeldVersion:
    """A copy of every unit's published parameters, all of one version once ``take`` has returned True.

    Knows layout and bytes; not where a version comes from, or who reads it. Nothing in it changes but by ``take``."""

    def __init__(self, layout: ModelLayout) -> None:
        self.layout, self.version = layout, -1  # -1: not whole
        self._units = [torch.empty(unit.numel, dtype=unit.dtype, device="cpu") for unit in layout.units]
        self._contents: list[Content | None] = [None] * len(layout.shards)

    def take(self, shards: Shards, version: int, tally: Tally) -> bool:
        """Become ``version``: copy what this does not have of it. False: it is overwritten already, or before all was
        copied."""
        self.version = -1
        values = [self._units[shard.unit][shard.start : shard.stop] for shard in self.layout.shards]
        if not shards.fill(version, values, self._contents, tally):
            return False
        tally.add(FollowerStats(versions=1))
        self.version = version
        return True

    def is_still(self, shards: Shards) -> bool:
        """Whether this is what the owners have of its version, users' writes included."""
        return all(shards.has(shard.index, self.version, self._contents[shard.index]) for shard in self.layout.shards)

    def elements(self, unit: int, start: int, stop: int) -> Tensor:
        """A range of a unit's flat vector: 1D, the unit's dtype, a view."""
        return self._units[unit][start:stop]


Declared = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Names(Protocol):
    """How a version's tensors are called."""

    @property
    def declared(self) -> Declared:
        """Dtype and shape by name, in the order of ``tensors``."""
        ...

    def tensors(self, held: HeldVersion) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, a view of ``held`` where that is possible."""
        ...


class OwnNames:
    """The names of the model's parameters, tied ones once, in forward order."""

    def __init__(self, layout: ModelLayout) -> None:
        self._slots = [(unit, slot) for unit in layout.units for slot in unit.slots]

    @cached_property
    def declared(self) -> Declared:
        return {slot.name: (unit.dtype, slot.shape) for unit, slot in self._slots}

    def tensors(self, held: HeldVersion) -> Iterator[tuple[str, Tensor]]:
        for unit, slot in self._slots:
            yield slot.name, held.elements(unit.index, slot.start, slot.stop).view(slot.shape)
