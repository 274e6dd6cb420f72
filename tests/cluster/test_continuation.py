"""What a killed run goes on from is decided from files alone; the reasons against it have names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayzero.cluster.continuation import Continuation, Left, Lost, States, Successor, choose, find_continuation
from rayzero.layout.shard_map import Rescale
from rayzero.protocol.messages import AT_COMMIT, AT_FORWARD, Action, Decision
from rayzero.protocol.ownership import Ownership
from rayzero.store.shm.recovery import DeadRun, DeadShard
from tests.support import needs


def whole(version: int) -> frozenset[tuple[int, int]]:
    return frozenset({(version, AT_COMMIT), (version, AT_FORWARD)})


def decision(step: int) -> Decision:
    return Decision(step=step, attempts=(0, 0), action=Action.APPLY, scale=1.0, norm=1.0, hyper=())


def shard(index: int, **fields: Any) -> DeadShard:
    at = {"published": 5, "decided": 5, "applied": 5, "tiles": (10, 10)} | fields
    return DeadShard(shard=index, owner=index, **at)


RUN = DeadRun(
    run="demo",
    num_owners=2,
    shards=(shard(0), shard(1)),
    records=(decision(3), decision(4)),
    ranks=frozenset({0, 1}),
    lives=(0, 1),
    world_size=2,
    began=0,
    loops={0: whole(4) | whole(5), 1: whole(4) | whole(5)},
    rank_life=2,
)


def chosen(run: DeadRun | None, **fields: Any) -> Continuation | Lost:
    return choose(Left(run=run, **fields), num_workers=2, num_owners=2)


def test_a_run_that_left_everything_goes_on_from_its_last_decided_step() -> None:
    assert chosen(RUN) == Continuation(step=5, life=3, repeats=None)


def test_what_was_decided_and_not_applied_is_redone() -> None:
    behind = replace(RUN, shards=(shard(0), shard(1, published=4, applied=4, tiles=(10, 8))))
    assert chosen(behind) == Continuation(step=5, life=3, repeats=None)


def test_all_ranks_repeat_the_end_of_an_iteration_that_one_had_not_ended() -> None:
    committed = frozenset({(5, AT_COMMIT)})
    ahead = whole(4) | whole(5) | {(6, AT_COMMIT)}
    repeated = Continuation(step=5, life=3, repeats=5)
    assert chosen(replace(RUN, loops={0: ahead, 1: whole(4) | committed})) == repeated
    first = replace(RUN, began=4, loops={0: committed, 1: whole(5)})  # the loop begins as it began, to repeat that step
    assert chosen(first) == Continuation(step=5, life=3, repeats=5)


@pytest.mark.parametrize("lives", [(0, 1, 2), (0, 1)], ids=["a door has left its slab", "none"])
@pytest.mark.parametrize(
    ("ownership", "optimizers"),
    [(Ownership(3, doors=1), 2), (Ownership(4, doors=1).then(Rescale((0, 1, None), 1)), 3)],
    ids=["as it began", "as it began, before a change"],
)
def test_an_optimizer_without_shards_is_none_that_is_asked_for_and_the_next_run_has_it_again(
    ownership: Ownership, optimizers: int, lives: tuple[int, ...]
) -> None:
    left = Left(run=replace(RUN, num_owners=3, ownership=ownership, lives=lives))
    goes_on = Continuation(step=5, life=3, repeats=None, ownership=ownership)
    assert [choose(left, num_workers=2, num_owners=num) for num in (optimizers, 2)] == [goes_on, goes_on]
    assert isinstance(choose(left, num_workers=2, num_owners=4), Lost)


TORN = (10, 9)
REFUSED: list[tuple[DeadRun | None, dict[str, Any], str]] = [
    (None, {}, "nothing of it is left in this host's shared memory"),
    (RUN, {"alive": ("params 0 (pid 7)",)}, "processes of it still run: params 0 (pid 7)"),
    (RUN, {"models": 2}, "its loop prepares 2 models, whose steps cannot be repeated alone"),
    (replace(RUN, world_size=3), {}, "it had 3 ranks and 2 optimizers, and now there are to be 2 and 2"),
    (replace(RUN, num_owners=1), {}, "it had 2 ranks and 1 optimizer, and now there are to be 2 and 2"),
    (replace(RUN, lives=(0,)), {}, "optimizers [1] left nothing on this host"),
    (replace(RUN, lives=(0, 1, 1)), {}, "optimizers [1] left slabs of two lives"),
    (
        replace(RUN, shards=(shard(0), shard(1, on_device=True, tiles=()))),
        {},
        "masters and states of shard 1 of optimizer 1 were in a device's memory",
    ),
    (
        replace(RUN, shards=(shard(0), shard(1, published=4, applied=4, tiles=TORN))),
        {},
        "tiles [1] of shard 1 of optimizer 1 were being written, without an undo log",
    ),
    (
        replace(RUN, shards=(shard(0), shard(1, published=4, applied=4, tiles=(8, 8))), ranks=frozenset({0})),
        {},
        "gradients of ranks [1] are not on this host",
    ),
    (replace(RUN, began=5), {}, "it had decided no step"),
    (
        replace(RUN, loops={0: RUN.loops[0]}),
        {},
        "the state of the loop at step 5 was not kept on rank 1; loops that call rayzero.track() are kept",
    ),
    (
        replace(RUN, loops={}),
        {},
        "the state of the loop at step 5 was not kept on ranks 0, 1; loops that call rayzero.track() are kept",
    ),
    (  # rank 0 cannot begin step 5, and rank 1 cannot go back to the end of step 4
        replace(RUN, loops={0: whole(4) | {(5, AT_COMMIT)}, 1: whole(5)}),
        {},
        "the state of the loop at step 5 was not kept on rank 1; loops that call rayzero.track() are kept",
    ),
]


@pytest.mark.parametrize(("run", "fields", "why"), REFUSED, ids=[why[:40] for _, _, why in REFUSED])
def test_what_cannot_go_on_says_why(run: DeadRun | None, fields: dict[str, Any], why: str) -> None:
    assert chosen(run, **fields) == Lost(why=why)


@needs.shared_memory
def test_another_host_mount_or_boot_has_nothing(tmp_path: Path) -> None:
    here = States.in_directory("one", tmp_path)
    record = {"run": "demo", "states": {"lineage": "one", "directory": str(tmp_path), "memory": here.memory}}

    def found(record: dict[str, Any]) -> Continuation | Lost:
        return find_continuation(record, Successor(directory=tmp_path, num_workers=2, num_owners=2))

    assert found(record) == Lost(why="nothing of it is left in this host's shared memory")
    record["states"] = {**record["states"], "memory": "0" + here.memory[1:]}  # type: ignore[dict-item]
    assert found(record) == Lost(why=f"its memory was {tmp_path} on another host, or this host has been restarted")
    assert found({"run": "demo"}) == Lost(why="it kept no states in shared memory")
