"""What a new group of ranks may continue; that one does: tests/integrations/test_ray_train_deaths.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rayzero.cluster import group_owners
from rayzero.cluster.continuation import Lost
from rayzero.cluster.group_owners import GroupEnded, GroupOwners, WorkerGroup, WorkerGroups
from rayzero.cluster.nodes.resources import Node, files_of_owner
from rayzero.cluster.processes.rank_worker import RankStart
from rayzero.cluster.run import Member
from rayzero.cluster.run_actors import RunActors
from rayzero.config import RunConfig, ZeroConfig
from rayzero.elastic.reform import hosts_without_owner
from rayzero.errors import RunFailedError
from rayzero.protocol.ownership import Ownership
from rayzero.security.authority import Authority
from rayzero.security.credentials import ANY_RANK
from rayzero.slabs.sweep import held_in
from tests.support import needs


def group(name: str, run: str, nodes: str = "aa") -> WorkerGroup:
    return WorkerGroup(name=name, run=run, world_size=2, nodes=tuple(nodes), resume=None)


def owners(config: ZeroConfig, before: WorkerGroup | None) -> GroupOwners:
    """Both are on node a."""
    plan = SimpleNamespace(num_optimizers=2)
    places = SimpleNamespace(plan=plan, nodes_without_optimizer=lambda nodes: hosts_without_owner(nodes, "a"))
    made = GroupOwners(RunConfig(name="r"), config, places)  # type: ignore[arg-type]
    made._group, made._hold = before, made._new_hold()
    return made


@pytest.mark.parametrize(
    ("settings", "before", "nodes", "why"),
    [
        ({}, None, "aa", "no group has begun before"),
        ({}, group("a", "first"), "aa", "it is of another run, second; the one before was of first"),
        ({"transport": "grpc"}, group("a", "second"), "aa", "share no memory"),
        pytest.param({}, group("a", "second"), "ab", "its workers are on 10.0.0.2 now", marks=needs.shared_memory),
        pytest.param(
            {}, group("a", "second"), "ad", "its workers are on a node that is gone now", marks=needs.shared_memory
        ),
        pytest.param(
            {},
            group("a", "second"),
            "ac",
            "nothing of it is left in this host's shared memory",
            marks=needs.shared_memory,
        ),
    ],
)
def test_a_group_that_can_continue_nothing_hears_why(
    settings: dict[str, str], before: WorkerGroup | None, nodes: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, a and c, share the driver's host."""
    made = owners(ZeroConfig(**settings), before)  # type: ignore[arg-type]
    made._actors = SimpleNamespace(driver_node="a")  # type: ignore[assignment]
    alive = [Node(id=node, address=f"10.0.0.{1 + (node == 'b')}") for node in "abc"]
    monkeypatch.setattr(group_owners, "alive_nodes", lambda: alive)
    found = made._what_is_left(group("b", "second", nodes))
    assert isinstance(found, Lost)
    assert why in found.why
    if made._hold is not None:
        made._hold.close()


def answer_into(told: list[tuple[str, Any]], made: GroupOwners, actors: RunActors) -> None:
    """Have owners that are there, and note what groups are answered: (name, their start or why they have no owners)."""
    ownership, certificates = Ownership(2), SimpleNamespace(token="t", of_rank=lambda _: None)
    made._actors, made._controller = actors, SimpleNamespace(addresses=(), ownership=ownership)  # type: ignore[assignment]
    actors.certificates, actors._roster = certificates, SimpleNamespace(num_beside=0)  # type: ignore[assignment]
    made._tell = lambda group, answer: told.append((group.name, answer))  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("transport", "nodes", "doors"),
    [("auto", "aa", None), ("auto", "ba", ["b"]), ("auto", "cb", ["c", "b"]), ("grpc", "bc", None)],
)
def test_the_first_group_gets_other_owners_only_if_its_ranks_need_doors(
    transport: Any, nodes: str, doors: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Any]] = []
    changed: list[Any] = []
    made = owners(ZeroConfig(transport=transport), None)
    answer_into(told, made, RunActors("r", made._places, None))  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_change_owners", lambda group, nodes: changed.append(nodes))
    made._open(group("a", "first", nodes))
    assert changed == ([] if doors is None else [doors])
    ((name, start),) = told
    assert (name, start.ownership) == ("a", Ownership(2))
    made._open(group("b", "first", "a"))
    assert changed[-1] == [], "a new group has new owners"


