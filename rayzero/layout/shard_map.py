"""Which owner has which shard: one table, which ranks and owners compute alike.

There are three policies over the same items (bytes per item, in order):

- ``round_robin``: item ``i`` goes to owner ``i mod num_owners``.
- ``contiguous``: neighbours stay together; the first ``n mod num_owners`` owners get one item more.
- ``balanced``: by bytes, the least loaded owner first. [Note: balanced]

[Note: balanced] Groups are taken in order, in rounds of at most ``num_owners`` items of one group (one unit). A round's
items go to different owners, the least loaded first; equally loaded owners take turns, starting after the last item's
owner. So a unit with ``n`` shards is on ``min(n, num_owners)`` owners, its consecutive shards are on different ones,
and the first unit is spread first. Also, ``max bytes - min bytes <= largest item``: a group's largest items are taken
first (shards of whole parameters differ in size, others shrink with the last one), and a round's go to the least loaded
owners, so no owner ends further above another than before the round, or than its own item.

[Note: minimal moves] When the number of owners changes, as few bytes move as balance needs. Shards of owners that
leave go, in forward order, to the owner that has least by then. After that, while some owner has more above another
than the largest shard has, the one with most gives its last shard to the one with least. So

- ``max bytes - min bytes <= largest shard``, as for ``ShardMap.balanced``, and what is balanced already stays;
- bytes moved <= those of the owners that leave + what each of the others has above the new mean + one shard for each of
  them: only who has more than the mean gives, and who was given a shard never gives (it has the largest shard more than
  the least at most, and the least only grows).

Which owner a shard has changes no bit of a step, so runs may scale at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, takewhile
from typing import get_args

import torch

from rayzero.config.zero import Spread
from rayzero.errors import ConfigError
from rayzero.layout.model_layout import ModelLayout, UnitLayout
from rayzero.quantities import count


@dataclass(frozen=True, slots=True)
class RankMapping:
    """Which of ``world_size`` ranks owns which partition, seen from ``rank``.

    Knows indices; not what a partition holds. ``rank`` may also be an optimizer actor's index. Invariants: the ranks'
    ``owned_partition_count`` add up to the total, and the two index maps are inverses of each other. Raises ConfigError
    if ``rank`` is not in 0..world_size - 1, and every method does if a number is negative."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world_size must be at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank must be in 0..{self.world_size - 1} (world_size {self.world_size}), got {self.rank}"
            )

    def owns_partition(self, partition: int) -> bool:
        """Whether this rank owns ``partition``."""
        return self.get_parameter_owner(partition) == self.rank

    def get_parameter_owner(self, partition: int) -> int:
        """The rank that owns ``partition``."""
        return _counted("partition", partition) % self.world_size

    def owned_partitions(self, total: int) -> list[int]:
        """This rank's partitions among the first ``total``, ascending."""
        return list(range(self.rank, _counted("total", total), self.world_size))

    def owned_partition_count(self, total: int) -> int:
        """``len(owned_partitions(total))``, without the list."""
        share, rest = divmod(_counted("total", total), self.world_size)
        return share + (self.rank < rest)

    def global_to_local_partition(self, partition: int) -> int | None:
        """This rank's own number for ``partition``, or None if another rank owns it."""
        return partition // self.world_size if self.owns_partition(partition) else None

    def local_to_global_partition(self, local: int) -> int:
        """The partition that this rank numbers ``local``."""
        return _counted("local partition", local) * self.world_size + self.rank

    def communication_group(self, partitions: Iterable[int]) -> list[int]:
        """The distinct owners of ``partitions``, ascending."""
        return sorted({self.get_parameter_owner(partition) for partition in partitions})


def _counted(what: str, value: int) -> int:
    if value < 0:
        raise ConfigError(f"{what} must be >= 0, got {value}")
    return value


