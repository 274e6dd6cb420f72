"""Followers that share no memory with the owners have the same bits, over the network."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from store import toy
from store.stores import TOKEN, connected, serving
from torch import nn

import rayzero
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
from tests.forked import forked
from tests.support import needs
from tests.support.waiting import until

from .on_network import describe
from .test_follower import alone, exported, of, same, take_step


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

    alone(loop, on_network=tmp_path if transport == "grpc" else None)


def stalled(follower: Follower) -> str:
    """Why there is no version within half a second."""
    with pytest.raises(StallError) as caught:
        follower.wait(0, timeout_s=0.5)
    return str(caught.value)


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_ENDED_S", 0.2)
    followers = []

    def loop(context: RankContext, model: nn.Module, optimizer: Any) -> None:
        followers.append(rayzero.follow(tmp_path))
        assert followers[0].read().version == 0
        take_step(model, optimizer, 0, 0)
        followers[0].wait(1)
        with pytest.raises(StallError, match="v1 is published"):
            followers[0].wait(2, timeout_s=0)
        with pytest.raises(VersionGoneError, match="v0 is overwritten: v1 is published"):
            of(context, tmp_path).read(0)
        other = of(context, tmp_path, model=1)
        until(lambda: "has no model 1 to follow (yet)" in stalled(other))
        describe(context, tmp_path, driver={"pid": 1, "host": "another"})
        with pytest.raises(UnsupportedError, match="listen at loopback of another host"):
            rayzero.follow(tmp_path).wait(0)
        describe(context, tmp_path)
        (tmp_path / ".follower.json").write_text('{"token": "another"}')
        stranger = of(context, tmp_path)
        until(lambda: "the token of this call is not the run's token" in stalled(stranger))
        (tmp_path / ".follower.json").unlink()
        until(lambda: f"{tmp_path}/.follower.json is not there: copy it from the run's folder" in stalled(stranger))
        describe(context, tmp_path, state="finished")

    alone(loop, on_network=tmp_path)
    with pytest.raises(StoreClosedError, match="v1 was the last here"):
        followers[0].wait(2, timeout_s=30.0)
    followers[0].close()


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

    alone(loop, on_network=tmp_path)


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

    alone(loop, on_network=tmp_path)


_FORKED = """
import os
from rayzero.errors import UnsupportedError
from rayzero.followers.follower import Follower
from rayzero.followers.remote_shards import RemoteRun

def follow():
    return Follower(RemoteRun("toy", lambda: "it is starting"), None, lambda: True)

older = follow()
child = os.fork()
if not child:
    for follower in older, follow():
        try:
            follower.read()
        except UnsupportedError as error:
            print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_process_is_refused_by_name() -> None:
    """gRPC does not work in a process that is forked when it has run."""
    with forked(_FORKED) as process:
        said = f"run 'toy' cannot be followed over the network in this process, which process {process.pid} forked"
        assert [process.said().startswith(said) for _ in range(2)] == [True, True]
