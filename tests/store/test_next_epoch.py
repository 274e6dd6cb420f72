"""What an owner on another host takes over of shards, over links that break."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from rayzero.errors import EpochOverError, HandshakeError, StallError, StoreError, TransferError
from rayzero.security.authority import Authority
from rayzero.security.credentials import OWNER, Identity
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import Channel
from rayzero.store.owner import shard_source
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.memory.next_epoch import EpochFacts
from rayzero.store.owner.server import serve_models
from rayzero.store.owner.shard_source import RemoteShards
from rayzero.store.wire import tensor_streams
from rayzero.store.wire.payload import Assembly
from rayzero.store.wire.rpc import (
    CallTerms,
)
from rayzero.store.wire.tensor_stream import TICKET_BYTES, WELCOME, StreamEndedError
from store.proxy import Proxy
from store.stores import TOKEN, connected
from store.test_tensor_streams import Spoils, ask, member, over
from store.toy import WAIT, make_spec, random_grads, started, take_step
from tests.support import needs

pytestmark = needs.shared_memory


SHOWN = Identity(Authority("next epoch", on_loopback=True).issue("all", [OWNER, "rank-0.rayzero"]))


class Owner(NamedTuple):
    """An owner that has taken two steps and stands still, behind a proxy."""

    proxy: Proxy
    shards: dict[int, list[Tensor]]  # all of each
    facts: EpochFacts


@contextmanager
def owner(shown: Identity | None = None) -> Iterator[Owner]:
    models, spec = HostedModels(0, 1, share=SHARED_MEMORY), make_spec(world_size=1)
    with serve_models(models, token=TOKEN, tls=shown) as server, Proxy(server.address) as proxy:
        server.connect_peers([server.address])
        with started(connected([server], tls=shown, share=SHARED_MEMORY), spec) as ranks:
            for step in range(2):
                take_step(ranks, [random_grads(spec, step)])
            server.hold()
            server.settle()
            service, shared = models[0]
            assert shared is not None
            shards = {shard.index: shared.carried(service.shard(shard.index)) for shard in spec.layout.shards}
            began, record = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in shared.noted())
            yield Owner(proxy, shards, EpochFacts(service.kernel, began, record))
    models.close()


def source(proxy: Proxy, *, epoch: int = 0, **more: Any) -> RemoteShards:
    terms = CallTerms(token=TOKEN, tls=more.pop("tls", None), epoch=epoch)
    return RemoteShards(
        0, proxy.address, terms, **{"given_up": threading.Event(), "timeout_s": 20.0, "taker": 1} | more
    )


def empty_like(shards: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
    return {index: [torch.full_like(each, 7) for each in tensors] for index, tensors in shards.items()}


def size_of(shards: dict[int, list[Tensor]]) -> int:
    return sum(each.nbytes for tensors in shards.values() for each in tensors)


def check_given(there: Owner, **terms: Any) -> None:
    """All of the owner's shards come, bit by bit."""
    came = empty_like(there.shards)
    source(there.proxy, **terms).give(came)
    for index, tensors in there.shards.items():
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(came[index], tensors, strict=True))


def opened_again(caplog: pytest.LogCaptureFixture) -> int:
    return sum("is opened again" in line for line in caplog.messages)


@pytest.mark.parametrize("cuts", [(), (0.3,), (0.1, 0.4, 0.4)])
def test_all_of_a_shard_comes_however_often_the_link_is_cut(
    cuts: Sequence[float], caplog: pytest.LogCaptureFixture
) -> None:
    with owner() as there, over(Proxy) as beside, caplog.at_level(logging.WARNING):
        check_given(there)
        beside[0].cut_after(*(int(each * size_of(there.shards)) for each in cuts))
        check_given(there)
        assert opened_again(caplog) == len(cuts)