@dataclass(frozen=True)
class ShardMap:
    """An owner for each item, and what each owner has.

    Knows indices and bytes; not what an item holds or where an owner runs. Make one with ``round_robin``,
    ``contiguous``, ``balanced`` or ``shard_map_for``. An owner may have nothing. A wrong index raises ConfigError."""

    owners: tuple[int, ...]  # per item
    sizes: tuple[int, ...]  # bytes, per item
    num_owners: int
    num_device_owners: int = 0  # the last so many owners: one beside each rank, with its states on the rank's device
    work: tuple[int, ...] | None = None  # what an update of each item costs, which is balanced; None: its bytes

    def __post_init__(self) -> None:
        if self.num_owners < 1:
            raise ConfigError(f"a shard map needs at least 1 owner, got {self.num_owners}")
        if len(self.owners) != len(self.sizes):
            raise ConfigError(f"a shard map has {count(len(self.owners), 'owner')} for {len(self.sizes)} items")
        if any(not 0 <= owner < self.num_owners for owner in self.owners):
            raise ConfigError(f"a shard map's owners must be in 0..{self.num_owners - 1}, got {set(self.owners)}")
        if any(size < 0 for size in self.sizes):
            raise ConfigError(f"a shard map's sizes must be >= 0 bytes, got {min(self.sizes)}")

    @classmethod
    def round_robin(cls, sizes: Sequence[int], num_owners: int) -> ShardMap:
        """Give item ``i`` to owner ``i mod num_owners``."""
        mapping = RankMapping(0, _at_least_one(num_owners))
        return cls(tuple(mapping.get_parameter_owner(i) for i in range(len(sizes))), tuple(sizes), num_owners)

    @classmethod
    def contiguous(cls, sizes: Sequence[int], num_owners: int) -> ShardMap:
        """Keep neighbours together. The first ``n mod num_owners`` owners get one item more than the others."""
        share, rest = divmod(len(sizes), _at_least_one(num_owners))
        counts = [share + (owner < rest) for owner in range(num_owners)]
        owners = tuple(owner for owner, count in enumerate(counts) for _ in range(count))
        return cls(owners, tuple(sizes), num_owners)

    @classmethod
    def balanced(cls, sizes: Sequence[int], num_owners: int, groups: Sequence[int] | None = None) -> ShardMap:
        """Balance bytes: ``max bytes - min bytes <= largest item``. [Note: balanced]

        ``groups``: a label per item. Neighbours with the same label (a unit's shards) are spread over different owners.
        None: every item is its own group."""
        loads, last = [0] * _at_least_one(num_owners), -1
        owners = [0] * len(sizes)
        for batch in _rounds(sizes, groups, num_owners):
            turn = [(last + 1 + i) % num_owners for i in range(num_owners)]
            ranked = sorted(turn, key=loads.__getitem__)  # stable: equally loaded owners stay in turn
            for item, last in zip(batch, ranked, strict=False):
                loads[last] += sizes[item]
                owners[item] = last
        first = owners[0] if owners else 0  # item 0 is owner 0's, who leads; a group may have larger ones
        swapped = {first: 0, 0: first}
        owners = [swapped.get(owner, owner) for owner in owners]
        return cls(tuple(owners), tuple(sizes), num_owners)

    @property
    def weights(self) -> tuple[int, ...]:
        """What is balanced, per item."""
        return self.sizes if self.work is None else self.work

    def owner(self, shard: int) -> int:
        """The owner of item ``shard``."""
        if not 0 <= shard < len(self.owners):
            raise ConfigError(f"shard {shard} does not exist; this map has {count(len(self.owners), 'shard')}")
        return self.owners[shard]

    def shards_of(self, owner: int) -> tuple[int, ...]:
        """The items of ``owner``, ascending."""
        return self._items[self._known(owner)]

    def on_device(self, owner: int) -> bool:
        """Whether ``owner`` keeps masters and optimizer states on its rank's device."""
        return self._known(owner) >= self.num_owners - self.num_device_owners

    def num_shards_of(self, owner: int) -> int:
        """How many items ``owner`` has."""
        return len(self.shards_of(owner))

    def weight_of(self, owner: int) -> int:
        """The weights of all items of ``owner``."""
        return sum(self.weights[shard] for shard in self.shards_of(owner))

    @cached_property
    def _items(self) -> tuple[tuple[int, ...], ...]:
        items: list[list[int]] = [[] for _ in range(self.num_owners)]
        for shard, owner in enumerate(self.owners):
            items[owner].append(shard)
        return tuple(tuple(shards) for shards in items)

    def _known(self, owner: int) -> int:
        if not 0 <= owner < self.num_owners:
            raise ConfigError(f"owner must be in 0..{self.num_owners - 1}, got {owner}")
        return owner


