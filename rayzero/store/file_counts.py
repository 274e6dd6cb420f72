"""How many files, and so connections, the processes of a run have open at most.

A connection that cannot be opened in the middle of training looks like a broken network. So the limit of open files
(``ulimit -n``) is compared with these sums before a run begins.

``num_owners``: all, of which ``num_doors`` have no shards. ``neighbours``: other processes of the run on the host, of
which ``ranks_here`` are ranks."""

from __future__ import annotations

from rayzero.store.host.door import DOOR_TRANSFERS
from rayzero.store.host.transfer_calls import most_transfers
from rayzero.store.owner.tensor_port import CONNECTIONS, ENTERING

PROCESS = 192
"""Of a process alone: Ray's, gRPC's and torch's own (about 60), exporter, trace, checkpoint, the loop's data."""
_LINKS = 2  # one that has broken, which the other end may not have noticed, and the next one; or those of two epochs
_CALLS = 1  # gRPC's connection
_WAKES = 1  # a rank's eventfd, for each link
_OF_A_LINE = 1 + 1  # of a rank of the host to an owner on another one: its memory, the rank's pidfd
_TO_SHARDS = 1  # over which an owner takes shards from another one
_OF_A_NEIGHBOUR = 1 + 4  # a process on the same host: its pidfd, its slabs in two epochs


def tensor_connections(num_owners: int) -> int:
    """The connections for tensors that one rank has with each of some owners."""
    return min(CONNECTIONS, most_transfers(num_owners))


def files_of_owner(num_ranks: int, num_owners: int, neighbours: int, num_doors: int = 0, ranks_here: int = 0) -> int:
    """Of an optimizer actor with shards, which may lead."""
    from_ranks = num_ranks * _LINKS * (_CALLS + tensor_connections(num_owners))
    as_the_lead, from_the_lead = num_owners * _LINKS * _CALLS, _LINKS * _CALLS
    shards = (num_owners - num_doors) * 2 * _TO_SHARDS  # given and taken
    others = num_owners - 1 if neighbours < num_ranks + num_owners - 1 else 0  # on other hosts, at most
    as_a_door = max(0, others - num_doors) * _of_a_door(ranks_here)
    from_doors = others * _LINKS * (_CALLS + DOOR_TRANSFERS)
    own = PROCESS + ENTERING + as_the_lead + from_the_lead + shards + neighbours * _OF_A_NEIGHBOUR
    return own + from_ranks + as_a_door + from_doors


def _of_a_door(ranks_here: int) -> int:
    """What the door of a host has for each owner on another one: its own link, and the channel and lines of ranks."""
    return _LINKS * (_CALLS + DOOR_TRANSFERS + _WAKES + (_CALLS + ranks_here * _OF_A_LINE if ranks_here else 0))


def files_of_door(num_ranks: int, num_owners: int, neighbours: int, num_doors: int, ranks_here: int = 0) -> int:
    """Of an optimizer actor without shards."""
    here = min(num_ranks, neighbours)
    asking = (num_ranks - here) * _CALLS  # for its host
    from_ranks = here * _LINKS * (_CALLS + tensor_connections(num_owners)) + asking
    links = (num_owners - num_doors) * _of_a_door(ranks_here)
    return PROCESS + ENTERING + _LINKS * _CALLS + from_ranks + links + neighbours * _OF_A_NEIGHBOUR


def files_of_rank(num_owners: int, neighbours: int, num_doors: int = 0) -> int:
    """Of a rank, which has links to the owners with shards and to its host's door. It asks every door once for its
    host."""
    others = max(0, num_doors - 1)
    links = (num_owners - others) * _LINKS * (_CALLS + tensor_connections(num_owners) + _WAKES)
    return PROCESS + links + others * (_CALLS + _WAKES) + neighbours * _OF_A_NEIGHBOUR


def most_ranks(limit: int, num_owners: int) -> int:
    """With how many ranks an optimizer actor gets along that may have ``limit`` files open, and shares its host with
    the other owners."""
    with_one, with_two = (files_of_owner(ranks, num_owners, num_owners - 1) for ranks in (1, 2))
    return max(0, 1 + (limit - with_one) // (with_two - with_one))
