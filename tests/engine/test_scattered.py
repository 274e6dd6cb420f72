"""A script alone: its owner reads gradients where autograd has left them, and computes while the script waits."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.owner.gradients import contributions, shard_sums
from rayzero.owner.publisher import Publisher
from rayzero.owner.shard import OwnedShard
from rayzero.protocol.messages import MASTER
from rayzero.telemetry.names import MEMORY_BYTES
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import run_ranks
from tests.support.simulated_lane import SimulatedLane, device_behind
from tests.support.waiting import until

CORES = len(os.sched_getaffinity(0))
WAIT = 60.0  # seconds: only a fault lasts so long
WIDTH = 64  # parameters of a multiple of 64 elements have no padding between them


class Blocks(nn.Module):
    """Units of several parameters, one of which a step may leave out; the last unit has padding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, skip: bool = False) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + (block[0](x)[:, :WIDTH] if skip and index == 1 else block(x))
        out: Tensor = self.head(x)
        return out


def prepared(base: nn.Module, **config: Any) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    model = copy.deepcopy(base)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return rayzero.prepare(model, adamw, ZeroConfig(units=["Sequential"], **config))


def batch(step: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))


def masters(optimizer: rayzero.ZeroOptimizer) -> list[Tensor]:
    engine = optimizer.engine
    return [engine.cache.fetch_flat(unit, MASTER) for unit in engine.units]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_not_copied_and_take_no_memory_once_they_are_applied(precision: str) -> None:
    recorder = MemoryRecorder()
    with running_in(RankContext(recorder=recorder)):
        model, optimizer = prepared(Blocks(), precision=precision)
        region = optimizer.engine.store.connection._gradients
        units = {unit.layout.index: unit.layout for unit in optimizer.engine.units}
        for step in range(2):
            model(batch(step)).square().mean().backward()
            held = {index: region.scattered(index) for index in units}
            assert {index for index, each in held.items() if each is None} == {
                index for index, unit in units.items() if any(unit.gaps)
            }, "only what has padding is gathered"
            assert recorder.gauge(MEMORY_BYTES, kind="grad", tier="ram") == sum(u.size_bytes for u in units.values())
            del held
            optimizer.step()
            until(lambda: not any(map(region.scattered, units)), what="the update that has published is ending")
            padded = sum(unit.size_bytes for unit in units.values() if any(unit.gaps))
            assert recorder.gauge(MEMORY_BYTES, kind="grad", tier="ram") == padded
            optimizer.zero_grad()
        assert not any(region.memory.homes[index].any() for index, unit in units.items() if not any(unit.gaps))


@pytest.mark.parametrize("shard_bytes", [8 << 20, 4096])  # in the second, parameters lie in several shards
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_the_bits_are_those_of_gathered_gradients(
    monkeypatch: pytest.MonkeyPatch, kernel: str, shard_bytes: int
) -> None:
    base = Blocks()

    def train() -> list[Tensor]:
        with running_in(RankContext()):
            model, optimizer = prepared(base, kernel=kernel, shard_bytes=shard_bytes)
            for step in range(4):
                model(batch(step), skip=step == 2).square().mean().backward()
                if step == 1:  # an unplanned second backward is added to the first
                    model(batch(9), skip=True).square().mean().backward()
                if step == 3:
                    optimizer.clip_grad_value_(1e-3)
                optimizer.clip_grad_norm_(0.1)
                optimizer.step()
                optimizer.zero_grad()
            return masters(optimizer)

    scattered = train()
    monkeypatch.setattr("rayzero.engine.units.transfers._can_stay", lambda *_: False)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(scattered, train(), strict=True))


def test_gradients_of_a_discarded_attempt_are_not_applied() -> None:
    base = Blocks()

    def train(*, discard: bool) -> list[Tensor]:
        with running_in(RankContext()):
            model, optimizer = prepared(base)
            if discard:
                model(batch(7)).square().mean().backward()
                optimizer.zero_grad()
            model(batch(0)).square().mean().backward()
            optimizer.step()
            return masters(optimizer)

    assert all(map(torch.equal, train(discard=True), train(discard=False)))


def test_squares_of_what_stays_are_summed_once_the_backward_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    early: list[int] = []
    later = shard_sums.ShardSums.sum_later

    def note(sums: shard_sums.ShardSums, shards: Sequence[OwnedShard], step: int) -> None:
        early.extend(owned.unit.index for owned in shards)
        later(sums, shards, step)

    monkeypatch.setattr(contributions, "EARLY", 1)  # element: one task a shard
    monkeypatch.setattr(shard_sums.ShardSums, "sum_later", note)
    with running_in(RankContext()):
        model, optimizer = prepared(Blocks())
        model(batch(0)).square().mean().backward()
        assert early == [unit.layout.index for unit in optimizer.engine.units if any(unit.layout.gaps)]


@pytest.mark.parametrize(
    ("place", "threads", "waits"),
    [("inproc", 1, True), ("shm", CORES, True), ("shm", CORES - 1, False), ("device", CORES, False)],
)
def test_a_forward_begins_once_the_update_is_over_where_both_need_the_same_cores(
    monkeypatch: pytest.MonkeyPatch, place: Any, threads: int, waits: bool
) -> None:
    """On a device, or where a core is left for owners, it begins with the first unit that is published."""
    publish, goes_on = Publisher.publish, threading.Event()

    def late(publisher: Publisher, shards: list[OwnedShard], version: int) -> None:
        if version == 1 and shards[0].unit.name == "blocks.2":
            goes_on.wait(0.2 if waits else WAIT)
        publish(publisher, shards, version)

    def loop(context: RankContext) -> bool:
        model, optimizer = prepared(Blocks())
        model(batch(0)).square().mean().backward()
        optimizer.step()
        last = optimizer.engine.store.published(optimizer.engine.units[-1].layout.index, 1)
        begun: list[bool] = []

        def begin(*_: object) -> None:
            begun.append(last.done())
            goes_on.set()

        model.get_submodule("blocks.0.0").register_forward_pre_hook(begin)
        model(batch(1))
        return begun[0]

    monkeypatch.setattr(Publisher, "publish", late)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with device_behind(SimulatedLane(seed=0)) if place == "device" else nullcontext():
        assert run_ranks(loop, 1, 1, "inproc" if place == "device" else place) == [waits]
