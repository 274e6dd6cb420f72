"""Followers that share no memory with the owners have the same bits, over the network."""

from __future__ import annotations

import copy
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import Net, seeded
from store import toy
from store.stores import TOKEN, connected, serving
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.errors import StallError, StoreClosedError, UnsupportedError, VersionGoneError
from rayzero.followers import follower as follower_module
from rayzero.followers import remote_shards
from rayzero.followers.follower import Follower
from rayzero.followers.remote_shards import RemoteRun
from rayzero.security.credentials import follower_token
from rayzero.store.wire.rpc import CallTerms
from rayzero.telemetry.names import FOLLOW_BYTES, FOLLOW_SECONDS, FOLLOWER_LAG, FOLLOWERS
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.waiting import until

from .on_network import describe
from .test_follower import BF16, STEPS, AllKinds, Several, exported, same, take_step


@pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["plain", "tls"])
def test_after_each_of_50_steps_every_follower_has_the_bits_of_the_export(tmp_path: Path, tls: bool) -> None:
    base = seeded(Net, 3)

    def train(context: RankContext) -> None:
        torch.set_num_threads(1)
        model = copy.deepcopy(base)
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), BF16)
        followers = None
        if context.rank == 0:
            describe(context, tmp_path)
            followers = AllKinds(str(tmp_path))
            context.on_close(lambda _, followers=followers: followers.close())
        for step in range(STEPS // 5 if tls else STEPS):
            take_step(model, optimizer, step, context.rank)
            folder = tmp_path / str(step)
            wanted = exported(optimizer, folder) if context.rank == 0 else None
            if wanted is None:
                rayzero.save_checkpoint(optimizer, folder / "checkpoint")
            if followers is not None and wanted is not None:
                followers.look(step + 1, wanted)
        if followers is not None:
            found = followers.every.stats()
            assert found.versions == step + 1
            assert found.whole_bytes < 3 * found.versions * 10_000 or tls, "changes came"
            assert found.change_bytes > 0
            assert found.arrivals > 0
            assert found.arrival_s / found.arrivals < 5.0

    run_ranks(train, 2, 3, "grpc", tls=tls)


def alone(
    tmp_path: Path, loop: Any, config: ZeroConfig = BF16, base: nn.Module | None = None, transport: str = "grpc"
) -> Any:
    """Let ``loop(context, model, optimizer)`` train on one rank with two owners; what it returns."""
    plain = seeded(Net, 3) if base is None else base

    def train(context: RankContext) -> Any:
        torch.set_num_threads(1)
        trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
        model, optimizer = rayzero.prepare(plain, torch.optim.AdamW(trained, lr=1e-2), config)
        if transport == "grpc":
            describe(context, tmp_path)
        return loop(context, model, optimizer)

    return run_ranks(train, 1, 2, transport, config=config)[0]


def of(context: RankContext, folder: Path | str, model: int = 0) -> Follower:
    """A follower that is closed with the rank."""
    follower = rayzero.follow(folder, model=model)
    context.on_close(lambda _: follower.close())
    return follower


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "config",
    [
        ZeroConfig(precision="bf16", cpu_compression="int8"),
        ZeroConfig(precision="bf16", cpu_compression="lossless"),
        ZeroConfig(precision="fp16", units=["Linear"], keep_fp32=["embed"]),
        ZeroConfig(shard_bytes="4KiB"),
    ],
    ids=["a frozen part with loss", "a coded frozen part", "fp16, partly fp32", "fp32"],
)
def test_parameters_of_every_kind_are_followed_and_frozen_ones_come_once(config: ZeroConfig, tmp_path: Path) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        follower = of(context, tmp_path)
        sizes = []
        for step in range(3):
            take_step(model, optimizer, step, 0)
            found = {name: tensor.clone() for name, tensor in follower.read(step + 1)}
            wanted = rayzero.full_state_dict(model)
            for name, tensor in found.items():
                assert torch.equal(tensor, wanted[name].to(tensor.dtype)), name
            sizes.append(follower.stats())
        assert sizes[0].whole_bytes == sizes[2].whole_bytes > sizes[0].change_bytes == 0 < sizes[2].change_bytes

    alone(tmp_path, loop, config, seeded(Several, 1))