def test_a_group_whose_door_does_not_start_hears_why_and_the_next_one_is_given_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host may have been lost meanwhile: the library starts the ranks again on another one."""
    told: list[tuple[str, Any]] = []
    changed: list[Any] = []
    made = owners(ZeroConfig(), None)
    answer_into(told, made, RunActors("r", made._places, None))  # type: ignore[arg-type]

    def change(group: WorkerGroup, nodes: Sequence[str]) -> None:
        changed.append(nodes)
        if len(changed) == 1:
            raise RunFailedError("optimizer 2 died")

    monkeypatch.setattr(made, "_change_owners", change)
    made._open(group("a", "first", "b"))
    assert told == [("a", GroupEnded(why="optimizer 2 died"))]
    made._open(group("b", "first", "a"))
    assert (changed, told[1][0]) == ([["b"], []], "b")


def test_a_group_whose_ranks_need_more_files_than_an_optimizer_may_open_is_refused() -> None:
    """The optimizers were there before anybody knew how many ranks there are."""
    told: list[tuple[str, Any]] = []
    made = owners(ZeroConfig(transport="grpc"), None)
    limit = files_of_owner(100, 2, 0, ranks_here=100)  # they may all be on its host
    actors = RunActors("r", made._places, None)  # type: ignore[arg-type]
    actors.members = {
        f"optimizer {i}": Member(who=f"optimizer {i}", pid=1, node=f"{i}", host="h", open_files=limit) for i in range(2)
    }
    answer_into(told, made, actors)
    made._open(replace(group("a", "first"), world_size=101))
    ((name, ended),) = told
    assert name == "a"
    assert "optimizer 0 on node h may have" in ended.why
    assert "with 101 ranks and 2 optimizers it may need" in ended.why
    made._open(replace(group("b", "first"), world_size=100))
    ((opened, start),) = told[1:]
    assert (opened, start.addresses) == ("b", ())


@needs.shared_memory
def test_what_is_left_is_held_until_the_owners_end() -> None:
    made = owners(ZeroConfig(), None)
    assert made._share is not None
    assert made._lineage in {held.lineage for held in held_in(made._share)}
    made._end(politely=True)
    assert made._lineage not in {held.lineage for held in held_in(made._share)}


# ---- what the actor between ranks and the driver answers, and when


def start(*addresses: str) -> RankStart:
    ownership = Ownership(len(addresses))
    return RankStart(
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
        first = asyncio.create_task(groups.join(group("a", "demo"), 0, "pid 1"))
        assert await soon(groups.next_group(None)) == group("a", "demo")
        assert await waits(first)
        await groups.tell("a", start("x", "y"))
        assert await soon(first) == start("x", "y")
        assert await soon(groups.join(group("a", "demo"), 1, "pid 2")) == start("x", "y")

    asyncio.run(story())


def test_a_newer_group_ends_the_one_before_it() -> None:
    async def story() -> None:
        groups = WorkerGroups()
        old = asyncio.create_task(groups.join(group("a", "demo"), 0, "pid 1"))
        await soon(groups.next_group(None))
        news = asyncio.create_task(groups.next_group("a"))
        moved = asyncio.create_task(groups.news("a", start()))
        assert await waits(news)
        new = asyncio.create_task(groups.join(group("b", "demo"), 0, "pid 3"))
        assert await soon(news) == group("b", "demo")
        for told in (old, moved, groups.join(group("a", "demo"), 1, "pid 2")):
            assert "another group of workers" in (await soon(told)).why
        await groups.tell("a", start("x"))
        assert await waits(new), "that was for the group before"
        await groups.tell("b", start("z"))
        assert await soon(new) == start("z")

    asyncio.run(story())


def test_ranks_learn_that_an_owner_has_moved_of_new_certificates_and_that_owners_are_lost() -> None:
    async def story() -> None:
        groups = WorkerGroups()
        joined = asyncio.create_task(groups.join(group("a", "demo"), 0, "pid 1"))
        await soon(groups.next_group(None))
        await groups.tell("a", start("x", "y"))
        await soon(joined)
        moved = asyncio.create_task(groups.news("a", start("x", "y")))
        assert await waits(moved)
        await groups.tell("a", start("x", "z"))
        assert await soon(moved) == start("x", "z")
        shown = Authority("demo", on_loopback=False).issue("any rank", [ANY_RANK])
        renewed = asyncio.create_task(groups.news("a", start("x", "z")))
        assert await waits(renewed)
        now = replace(start("x", "z"), tls=shown)
        await groups.tell("a", now)
        assert await soon(renewed) == now
        assert await soon(groups.join(group("a", "demo"), 1, "pid 2")) == now, "who comes later begins with it"
        lost = asyncio.create_task(groups.news("a", now))
        assert await waits(lost)
        await groups.tell("a", GroupEnded(why="optimizer 1 died"))
        assert await soon(lost) == GroupEnded(why="optimizer 1 died")
        again = asyncio.create_task(groups.join(group("b", "demo"), 0, "pid 2"))
        assert await waits(again), "the next group may get others"
        await groups.end("one failure too many")
        assert await soon(again) == GroupEnded(why="one failure too many")

    asyncio.run(story())


@pytest.mark.parametrize("opened", [False, True])
def test_one_worker_that_is_started_again_alone_is_refused(opened: bool) -> None:
    async def story() -> None:
        groups = WorkerGroups()
        joined = asyncio.create_task(groups.join(group("a", "demo"), 0, "pid 1"))
        await soon(groups.next_group(None))
        if opened:
            await groups.tell("a", start("x"))
        refused = await soon(groups.join(group("a", "demo"), 0, "pid 2"))
        assert refused.why.startswith("rank 0 was pid 1 and is now pid 2, in the same group of workers")
        await groups.tell("a", start("x"))
        assert await soon(joined) == start("x")

    asyncio.run(story())
