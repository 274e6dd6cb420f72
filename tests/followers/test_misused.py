"""What somebody with a follower's token may do that no follower does: a run goes on, and owners keep nothing of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from store import toy
from store.stores import TOKEN, connected, serving

from rayzero.cluster.files.key_files import FOLLOWER_FILE, FollowerKey, read_follower, write_key
from rayzero.errors import ConfigError, StallError, StoreError, TransferError
from rayzero.followers.follower import Follower
from rayzero.followers.remote_shards import RemoteRun
from rayzero.security.credentials import follower_token
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.follower_calls import FollowerCalls
from rayzero.store.owner.server import OwnerServer
from rayzero.store.wire.rpc import (
    FOLLOWER_SERVICE,
    CallTerms,
    LinkNumber,
    Metadata,
    life_metadata,
    link_of,
    methods,
    open_channel,
    token_metadata,
)
from tests.support.waiting import until


def following(server: OwnerServer) -> Follower:
    """A follower of the only owner's run."""
    terms = CallTerms(token=follower_token(TOKEN))
    return Follower(RemoteRun("toy", lambda: ([server.address], terms)), None, lambda: True)


def of(name: str) -> Metadata:
    """What a call of a follower shows."""
    return (*token_metadata(follower_token(TOKEN)), *LinkNumber(f"follower {name}", 1).metadata)


@contextmanager
def one_owner() -> Iterator[tuple[OwnerServer, Any]]:
    """The server of a run's only owner, and what lets the run take a step."""
    with serving() as (server,), connected([server]) as stores:
        spec = toy.make_spec(1)
        ranks = toy.start(stores, spec)
        yield server, lambda: toy.take_step(ranks, [toy.random_grads(spec, 1)], 0.5)


def test_bodies_that_do_not_come_take_no_ranks_places() -> None:
    over = threading.Event()

    def never() -> Iterator[bytes]:
        over.wait(60)
        yield from ()

    with one_owner() as (server, take_step), open_channel(server.address, None) as channel:
        take_step()
        call = channel.stream_stream(methods(FOLLOWER_SERVICE)["OpenTensorStream"].path)
        said = [(*of(str(each)), *life_metadata(0, 0)) for each in range(20)]  # that they are the rank
        calls = [call(never(), metadata=each, timeout=60) for each in said]
        try:
            take_step()
        finally:
            over.set()
            for each in calls:
                each.cancel()


def test_a_follower_that_opens_a_second_stream_of_notices_is_counted_once_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with one_owner() as (server, take_step), open_channel(server.address, None) as channel, ExitStack() as stack:
        notices = methods(FOLLOWER_SERVICE)["Notices"].bind(channel)
        streams = []
        for _ in range(3):
            streams.append(notices(pb.NoticesRequest(), metadata=of("twice")))
            stack.callback(streams[-1].cancel)
            assert next(streams[-1]).HasField("followed")
        for older in streams[:-1]:
            with pytest.raises(grpc.RpcError):
                list(older)
        take_step()
        assert next(streams[-1]).published
        taken = server._models.made[0]._services[FOLLOWER_SERVICE]._taken  # type: ignore[union-attr]
        assert list(taken) == ["follower twice"]
        streams[-1].cancel()
        until(lambda: not taken)
    assert "Traceback" not in caplog.text


def test_owners_keep_no_names_of_those_that_have_gone() -> None:
    with one_owner() as (server, _):
        for closes in (True, False):  # a program may also drop a follower
            follower = following(server)
            follower.read(0)
            if closes:
                follower.close()
            del follower
        newest = server._models.made[0].model.calls._newest
        until(lambda: list(newest) == ["rank 0"])


def test_a_read_ends_with_the_link_to_an_owner_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    async def stands_still(calls: FollowerCalls, wanted: pb.GetShardsRequest.Wanted) -> None:
        asked.set()
        await asyncio.sleep(600)

    monkeypatch.setattr(FollowerCalls, "_whole", stands_still)
    with one_owner() as (server, _), ThreadPoolExecutor(1) as pool, following(server) as follower:
        follower.wait(0)
        read = pool.submit(follower.read, 0, timeout_s=0)
        assert asked.wait(60)
        (feed,) = follower._run._feeds  # type: ignore[attr-defined]
        feed._channel._heard.put(TransferError("no answer to a ping"))  # as gRPC notices it
        with pytest.raises(StallError, match=r"v0 of run 'toy' did not come in 0 s: no answer to a ping"):
            read.result(15)


def test_the_number_of_a_link_has_an_end() -> None:
    sent = "follower x " + "9" * 5000
    with pytest.raises(StoreError, match="must be a caller and a number"):
        link_of([("rayzero-link", sent)])


@pytest.mark.parametrize("token", ["", "a\nb", "\0", "\u2603"])
def test_a_key_whose_token_no_call_can_carry_is_refused_in_words(token: str, tmp_path: Path) -> None:
    write_key(tmp_path, FOLLOWER_FILE, FollowerKey(token=token))
    with pytest.raises(ConfigError, match="its token is not hexadecimal; copy it again from the run"):
        read_follower(tmp_path)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_key_that_others_may_read_is_warned_of(mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_key(tmp_path, FOLLOWER_FILE, FollowerKey(token="ab"))
    (tmp_path / FOLLOWER_FILE).chmod(mode)
    assert read_follower(tmp_path) == read_follower(tmp_path) is not None
    warned = [f"its mode {mode:o} lets others read it: chmod 600 it" in each.message for each in caplog.records]
    assert warned == [True] * (mode != 0o600)
