"""Ranks, owners and hosts that are alike, each kind simulated once.

[Note: symmetry] Hosts are alike if they have equally many ranks, and owners that have equally many bytes and shards of
every unit. What happens to one of them then happens to all at the same moments, because works share resources by
factors (fluid.py): n equal works of n hosts, or of one, all get the same. So one of each kind is simulated, and what it
takes of another's host counts as often as there are such pairs. The host of the lead is a kind of its own. What the
ranks of a host do once, they share evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rayzero.layout.model_layout import ModelLayout
from rayzero.layout.shard_map import ShardMap

__all__ = ["OwnerGroup", "Part", "RankGroup", "group"]


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What one owner has of one unit."""

    elements: int
    shards: int


Parts = tuple[tuple[int, Part], ...]  # (unit, part), ascending; units of which it has something


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that are alike."""

    ranks: tuple[int, ...]
    host: int  # kind
    each: int  # on one host


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerGroup:
    """Owners that are alike."""

    owners: tuple[int, ...]
    host: int  # kind
    each: int  # on one host
    parts: Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Everybody, by kind."""

    hosts: tuple[int, ...]  # how many there are of each kind
    ranks: tuple[RankGroup, ...]
    owners: tuple[OwnerGroup, ...]

    @property
    def world_size(self) -> int:
        """All ranks."""
        return sum(len(each.ranks) for each in self.ranks)

    @property
    def lead(self) -> int:
        """The kind of the lead's host, of which there is one."""
        return next(each.host for each in self.owners if 0 in each.owners)

    def remote(self, ranks: RankGroup, owners: OwnerGroup) -> tuple[int, int]:
        """(owners of the group on other hosts than one of the ranks, ranks on other hosts than one of the owners)."""
        together = ranks.host == owners.host
        return (
            len(owners.owners) - (owners.each if together else 0),
            len(ranks.ranks) - (ranks.each if together else 0),
        )


def parts_of(layout: ModelLayout, shards: ShardMap) -> list[Parts]:
    """What each owner has of each unit."""
    elements: list[Counter[int]] = [Counter() for _ in range(shards.num_owners)]
    numbers: list[Counter[int]] = [Counter() for _ in range(shards.num_owners)]
    for shard in layout.shards:
        owner = shards.owners[shard.index]
        elements[owner][shard.unit] += shard.numel
        numbers[owner][shard.unit] += 1
    return [
        tuple((unit, Part(own[unit], number[unit])) for unit in sorted(own))
        for own, number in zip(elements, numbers, strict=True)
    ]


def group(parts: Sequence[Parts], rank_hosts: Sequence[int], owner_hosts: Sequence[int], *, full: bool) -> Groups:
    """Put together who is alike. ``parts``: of each owner; the first one leads. ``full``: nobody, so that all are
    simulated."""
    hosts = sorted({*rank_hosts, *owner_hosts})
    number = Counter(rank_hosts)
    own: dict[int, list[int]] = {host: [] for host in hosts}
    for owner, host in enumerate(owner_hosts):
        own[host].append(owner)
    kinds: dict[object, int] = {}
    kind_of = {}
    for host in hosts:
        alike = (number[host], sorted(Counter(parts[owner] for owner in own[host]).items()), 0 in own[host])
        kind_of[host] = kinds.setdefault(host if full else repr(alike), len(kinds))
    sizes = Counter(kind_of.values())
    ranks: dict[object, list[int]] = {}
    for rank, host in enumerate(rank_hosts):
        ranks.setdefault((kind_of[host], rank if full else 0), []).append(rank)
    owners: dict[object, list[int]] = {}
    for owner, host in enumerate(owner_hosts):
        leads = owner == 0
        owners.setdefault((kind_of[host], owner if full else parts[owner], leads), []).append(owner)
    return Groups(
        hosts=tuple(sizes[kind] for kind in range(len(kinds))),
        ranks=tuple(
            RankGroup(ranks=tuple(who), host=(kind := kind_of[rank_hosts[who[0]]]), each=len(who) // sizes[kind])
            for who in ranks.values()
        ),
        owners=tuple(
            OwnerGroup(
                owners=tuple(who),
                host=(kind := kind_of[owner_hosts[who[0]]]),
                each=len(who) // sizes[kind],
                parts=parts[who[0]],
            )
            for who in owners.values()
        ),
    )