def _at_least_one(num_owners: int) -> int:
    if num_owners < 1:
        raise ConfigError(f"a shard map needs at least 1 owner, got {num_owners}")
    return num_owners


def _rounds(sizes: Sequence[int], groups: Sequence[int] | None, num_owners: int) -> Iterator[Sequence[int]]:
    """Cut the items of each group, largest first, into rounds of at most one item per owner."""
    labels = range(len(sizes)) if groups is None else groups
    start = 0
    for _, run in groupby(labels):
        stop = start + sum(1 for _ in run)
        group = sorted(range(start, stop), key=sizes.__getitem__, reverse=True)
        yield from (group[i : i + num_owners] for i in range(0, len(group), num_owners))
        start = stop


POLICIES = get_args(Spread)


def shard_map_for(
    layout: ModelLayout,
    num_owners: int,
    policy: str,
    *,
    num_device_owners: int = 0,
    num_doors: int = 0,
    offload_fraction: float = 1.0,
    work: Sequence[int] | None = None,
) -> ShardMap:
    """The owner of every shard of ``layout``. Every rank and every owner computes the same map.

    A shard's bytes are those that its owner keeps for it under Adam (``resident_bytes``). The last
    ``num_device_owners`` owners share ``device_shards``, the ``num_doors`` owners before them get nothing, and the
    other owners share the rest, by ``policy``. ``work``: what an update of each shard costs, which "balanced" balances
    in place of bytes (protocol/products.py). Raises ConfigError for an unknown policy, and if there is no other
    owner."""
    sizes = [shard.numel * resident_bytes(layout.units[shard.unit]) for shard in layout.shards]
    units = [shard.unit for shard in layout.shards]
    num_host_owners = _at_least_one(num_owners - num_device_owners - num_doors)
    on_device = device_shards(layout, offload_fraction) if num_device_owners else range(0)
    on_host = [index for index in range(len(sizes)) if index not in set(on_device)]
    owners, weights = [0] * len(sizes), sizes if work is None else work
    for indices, first, num in (
        (on_host, 0, num_host_owners),
        (on_device, num_owners - num_device_owners, num_device_owners),
    ):
        if num:
            part = _spread([weights[i] for i in indices], [units[i] for i in indices], num, policy)
            for index, owner in zip(indices, part.owners, strict=True):
                owners[index] = first + owner
    return ShardMap(tuple(owners), tuple(sizes), num_owners, num_device_owners, None if work is None else tuple(work))


def device_shards(layout: ModelLayout, offload_fraction: float) -> list[int]:
    """The shards whose optimizer stays on a device: the trained shards that forward uses first, up to
    ``1 - offload_fraction`` of the trained elements. Forward would wait for their update first."""
    trained = [shard for shard in layout.shards if layout.units[shard.unit].trainable]
    total = sum(shard.numel for shard in trained)
    room = total - round(offload_fraction * total)
    within = takewhile(lambda sums: sums[1] <= room, zip(trained, accumulate(s.numel for s in trained), strict=True))
    return [shard.index for shard, _ in within]


def _spread(sizes: Sequence[int], groups: Sequence[int], num_owners: int, policy: str) -> ShardMap:
    if policy == "balanced":
        return ShardMap.balanced(sizes, num_owners, groups=groups)
    if policy == "round_robin":
        return ShardMap.round_robin(sizes, num_owners)
    if policy == "contiguous":
        return ShardMap.contiguous(sizes, num_owners)
    raise ConfigError(f"shard_map is {policy!r} but must be one of {', '.join(POLICIES)}")


