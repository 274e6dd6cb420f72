"""Decides which hosts get a door: an owner without shards, where ranks would have none on their host."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from rayzero.layout.rescale import Rescale
from rayzero.protocol.ownership import Ownership

Host = TypeVar("Host", bound=Hashable)


def hosts_without_owner(ranks: Iterable[Host], owners: Iterable[Host]) -> list[Host]:
    """The hosts that get a door, in the order of their first ranks. ``ranks``, ``owners``: the host of each."""
    there = set(owners)
    return [host for host in dict.fromkeys(ranks) if host not in there]


def with_doors(
    change: Rescale, owners: Sequence[Host], *, ranks: Iterable[Host], there: Sequence[Host], before: Ownership
) -> tuple[Rescale, dict[int, Host]]:
    """A change of the owners with shards, and the doors that it takes. Returns the whole change, and by number the host
    of each door that joins. ``owners``: the host of each owner with shards after it, ``there``: of each owner
    ``before`` it.

    A door that is needed on its host stays if its number is that of a door afterwards. It never gets shards: it was
    placed with few CPUs; and an owner that parts with its shards ends, so that its CPUs are free for others."""
    needed = hosts_without_owner(ranks, owners)
    numbers = range(len(owners), len(owners) + len(needed))
    stay = {door: there[door] for door in numbers if door in before.door_numbers and there[door] in needed}
    joining = [door for door in numbers if door not in stay]
    left = [host for host in needed if host not in stay.values()]
    former = [was if was is not None and was < before.num_optimizers else None for was in change.former]
    doors = [door if door in stay else None for door in numbers]
    return Rescale((*former, *doors), len(doors)), dict(zip(joining, left, strict=True))