@pytest.mark.parametrize("transport", ["grpc", pytest.param("shm", marks=needs.shared_memory)])
def test_a_users_writes_are_published_too(transport: str, tmp_path: Path) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        follower = of(context, tmp_path if transport == "grpc" else context.run)
        for step in range(3):
            take_step(model, optimizer, step, 0)
            assert follower.wait(step + 1) == step + 1
            dict(follower.read())  # what the write changes is held already
            with torch.no_grad():
                model.norm.bias.fill_(step)
                model.layers[0].up.weight.mul_(0.5)
            wanted = exported(optimizer, tmp_path / str(step))  # the writes are made before
            assert same(follower.read(), wanted), step

    alone(tmp_path, loop, transport=transport)


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_ENDED_S", 0.2)
    followers = []

    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        followers.append(rayzero.follow(tmp_path))
        assert followers[0].read().version == 0
        take_step(model, optimizer, 0, 0)
        followers[0].wait(1)
        with pytest.raises(VersionGoneError, match="v0 is overwritten: v1 is published"):
            of(context, tmp_path).read(0)
        with pytest.raises(StallError, match=r"has no model 1 to follow \(yet\)"):
            of(context, tmp_path, model=1).wait(0, timeout_s=0.5)
        describe(context, tmp_path, driver={"pid": 1, "host": "another"})
        with pytest.raises(UnsupportedError, match="listen at loopback of another host"):
            rayzero.follow(tmp_path).wait(0)
        describe(context, tmp_path)
        (tmp_path / ".follower.json").write_text('{"token": "another"}')
        with pytest.raises(StallError, match="the token of this call is not the run's token"):
            of(context, tmp_path).wait(0, timeout_s=1.0)
        describe(context, tmp_path, state="finished")

    alone(tmp_path, loop)
    with pytest.raises(StoreClosedError, match="v1 was the last here"):
        followers[0].wait(2, timeout_s=30.0)
    followers[0].close()


def test_owners_on_devices_are_refused_by_name(tmp_path: Path) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        with pytest.raises(UnsupportedError, match="followers need offload_fraction=1"):
            of(context, tmp_path).read(timeout_s=30.0)

    alone(tmp_path, loop, ZeroConfig(units=["Block"], offload_fraction=0.5))


@pytest.mark.thorough
def test_a_follower_beside_a_run_that_does_not_wait_has_whole_versions(tmp_path: Path) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        published = {}
        for step in range(STEPS):
            take_step(model, optimizer, step, 0)
            published[step + 1] = exported(optimizer, tmp_path / f"step {step}")
            (tmp_path / "published").write_text(str(step + 1))
        return published

    found: dict[int, Any] = {}

    def follow(context: RankContext, model: nn.Module, optimizer: Any) -> Any:
        over = threading.Event()

        def read() -> None:
            with rayzero.follow(tmp_path) as follower:
                while not over.is_set():
                    reading = follower.read()
                    found[reading.version] = {name: tensor.clone() for name, tensor in reading}

        thread = threading.Thread(target=read)
        thread.start()
        try:
            return loop(context, model, optimizer)
        finally:
            time.sleep(0.1)
            over.set()
            thread.join()

    published = alone(tmp_path, follow)
    assert len(found) > 3
    for version, tensors in found.items():
        assert version == 0 or same(iter(tensors.items()), published[version]), version


def test_a_broken_transfer_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        follower = of(context, tmp_path)
        dict(follower.read(0))
        take_step(model, optimizer, 0, 0)
        received = remote_shards._receive
        left = [3]

        def breaks(part: Any, stream: Any, *rest: Any) -> int:
            left[0] -= 1
            if left[0] == 0:
                stream.abort()
            return received(part, stream, *rest)

        monkeypatch.setattr(remote_shards, "_receive", breaks)
        assert same(follower.read(1), exported(optimizer, tmp_path / "one"))
        assert left[0] < 0

    alone(tmp_path, loop)


def test_an_owner_counts_its_followers_their_bytes_and_how_far_they_are_behind() -> None:
    recorder = MemoryRecorder()
    with ExitStack() as stack:
        (server,) = stack.enter_context(serving(recorder=recorder))
        spec = toy.make_spec(1)
        ranks = toy.start(stack.enter_context(connected([server])), spec)
        terms = CallTerms(token=follower_token(TOKEN))
        follower = stack.enter_context(
            Follower(RemoteRun("toy", lambda: ([server.address], terms)), None, lambda: True)
        )
        follower.read(0)
        whole = recorder.total(FOLLOW_BYTES, form="whole")
        assert whole == follower.stats().whole_bytes > 0
        assert recorder.gauge(FOLLOWERS) == 1
        toy.take_step(ranks, [toy.random_grads(spec, 1)], 0.5)
        follower.wait(1)
        until(lambda: recorder.gauge(FOLLOWER_LAG) == 1)
        follower.read(1)
        assert recorder.total(FOLLOW_BYTES, form="whole") == whole
        assert recorder.total(FOLLOW_BYTES, form="changes") == follower.stats().change_bytes > 0
        assert recorder.timing(FOLLOW_SECONDS).count > 0
        follower.close()
        until(lambda: recorder.gauge(FOLLOWERS) == 0)
        assert recorder.gauge(FOLLOWER_LAG) == 0


def test_a_follower_whose_version_owners_know_no_more_takes_shards_whole_again(tmp_path: Path) -> None:
    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        follower = of(context, tmp_path)
        dict(follower.read(0))
        whole = follower.stats().whole_bytes
        for step in range(8):
            take_step(model, optimizer, step, 0)  # most values change: two versions' changes are more than all values
        wanted = exported(optimizer, tmp_path / "late")
        assert same(follower.read(8), wanted)
        assert follower.stats().whole_bytes > whole

    alone(tmp_path, loop)
