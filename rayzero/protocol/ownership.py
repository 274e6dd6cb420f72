"""Computes which owner has which shard of a model in training, from the first epoch of a run to the present one.

An *epoch* is the time between two changes of the owners. What owners there are is data that ranks and owners pass on
(``Ownership``); who owns what follows from it, and every process computes it alike. A *door* is an owner without
shards, on a host that has ranks and no other owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayzero.layout.shard_map import Rescale, ShardMap, rescale, shard_map_for
from rayzero.protocol.messages import ModelSpec
from rayzero.protocol.products import shard_work


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owners that a run began with, but for those on devices, and every change of them since."""

    first: int
    changes: tuple[Rescale, ...] = ()
    doors: int = 0  # the last so many of ``first``

    @property
    def epoch(self) -> int:
        """The number of the epoch: how often the owners have changed."""
        return len(self.changes)

    @property
    def num_owners(self) -> int:
        """How many owners there are now, doors included, but for those on devices."""
        return len(self.changes[-1].former) if self.changes else self.first

    @property
    def door_numbers(self) -> range:
        """The doors of now: behind the owners with shards, before those on devices."""
        doors = self.changes[-1].doors if self.changes else self.doors
        return range(self.num_owners - doors, self.num_owners)

    @property
    def num_optimizers(self) -> int:
        """How many owners have shards now, but for those on devices."""
        return self.num_owners - len(self.door_numbers)

    @property
    def before(self) -> Ownership:
        """That of the epoch before; the first one has none."""
        return replace(self, changes=self.changes[:-1])

    def number_of(self, former: int) -> int:
        """The number in this epoch of an owner of the epoch before that stays: those on devices always come last."""
        on_host = self.before.num_owners
        return former if former < on_host else former - on_host + self.num_owners

    def then(self, change: Rescale) -> Ownership:
        """That of the next epoch."""
        return replace(self, changes=(*self.changes, change))

    def to_json(self) -> list[object]:
        """For files; see ``from_json``. The number of doors comes last, by epoch, if there have been any."""
        doors = [self.doors, *(change.doors for change in self.changes)]
        return [self.first, *(list(change.former) for change in self.changes), *([{"doors": doors}] * any(doors))]

    @classmethod
    def from_json(cls, data: Sequence[object]) -> Ownership:
        """The inverse of ``to_json``. Raises ValueError or TypeError for anything else."""
        first, *changes = data
        noted: Any = changes.pop() if changes and isinstance(changes[-1], dict) else {}
        doors, *later = noted.get("doors", [0] * (1 + len(changes)))
        formers: Iterable[tuple[Any, Any]] = zip(changes, later, strict=True)
        return cls(int(str(first)), tuple(Rescale(tuple(was), num) for was, num in formers), int(doors))


@dataclass(frozen=True, slots=True)
class Prepared:
    """An owner is ready for the next epoch."""

    leads: bool  # a model, in the next epoch
    moved_bytes: int  # of shards that it does not own in this one, or that are on another host


def owner_map(spec: ModelSpec, num_owners: int, ownership: Ownership | None = None) -> ShardMap:
    """The owner of every shard. ``num_owners``: all owners, including :func:`device_owners`, which come last, in rank
    order. ``ownership``: None in the first epoch."""
    beside = device_owners(spec.world_size, spec.offload_fraction)
    shard_map = shard_map_for(
        spec.layout,
        num_owners if ownership is None else ownership.first + beside,
        spec.shard_map,
        num_device_owners=beside,
        num_doors=0 if ownership is None else ownership.doors,
        offload_fraction=spec.offload_fraction,
        work=None if spec.matrix_updates == "rank" else shard_work(spec.layout, spec.hyper, spec.group_of),
    )
    for change in ownership.changes if ownership is not None else ():
        shard_map = rescale(shard_map, change)
    return shard_map


def device_owners(world_size: int, offload_fraction: float) -> int:
    """How many owners keep their states on a rank's device: one beside each rank, or none."""
    return world_size if offload_fraction < 1 else 0
