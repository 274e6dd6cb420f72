"""How many files, and so connections, the processes of a run have open at most.

A connection that cannot be opened in the middle of training looks like a broken network. So the limit of open files
(``ulimit -n``) is compared with these sums before a run begins."""

from __future__ import annotations

from rayzero.store.host.door import DOOR_TRANSFERS
from rayzero.store.host.transfers.fetches import most_transfers
from rayzero.store.owner.tensor_port import CONNECTIONS, ENTERING

PROCESS = 192
"""Of a process alone: Ray's, gRPC's and torch's own (about 60), exporter, trace, checkpoint, the loop's data."""
_LINKS = 2  # one that has broken, which the other end may not have noticed, and the next one; or those of two epochs
_CALLS = 1  # gRPC's connection
_WAKES = 1  # a rank's eventfd, for each link
_TO_SHARDS = 1  # over which an owner takes shards from another one
_OF_A_NEIGHBOUR = 1 + 4  # a process on the same host: its pidfd, its slabs in two epochs


def tensor_connections(num_owners: int) -> int:
    """The connections for tensors that one rank has with each of some owners."""
    return min(CONNECTIONS, most_transfers(num_owners))


def files_of_owner(num_ranks: int, num_owners: int, neighbours: int) -> int:
    """Of an optimizer actor, which may lead. ``neighbours``: other processes of the run on its host."""
    from_ranks = num_ranks * _LINKS * (_CALLS + tensor_connections(num_owners))
    as_the_lead, from_the_lead = num_owners * _LINKS * _CALLS, _LINKS * _CALLS
    shards = num_owners * 2 * _TO_SHARDS  # given and taken
    others = num_owners - 1 if neighbours < num_ranks + num_owners - 1 else 0  # on other hosts, at most
    as_a_door = others * _LINKS * (_CALLS + DOOR_TRANSFERS + _WAKES)
    from_doors = others * _LINKS * (_CALLS + DOOR_TRANSFERS)
    own = PROCESS + ENTERING + as_the_lead + from_the_lead + shards + neighbours * _OF_A_NEIGHBOUR
    return own + from_ranks + as_a_door + from_doors


def files_of_rank(num_owners: int, neighbours: int) -> int:
    """Of a rank; see ``files_of_owner``."""
    links = num_owners * _LINKS * (_CALLS + tensor_connections(num_owners) + _WAKES)
    return PROCESS + links + neighbours * _OF_A_NEIGHBOUR


def most_ranks(limit: int, num_owners: int) -> int:
    """With how many ranks an optimizer actor gets along that may have ``limit`` files open, and shares its host with
    the other owners."""
    with_one, with_two = (files_of_owner(ranks, num_owners, num_owners - 1) for ranks in (1, 2))
    return max(0, 1 + (limit - with_one) // (with_two - with_one))
