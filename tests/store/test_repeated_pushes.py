"""What a rank sends again to owners that may lack it, and over which channel: without a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from rayzero.concurrency.futures import failed, settled
from rayzero.errors import StallError
from rayzero.protocol.gradient_sum import NOTHING_LEFT, FormerRank, GradientMemory
from rayzero.protocol.messages import Contribution, Published, Pushed
from rayzero.store.host.channel import BrokenLinkError, Channel
from rayzero.store.host.waits import PublishBoard, PushOrder
from rayzero.store.host.wire_transfers import PushedUnit, WireTransfers
from rayzero.store.rank.gradient_region import gradient_memory, gradient_region
from rayzero.store.remote.ways import RepeatedPushes
from rayzero.store.shm.shared_plan import SharedPlan

from .toy import WAIT, make_spec

OWNERS = 2
PLAN = SharedPlan.of(make_spec(accumulation_steps=2), OWNERS)
UNITS = PLAN.spec.layout.units


def everything(unit: int) -> bytes:
    return b"\xff" * ((len(UNITS[unit].slots) + 7) // 8)


class Wire:
    """Takes what is sent; a channel may break."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, list[PushedUnit], int]] = []
        self.broken: set[Any] = set()

    def push_again(
        self, channel: Any, pushes: Callable[[], Iterator[PushedUnit]], size_bytes: int, timeout_s: float
    ) -> None:
        if channel in self.broken:
            raise BrokenLinkError(f"{channel} broke")
        self.sent.append((channel, list(pushes()), size_bytes))


class Link:
    """A link whose channels break one after the other."""

    def __init__(self, owner: int, *channels: str) -> None:
        self.owner, self.name, self.left = owner, f"optimizer {owner}", list(channels)
        self.broke_at: list[Any] = []

    def when_open(self, after: Any = None) -> Future[Any]:
        left = self.left[self.left.index(after) + 1 :] if after is not None else self.left
        return settled(left[0]) if left else failed(StallError(f"{self.name}: its link is down"))

    def broke(self, channel: Any, error: Exception) -> None:
        self.broke_at.append(channel)


class Rank:
    """A rank that has pushed."""

    def __init__(self, former: FormerRank = NOTHING_LEFT) -> None:
        self.gradients = gradient_region(PLAN.spec, gradient_memory(PLAN.spec, pinned_for=None))
        self.board, self.order, self.wires = PublishBoard(), PushOrder(), [Wire() for _ in range(OWNERS)]
        wires = cast(list[WireTransfers], self.wires)
        self.repeats = RepeatedPushes(3, PLAN, self.gradients, wires, self.board, self.order, WAIT, former)

    def push(self, unit: int, step: int) -> None:
        """Gradients of step + unit, but for padding."""
        contribution = Contribution(step=step, attempt=0, rank=3, unit=unit, seq=0, presence=everything(unit))
        self.gradients.put(contribution, torch.full((UNITS[unit].numel,), float(step + unit)))

    def publish(self, unit: int, version: int) -> None:
        for owner in range(OWNERS):
            shards = [shard.index for shard in PLAN.shards_of(owner) if shard.unit == unit]
            self.board.publish([Published(shard, version, version) for shard in shards])

    def send(self, owner: int) -> list[tuple[int, int]]:
        """(step, unit) of what goes there."""
        self.repeats.send(owner, cast(Channel, "channel"))
        return [(each.contribution.step, each.unit.index) for _, sent, _ in self.wires[owner].sent for each in sent]


def test_what_a_former_life_has_pushed_of_decided_steps_goes_first() -> None:
    left = torch.ones(UNITS[1].numel)
    pushed = Pushed(step=4, attempt=0, count=1, presence=everything(1))
    rank = Rank(FormerRank(GradientMemory({1: left}), ((1, pushed),)))
    rank.push(0, 5)
    owner = next(owner for owner in range(OWNERS) if {0, 1} <= {shard.unit for shard in PLAN.shards_of(owner)})
    assert rank.send(owner) == [(4, 1), (5, 0)]
    rank.wires[owner].sent.clear()
    rank.publish(1, 5)
    assert rank.send(owner) == [(5, 0)]


def test_all_owners_are_sent_to_over_whatever_channel_is_open_then() -> None:
    rank = Rank()
    rank.push(0, 1)
    rank.wires[1].broken = {"first", "second"}
    links = [Link(0, "first"), Link(1, "first", "second", "third")]
    with ThreadPoolExecutor(2) as threads:
        rank.repeats.send_all(cast(Any, links), threads)
    assert [link.broke_at for link in links] == [[], ["first", "second"]]
    assert [[channel for channel, _, _ in wire.sent] for wire in rank.wires] == [["first"], ["third"]]


def test_a_link_that_stays_down_is_named_once_all_others_have_ended() -> None:
    rank = Rank()
    rank.push(0, 1)
    rank.wires[0].broken = {"first"}
    with ThreadPoolExecutor(1) as threads, pytest.raises(StallError, match="optimizer 0: its link is down"):
        rank.repeats.send_all(cast(Any, [Link(0, "first"), Link(1, "first")]), threads)
    assert len(rank.wires[1].sent) == 1
