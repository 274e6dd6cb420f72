"""Whether every process of a run may open as many files and connections as the run needs.

Each process raises its own limit as it starts (concurrency/open_files.py) and says what it may open then; the driver
compares that before the first port is open, and before it lets other owners in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rayzero.cluster.run import Member, optimizer_name, rank_name
from rayzero.quantities import count
from rayzero.store.file_counts import PROCESS, files_of_owner, files_of_rank

_CALLS = 2  # connections of Ray's between the driver or the coordinator and each other process


def files_needed(members: Mapping[str, Member], num_ranks: int, num_owners: int, num_beside: int) -> dict[str, int]:
    """By process of a run, how many files it may have open at most. ``members``: ranks, owners alone in their
    processes (``num_owners``), and others, which only call these. ``num_beside``: owners beside ranks."""
    ranks = {rank_name(rank) for rank in range(num_ranks)}
    owners = {optimizer_name(owner) for owner in range(num_owners)}
    here = Counter(member.node for who, member in members.items() if who in ranks | owners)

    def needed(who: str) -> int:
        if who not in ranks | owners:
            return PROCESS + _CALLS * (num_ranks + num_owners)
        neighbours = here[members[who].node] - 1
        of_owner = files_of_owner(num_ranks, num_owners + num_beside, neighbours)
        if who in owners:
            return of_owner
        return files_of_rank(num_owners + num_beside, neighbours) + (of_owner if num_beside else 0)

    return {who: needed(who) for who in members}


def too_few_files(members: Mapping[str, Member], num_ranks: int, num_owners: int, num_beside: int = 0) -> str | None:
    """Why a run cannot have so many ranks and owners: the process that lacks most, and what to do; None: it can. What a
    process may open is not looked at if it has not said that. The arguments are those of ``files_needed``."""
    needed = files_needed(members, num_ranks, num_owners, num_beside)
    lacks = {
        who: needed[who] - member.open_files
        for who, member in members.items()
        if member.open_files is not None and member.open_files < needed[who]
    }
    if not lacks:
        return None
    who = max(lacks, key=lambda each: lacks[each])
    others = f" (and {count(len(lacks) - 1, 'more process', 'more processes')})" if len(lacks) > 1 else ""
    opened = count(members[who].open_files or 0, "file")
    run = f"{count(num_ranks, 'rank')} and {count(num_owners + num_beside, 'optimizer')}"
    return (
        f"{who} on node {members[who].host} may have {opened} open, connections included{others}, "
        f"but with {run} it may need {needed[who]:,}; raise the hard limit of open files on that node (ulimit -Hn, "
        "LimitNOFILE, docker --ulimit nofile) and start Ray there again, or use fewer ranks or optimizers"
    )
