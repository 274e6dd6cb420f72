"""What the actor between another library's ranks and the driver answers, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from rayzero.cluster.group_owners import GroupEnded, GroupStart, WorkerGroup, WorkerGroups
from rayzero.protocol.ownership import Ownership
from rayzero.security.authority import Authority
from rayzero.security.credentials import ANY_RANK


def group(name: str) -> WorkerGroup:
    return WorkerGroup(name=name, run="demo", world_size=2, nodes=("n", "n"), resume=None)


def start(*addresses: str) -> GroupStart:
    ownership = Ownership(len(addresses))
    return GroupStart(
        addresses=addresses, ownership=ownership, lineage="l", life=0, repeats=None, resume=None, token="t"
    )


async def soon(call: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(call, 30)


async def waits(task: asyncio.Task[Any]) -> bool:
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


def test_ranks_wait_until_the_driver_has_opened_their_group() -> None:
    async def story() -> None:
        groups = WorkerGroups()
        first = asyncio.create_task(groups.join(group("a"), 0, "pid 1"))
        assert await soon(groups.next_group(None)) == group("a")
        assert await waits(first)
        await groups.open("a", start("x", "y"))
        assert await soon(first) == start("x", "y")
        assert await soon(groups.join(group("a"), 1, "pid 2")) == start("x", "y")

    asyncio.run(story())


def test_a_newer_group_ends_the_one_before_it() -> None:
    async def story() -> None:
        groups = WorkerGroups()
        old = asyncio.create_task(groups.join(group("a"), 0, "pid 1"))
        await soon(groups.next_group(None))
        news = asyncio.create_task(groups.next_group("a"))
        moved = asyncio.create_task(groups.news("a", start()))
        assert await waits(news)
        new = asyncio.create_task(groups.join(group("b"), 0, "pid 3"))
        assert await soon(news) == group("b")
        for told in (old, moved, groups.join(group("a"), 1, "pid 2")):
            assert "another group of workers" in (await soon(told)).why
        await groups.open("a", start("x"))
        assert await waits(new), "that was for the group before"
        await groups.open("b", start("z"))
        assert await soon(new) == start("z")

    asyncio.run(story())


def test_ranks_learn_that_an_owner_has_moved_of_new_certificates_and_that_owners_are_lost() -> None:
    async def story() -> None:
        groups = WorkerGroups()
        joined = asyncio.create_task(groups.join(group("a"), 0, "pid 1"))
        await soon(groups.next_group(None))
        await groups.open("a", start("x", "y"))
        await soon(joined)
        moved = asyncio.create_task(groups.news("a", start("x", "y")))
        assert await waits(moved)
        await groups.open("a", start("x", "z"))
        assert await soon(moved) == start("x", "z")
        shown = Authority("demo", on_loopback=False).issue("any rank", [ANY_RANK])
        renewed = asyncio.create_task(groups.news("a", start("x", "z")))
        assert await waits(renewed)
        now = replace(start("x", "z"), tls=shown)
        await groups.open("a", now)
        assert await soon(renewed) == now
        assert await soon(groups.join(group("a"), 1, "pid 2")) == now, "who comes later begins with it"
        lost = asyncio.create_task(groups.news("a", now))
        assert await waits(lost)
        await groups.fail("a", "optimizer 1 died")
        assert await soon(lost) == GroupEnded(why="optimizer 1 died")
        again = asyncio.create_task(groups.join(group("b"), 0, "pid 2"))
        assert await waits(again), "the next group may get others"
        await groups.end("one failure too many")
        assert await soon(again) == GroupEnded(why="one failure too many")

    asyncio.run(story())


@pytest.mark.parametrize("opened", [False, True])
def test_one_worker_that_is_started_again_alone_is_refused(opened: bool) -> None:
    async def story() -> None:
        groups = WorkerGroups()
        joined = asyncio.create_task(groups.join(group("a"), 0, "pid 1"))
        await soon(groups.next_group(None))
        if opened:
            await groups.open("a", start("x"))
        refused = await soon(groups.join(group("a"), 0, "pid 2"))
        assert refused.why.startswith("rank 0 was pid 1 and is now pid 2, in the same group of workers")
        await groups.open("a", start("x"))
        assert await soon(joined) == start("x")

    asyncio.run(story())
