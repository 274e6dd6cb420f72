"""Which shards move when the number of owners changes: as few bytes as balance needs.

[Note: minimal moves] Shards of owners that leave go, in forward order, to the owner that has least by then. After that,
while some owner has more above another than the largest shard has, the one with most gives its last shard to the one
with least. So

- ``max bytes - min bytes <= largest shard``, as for ``ShardMap.balanced``, and what is balanced already stays;
- bytes moved <= those of the owners that leave + what each of the others has above the new mean + one shard for each of
  them: only who has more than the mean gives, and who was given a shard never gives (it has the largest shard more than
  the least at most, and the least only grows).

Which owner a shard has changes no bit of a step, so runs may scale at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rayzero.errors import ConfigError
from rayzero.layout.shard_map import ShardMap
from rayzero.quantities import count


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
        num_doors=change.doors,
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
