"""Too few open files for a run are one line before it begins, and each process may open what its host allows."""

from __future__ import annotations

import resource
import subprocess
import sys
import textwrap

import pytest

from rayzero.cluster.nodes.resources import (
    PROCESS,
    files_needed,
    files_of_door,
    files_of_owner,
    files_of_rank,
    too_few_files,
)
from rayzero.cluster.run import Member
from rayzero.concurrency.processes import MOST, open_files_allowed
from rayzero.store.owner.tensor_port import ENTERING


def members(num_ranks: int, num_owners: int, limits: dict[str, int | None], on: int = 8) -> dict[str, Member]:
    """Ranks on nodes of ``on`` each, and optimizers on nodes of one each."""
    nodes = {f"rank {rank}": f"10.0.0.{rank // on}" for rank in range(num_ranks)}
    nodes |= {f"optimizer {owner}": f"10.0.1.{owner}" for owner in range(num_owners)}
    nodes["the driver"] = "10.0.2.0"
    return {who: Member(who=who, pid=1, node=at, host=at, open_files=limits.get(who)) for who, at in nodes.items()}


def test_a_thousand_ranks_written_out() -> None:
    # 4 connections for tensors: fetches over 1, pushes, loads and stages over 1 each; links count twice
    # 63 owners may be on other hosts: as a door to them 4 connections and an eventfd, and as much from their doors
    doors = 63 * 2 * (1 + 4 + 1) + 63 * 2 * (1 + 4)
    lead = 64 * 2 * (1 + 1)  # its link to each owner, with an eventfd
    assert files_of_owner(1000, 64, 0) == PROCESS + ENTERING + 1000 * 2 * (1 + 4) + lead + 2 + 64 * 2 + doors
    assert files_of_rank(256, 7) == PROCESS + 256 * 2 * (1 + 4 + 1) + 7 * 5
    # 20 more without shards: a rank asks 19 of them once where they are, and has links to its own
    assert files_of_rank(276, 7, 20) == PROCESS + 257 * 2 * (1 + 4 + 1) + 19 * (1 + 1) + 7 * 5
    doors, from_doors = 255 * 2 * (1 + 4 + 1), 275 * 2 * (1 + 4)
    ranks = 1000 * 2 * (1 + 4)
    shards = 256 * 2
    assert (
        files_of_owner(1000, 276, 0, 20) == PROCESS + ENTERING + ranks + 276 * 2 * 2 + 2 + shards + doors + from_doors
    )
    # such a one: 50 ranks of its host, 950 that ask, 256 owners
    assert files_of_door(1000, 276, 50, 20) == PROCESS + ENTERING + 2 + 50 * 10 + 950 + 256 * 2 * 6 + 50 * 5
    # if it calls them for its ranks, over its own connections: of each rank a line to each, with the rank's pidfd
    calls = 256 * 2 * 50 * 2
    assert files_of_door(1000, 276, 50, 20, 50) == files_of_door(1000, 276, 50, 20) + calls
    # one owner: 2 threads a direction may all be for it
    assert files_of_owner(10, 1, 3) == PROCESS + ENTERING + 10 * 2 * (1 + 4) + 2 * 2 + 2 + 2 + 3 * 5


def test_the_needs_of_each_process() -> None:
    needed = files_needed(members(16, 2, {}), 16, 2, 0)
    assert needed["rank 0"] == needed["rank 15"] == files_of_rank(2, 7)
    assert needed["optimizer 1"] == files_of_owner(16, 2, 0)
    assert needed["the driver"] == PROCESS + 2 * 18
    doors = files_needed(members(16, 4, {}), 16, 4, num_doors=2)
    assert doors["rank 0"] == files_of_rank(4, 7, 2)
    assert [doors[f"optimizer {i}"] for i in range(4)] == [files_of_owner(16, 4, 0, 2)] * 2 + [
        files_of_door(16, 4, 0, 2)
    ] * 2
    beside = files_needed(members(16, 2, {}), 16, 2, 16)
    assert beside["rank 0"] == files_of_rank(18, 7) + files_of_owner(16, 18, 7, ranks_here=8)


def test_a_run_of_some_dozens_fits_into_the_usual_limit() -> None:
    limits = dict.fromkeys(members(48, 4, {}), 1024)
    assert too_few_files(members(48, 4, limits), 48, 4) is None


def test_too_few_files_are_one_line_with_the_process_its_node_and_what_to_do() -> None:
    needed = files_of_owner(1000, 4, 0)
    limits: dict[str, int | None] = {"optimizer 1": 4096, "optimizer 2": 1024, "optimizer 3": needed, "rank 0": 1 << 20}
    said = too_few_files(members(1000, 4, limits), 1000, 4)
    assert said == (
        f"optimizer 2 on node 10.0.1.2 may have 1,024 files open, connections included (and 1 more process), but with "
        f"1,000 ranks and 4 optimizers it may need {needed:,}; raise the hard limit of open files on that node "
        "(ulimit -Hn, LimitNOFILE, docker --ulimit nofile) and start Ray there again, or use fewer ranks or optimizers"
    )
    assert too_few_files(members(1000, 4, {"optimizer 1": needed}), 1000, 4) is None
    assert too_few_files(members(1000, 4, {"optimizer 1": needed - 1}), 1000, 4) is not None


def test_more_owners_may_be_too_many_for_a_rank() -> None:
    limits: dict[str, int | None] = {"rank 3": 1024}
    there = members(8, 64, limits)
    assert too_few_files(there, 8, 64) is None
    assert str(too_few_files(there, 8, 128)).startswith("rank 3 on node 10.0.0.0 may have 1,024 files")
    assert "the driver" in str(too_few_files(members(500, 4, {"the driver": 1024}), 500, 4))


@pytest.mark.parametrize(
    ("soft", "hard", "asked"),
    [
        (1024, 4096, 4096),
        (4096, 4096, 4096),
        (1024, 1 << 30, MOST),  # some containers; programs that close whatever may be open would be at it for long
        (1024, resource.RLIM_INFINITY, MOST),
        (1 << 21, 1 << 30, 1 << 21),  # never less than before
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, MOST),
    ],
)
def test_the_soft_limit_is_raised_to_what_the_host_allows(soft: int, hard: int, asked: int) -> None:
    assert open_files_allowed(soft, hard) == asked


def test_a_process_raises_its_own_limit() -> None:
    code = """
        import resource
        from rayzero.concurrency.processes import raise_open_files

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
        print(raise_open_files(), raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))
        """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert ran.stdout == "512 512 512 512\n", ran.stderr
