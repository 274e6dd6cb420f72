"""Processes of the driver's node: who is stopped, who is killed, and what the janitor hears; real ones, without Ray."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from rayzero.cluster.roster import LocalProcesses
from rayzero.cluster.run import Member

HERE = "n"


def member(who: str, pid: int, node: str = HERE) -> Member:
    return Member(who=who, pid=pid, node=node, host="10.0.0.1")


@pytest.fixture
def start() -> Iterator[Callable[..., dict[str, Member]]]:
    """``start(names)``: processes that sleep, as members."""
    with ExitStack() as started:

        def make(*names: str) -> dict[str, Member]:
            found = {}
            for who in names:
                process = started.enter_context(subprocess.Popen(["sleep", "600"]))
                started.callback(process.kill)
                found[who] = member(who, process.pid)
            return found

        yield make


@pytest.fixture
def local() -> LocalProcesses:
    return LocalProcesses()


def suspend(there: Member) -> None:
    process = psutil.Process(there.pid)
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def lives(there: Member) -> bool:
    return psutil.pid_exists(there.pid) and psutil.Process(there.pid).status() != psutil.STATUS_ZOMBIE


def test_whoever_is_stopped_is_found_also_the_coordinator_and_a_spare(
    start: Callable[..., dict[str, Member]], local: LocalProcesses
) -> None:
    """Nobody waits for them until reports pile up, or somebody dies."""
    everyone = start("coordinator", "spare 0", "rank 0", "rank 1")
    local.find(everyone, HERE)
    for who in ("coordinator", "spare 0", "rank 1"):
        suspend(everyone[who])
    assert local.stopped == ["coordinator", "spare 0", "rank 1"]
    ranks = {who: everyone[who] for who in ("rank 0", "rank 1")}
    [still] = local.standing_still(ranks)
    what = f"makes no progress: its process (pid {ranks['rank 1'].pid} on 10.0.0.1) is stopped"
    assert (still.who, still.what) == ("rank 1", what)
    local.kill("coordinator")
    psutil.wait_procs([psutil.Process(everyone["coordinator"].pid)], timeout=20)
    assert local.stopped == ["spare 0", "rank 1"]
    local.kill_stopped()
    psutil.wait_procs([psutil.Process(everyone[who].pid) for who in ("spare 0", "rank 1")], timeout=20)
    assert [who for who, there in everyone.items() if lives(there)] == ["rank 0"]
    local.see_gone(0.0)
    assert not any(map(lives, everyone.values()))


def test_whoever_is_elsewhere_or_gone_is_nobody_here(
    start: Callable[..., dict[str, Member]], local: LocalProcesses
) -> None:
    [here] = start("rank 0").values()
    gone = subprocess.Popen(["true"])
    gone.wait()
    local.find({"rank 0": here, "rank 1": member("rank 1", here.pid, "m"), "rank 2": member("rank 2", gone.pid)}, HERE)
    assert [local.pid(who) for who in ("rank 0", "rank 1", "rank 2")] == [here.pid, None, None]
    local.kill("rank 1")
    local.kill_stopped()
    assert lives(here)


def test_a_process_that_was_told_to_end_leaves_its_name_and_is_waited_for(
    start: Callable[..., dict[str, Member]], local: LocalProcesses
) -> None:
    everyone = start("optimizer 0", "optimizer 0 (joins)")
    local.find(everyone, HERE)
    local.let_end("optimizer 0")
    local.rename("optimizer 0 (joins)", "optimizer 0")
    assert local.pid("optimizer 0") == everyone["optimizer 0 (joins)"].pid
    local.rename("optimizer 1 (joins)", "optimizer 1")
    assert local.pid("optimizer 1") is None, "it is on another node"
    local.await_ending(0.01)
    local.see_gone(0.01)
    assert not any(map(lives, everyone.values()))
    assert local.pid("optimizer 0") is None


def test_the_janitor_hears_of_all_each_time_somebody_comes(
    start: Callable[..., dict[str, Member]], local: LocalProcesses
) -> None:
    told: list[list[int]] = []
    closed: list[bool] = []

    class Janitor:
        def watch(self, processes: Any) -> None:
            told.append([process.pid for process in processes])

        def close(self) -> None:
            closed.append(True)

    first, second = start("rank 0", "rank 1").values()
    local.janitor = Janitor()  # type: ignore[assignment]
    local.find({"rank 0": first}, HERE)
    local.find({"rank 1": second}, HERE)
    assert told == [[first.pid], [first.pid, second.pid]]
    local.close()
    assert closed == [True]