def resident_bytes(unit: UnitLayout) -> int:
    """How many bytes an owner keeps per element: parameters, fp32 master (fp32 parameters are the master) and two
    fp32 optimizer states. For a frozen unit it keeps the parameters, and the master if there is one."""
    if not unit.trainable:
        return unit.dtype.itemsize + (4 if unit.frozen_master else 0)
    published = 0 if unit.dtype is torch.float32 else unit.dtype.itemsize
    return published + 4 * (1 + 2)


@dataclass(frozen=True, slots=True)
class Rescale:
    """One change of the owners that are not on a device: who each new owner was before; None: it is a new process that
    has nothing. Former owners that are not named leave. The last ``doors`` of them have no shards afterwards. Raises
    ConfigError if no owner is named, or one twice, or if there are only doors."""

    former: tuple[int | None, ...]
    doors: int = 0

    def __post_init__(self) -> None:
        named = [owner for owner in self.former if owner is not None]
        if not self.former or len(named) != len(set(named)):
            raise ConfigError(f"a change of the owners names at least one, and nobody twice, got {self.former}")
        if not 0 <= self.doors < len(self.former):
            raise ConfigError(f"of {count(len(self.former), 'owner')}, {self.doors} cannot be without shards")

    @classmethod
    def to(cls, num_owners: int, former: int) -> Rescale:
        """From ``former`` owners to ``num_owners``: the first ones stay as they are."""
        return cls(tuple(owner if owner < former else None for owner in range(num_owners)))


def rescale(shard_map: ShardMap, change: Rescale) -> ShardMap:
    """The map after a change. Every process computes the same one. [Note: minimal moves]

    Owners on devices keep what they have. Raises ConfigError if the change names an owner that there is not."""
    on_host = shard_map.num_owners - shard_map.num_device_owners
    if any(owner is not None and not 0 <= owner < on_host for owner in change.former):
        raise ConfigError(f"a change of {count(on_host, 'owner')} names {change.former}")
    now = {owner: new for new, owner in enumerate(change.former) if owner is not None}
    num_sharded = len(change.former) - change.doors
    owners = [_now(shard_map, owner, now, num_sharded, len(change.former)) for owner in shard_map.owners]
    return replace(
        shard_map,
        owners=tuple(_balanced(owners, shard_map.weights, num_sharded)),
        num_owners=len(change.former) + shard_map.num_device_owners,
    )


def _now(shard_map: ShardMap, owner: int, now: Mapping[int, int], num_sharded: int, num_host: int) -> int | None:
    """What an owner is called after the change; None if it leaves, or stays without shards."""
    if not shard_map.on_device(owner):
        number = now.get(owner)
        return number if number is not None and number < num_sharded else None
    return num_host + owner - (shard_map.num_owners - shard_map.num_device_owners)


def _balanced(owners: Sequence[int | None], sizes: Sequence[int], num_sharded: int) -> list[int]:
    """[Note: minimal moves]"""
    loads, has, placed = [0] * num_sharded, [list[int]() for _ in range(num_sharded)], list[int]()
    for owner, size in zip(owners, sizes, strict=True):
        if owner is not None and owner < num_sharded:
            loads[owner] += size
    for shard, owner in enumerate(owners):
        if owner is None:
            owner = loads.index(min(loads))
            loads[owner] += sizes[shard]
        placed.append(owner)
        if owner < num_sharded and sizes[shard]:
            has[owner].append(shard)
    largest = max((sizes[shard] for shards in has for shard in shards), default=0)
    while max(loads) - min(loads) > largest:
        most, least = loads.index(max(loads)), loads.index(min(loads))
        shard = has[most].pop()
        placed[shard] = least
        loads[most] -= sizes[shard]
        loads[least] += sizes[shard]
    return placed