def test_shards_that_have_come_do_not_come_again() -> None:
    asked, transfer = [], Channel.transfer

    def noted(self: Channel, method: str, request: pb.GiveShardsRequest, timeout_s: float) -> Any:
        asked.append(list(request.shards))
        return transfer(self, method, request, timeout_s)

    tensors = count()

    def assembly(*args: Any) -> Assembly:
        if next(tensors) == 40:
            raise StreamEndedError("cut")
        return Assembly(*args)

    with (
        owner() as there,
        patch.object(Channel, "transfer", noted),
        patch.object(shard_source, "Assembly", assembly),
    ):
        check_given(there)
    each = len(there.shards[0])
    assert asked == [list(there.shards), list(there.shards)[40 // each :]]


@pytest.mark.promise("scalable", "tls")
def test_all_of_a_shard_comes_over_tls() -> None:
    with owner(SHOWN) as there, over(Proxy) as beside:
        check_given(there, tls=SHOWN)
        assert beside[0].passed > size_of(there.shards)


def spoilt(times: int) -> Any:
    """A bit of the bytes changes on the way, so often. See ``over``."""
    return over(lambda target: Spoils(target, every=1, most=times))


@pytest.mark.parametrize("shown", [None, SHOWN], ids=["plain", "tls"])
def test_bytes_that_are_damaged_come_again(shown: Identity | None, caplog: pytest.LogCaptureFixture) -> None:
    with owner(shown) as there, spoilt(2) as beside, caplog.at_level(logging.WARNING):
        check_given(there, tls=shown)
        assert beside[0].spoilt == 2  # type: ignore[attr-defined]
        assert opened_again(caplog) in (1, 2), "both may come in one try"


def test_bytes_that_are_damaged_again_and_again_are_given_up() -> None:
    with (
        owner() as there,
        spoilt(1000),
        pytest.raises(TransferError, match=r"^optimizer 0 at 127.0.0.1:\d+: (a message|shard|a chunk).*(damaged|came)"),
    ):
        check_given(there)


def test_an_owner_that_is_gone_in_the_middle_is_named() -> None:
    with owner() as there, over(Proxy) as beside:
        check_given(there)  # opens the way

        moved = beside[0]

        def die() -> None:
            del moved.cut
            for each in (there.proxy, moved):
                each.close()

        moved.cut = die  # type: ignore[method-assign]
        moved.cut_after(size_of(there.shards) // 2)
        with pytest.raises(TransferError, match=r"optimizer 0 at 127.0.0.1:\d+: UNAVAILABLE"):
            check_given(there, down_s=0.5)


def test_a_port_that_cannot_be_reached_is_named_and_one_that_opens_again_is_waited_for() -> None:
    tries = []

    def connect(host: str, port: int) -> Any:
        tries.append(port)
        raise ConnectionRefusedError(111, "Connection refused")

    with owner() as there:
        with (
            patch.object(tensor_streams, "connect", connect),
            pytest.raises(
                TransferError,
                match=r"cannot open a connection for tensors to 127.0.0.1, port \d+: Conn.*; if a firewall",
            ),
        ):
            check_given(there, down_s=0.3)
        assert len(tries) > 1
        check_given(there, down_s=0.3)


@pytest.mark.parametrize(
    ("timeout_s", "error", "said"),
    [
        (0.1, StallError, "has not given its shards within 0.1 s"),
        (WAIT, StoreError, "any more: the owners stay as they are"),
    ],
    ids=["for too long", "once they are given up"],
)
def test_bytes_that_do_not_come_are_not_waited_for(timeout_s: float, error: type[StoreError], said: str) -> None:
    """The owner has sent all of them, so its call has ended."""

    class Swallows(Proxy):
        """Freezes at the first bytes of a tensor."""

        frozen = False

        def _count(self, size: int) -> None:
            super()._count(size)
            if self.passed > TICKET_BYTES + len(WELCOME) and not self.frozen:
                self.frozen = True
                self.freeze()

    given_up = threading.Event()
    with owner() as there, over(Swallows) as beside:
        timer = threading.Timer(0.3, given_up.set)
        timer.start()
        with pytest.raises(error, match=said):
            check_given(there, given_up=given_up, timeout_s=timeout_s)
        timer.join()
        beside[0]._open.set()


def test_a_connection_is_for_the_transfers_of_its_client_alone() -> None:
    asked = pb.GiveShardsRequest(shards=[0], owner=1)
    fetch = pb.FetchRequest(rank=0, shards=[0], kind="compute")
    with owner() as there:
        with member(there.proxy, rank=1) as stream, pytest.raises(HandshakeError, match="rank 1 asks for 'GiveShards'"):
            ask(stream, "GiveShards", asked).answer()
        refused = "Fetch of rank 0 was sent by rank 1"
        with member(there.proxy, rank=1) as stream, pytest.raises(HandshakeError, match=refused):
            ask(stream, "Fetch", fetch).answer()


def test_a_link_is_down_since_more_bytes_than_ever_had_come() -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    with patch.object(shard_source, "time", clock):
        now = 100.0
        tries = shard_source._Tries(30.0)
        now = 150.0
        assert tries.failed(broke=True, reached=10) is not None, "until now it was not down"
        now = 179.0
        assert tries.failed(broke=True, reached=0) is not None
        now = 181.0
        assert tries.failed(broke=True, reached=10) is None, "the same bytes came again"


def test_what_is_of_no_shard_comes_too() -> None:
    with owner() as there:
        facts = source(there.proxy).facts()
        assert facts.kernel == there.facts.kernel
        assert torch.equal(facts.began, there.facts.began)
        assert facts.record is not None
        assert there.facts.record is not None
        assert torch.equal(facts.record, there.facts.record)


def test_why_shards_do_not_come_is_said() -> None:
    with owner() as there:
        with pytest.raises(EpochOverError, match="was asked in epoch 3, and is in epoch 0"):
            source(there.proxy, epoch=3).facts()
        with pytest.raises(StoreError, match="does not have shard 999"):
            source(there.proxy).give({999: [torch.empty(8, dtype=torch.uint8)]})
        proxy = there.proxy
    with pytest.raises(TransferError, match="UNAVAILABLE"):
        source(proxy, down_s=0.2).facts()


def test_whoever_gives_up_does_not_wait_for_an_owner_that_is_gone() -> None:
    with owner() as there:
        proxy, given_up = there.proxy, threading.Event()
    timer = threading.Timer(0.2, given_up.set)
    timer.start()
    with pytest.raises(StoreError, match="any more: the owners stay as they are"):
        source(proxy, down_s=WAIT, given_up=given_up).facts()
    timer.join()
