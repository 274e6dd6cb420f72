"""Which way leads to which owner, and what ends with the ways: without a socket."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rayzero.concurrency.futures import Gather
from rayzero.errors import EpochOverError, StoreClosedError
from rayzero.protocol.messages import COMPUTE, Contribution, Published
from rayzero.store.host.channel import Caller
from rayzero.store.host.waits import PublishBoard, StallWatch
from rayzero.store.remote.ways import Ways
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.telemetry.recorder import NullRecorder

from .toy import WAIT, make_spec

OWNERS = 3
PLAN = SharedPlan.of(make_spec(), OWNERS)
UNITS = PLAN.spec.layout.units
OVER = EpochOverError("other owners have taken over")


@pytest.fixture
def board() -> PublishBoard:
    return PublishBoard()


@pytest.fixture
def ways(board: PublishBoard) -> Iterator[Ways]:
    links = [SimpleNamespace(owner=owner, caller=Caller.rank(0), name=f"optimizer {owner}") for owner in range(OWNERS)]
    watch = StallWatch("rank 0", WAIT)
    said: Any = {"board": board, "watch": watch, "lead_says": None, "recorder": NullRecorder()}
    made = Ways(0, cast(Any, links), "none", **said)
    yield made
    made.end(OVER)
    made.close()
    watch.close()


def shards_of(owner: int) -> list[Any]:
    unit = PLAN.shards_of(owner)[0].unit
    return [shard for shard in PLAN.shards_of(owner) if shard.unit == unit]


class Mapped:
    """Shared memory in which every shard is ones."""

    def shard(self, owner: int, shard: int) -> torch.Tensor:
        return torch.ones(PLAN.spec.layout.shards[shard].numel)


def fetch(ways: Ways, owner: int) -> tuple[Gather, torch.Tensor]:
    shards, gather = shards_of(owner), Gather(1)
    out = torch.zeros(UNITS[shards[0].unit].numel)
    ways.wires[owner].fetch(gather, UNITS[shards[0].unit], shards, 0, COMPUTE, out)
    return gather, out


def test_owners_are_reached_over_grpc_until_they_share_memory(ways: Ways, board: PublishBoard) -> None:
    assert (ways.transport, sorted(ways.senders)) == ("grpc", [0, 1, 2])
    ways.share([1], cast(Any, Mapped()))
    assert (ways.transport, sorted(ways.senders)) == ("shm+grpc", [0, 2])
    assert [way.owner for way in ways.wires] == [0, 1, 2]
    gather, out = fetch(ways, 1)
    board.publish([Published(shard.index, 0, 0) for shard in shards_of(1)])
    gather.future.result(WAIT)
    assert out.sum() == sum(shard.numel for shard in shards_of(1))
    ways.share([0, 2], cast(Any, Mapped()))
    assert (ways.transport, ways.senders) == ("shm", {})


def test_owners_on_other_hosts_are_read_in_the_copy_of_this_one(ways: Ways, board: PublishBoard) -> None:
    """No channel is asked, and what their owners publish is not enough."""
    ways.share([1], cast(Any, Mapped()))
    ways.mirror([0, 2], cast(Any, Mapped()))
    board.copied(shard.index for owner in (0, 2) for shard in PLAN.shards_of(owner))
    assert ways.transport == "shm+grpc"
    assert [ways.senders[owner] is ways.wires[owner] for owner in (0, 2)] == [True, True]
    gather, out = fetch(ways, 2)
    published = [Published(shard.index, 0, 0) for shard in shards_of(2)]
    board.publish(published)
    assert not gather.future.done()
    board.arrived(published)
    gather.future.result(WAIT)
    assert all((out[shard.start : shard.stop] == 1).all() for shard in shards_of(2))


def test_owners_without_shards_count_for_nothing(ways: Ways) -> None:
    ways.use([1])
    ways.share([1], cast(Any, Mapped()))
    assert (ways.transport, ways.senders) == ("shm", {})


def test_pushes_that_wait_for_their_turn_end_with_the_ways(ways: Ways) -> None:
    shards, gather = shards_of(0), Gather(1)
    unit = UNITS[shards[0].unit]
    second = Contribution(step=0, attempt=0, rank=0, unit=unit.index, seq=1, presence=b"\1")
    ways.senders[0].push(gather, unit, shards, second, torch.zeros(unit.numel))
    assert not gather.future.done()
    ways.end(OVER)
    with pytest.raises(EpochOverError):
        gather.future.result(0)


def test_nothing_begins_once_they_are_closed(ways: Ways) -> None:
    ways.end(OVER)
    ways.close()
    gather, shards = Gather(1), shards_of(0)
    unit = UNITS[shards[0].unit]
    ways.wires[0].load(gather, unit.index, shards, torch.zeros(unit.numel))
    with pytest.raises(StoreClosedError, match="rank 0 used its store after close"):
        gather.future.result(0)
