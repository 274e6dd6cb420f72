"""What an owner on another host takes over of shards, over links that break."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rayzero.errors import EpochOverError, StoreError, TransferError
from rayzero.slabs.slab import SHARED_MEMORY
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.memory.next_epoch import EpochFacts
from rayzero.store.owner.peers.shard_source import RemoteShards
from rayzero.store.owner.server import serve_models
from rayzero.store.rank.remote import RemoteConnection
from rayzero.store.rank.store import RankStore
from rayzero.store.shm.same_host import why_no_sharing
from store.proxy import Proxy
from store.stores import TOKEN
from store.toy import WAIT, make_spec, random_grads, start, take_step

pytestmark = pytest.mark.skipif(why_no_sharing() is not None, reason="no shared memory here")


class Owner(NamedTuple):
    """An owner that has taken two steps and stands still, behind a proxy."""

    proxy: Proxy
    shards: dict[int, list[Tensor]]  # all of each
    facts: EpochFacts


@contextmanager
def owner() -> Iterator[Owner]:
    models, spec = HostedModels(0, 1, share=SHARED_MEMORY), make_spec(world_size=1)
    with serve_models(models, token=TOKEN) as server, Proxy(server.address) as proxy:
        server.connect_peers([server.address])
        store = RankStore(RemoteConnection(0, [server.address], token=TOKEN, share=SHARED_MEMORY))
        try:
            ranks = start([store], spec)
            for step in range(2):
                take_step(ranks, [random_grads(spec, step)])
            server.hold()
            server.settle()
            service, shared = models[0]
            assert shared is not None
            shards = {shard.index: shared.carried(service.shard(shard.index)) for shard in spec.layout.shards}
            began, record = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in shared.noted())
            yield Owner(proxy, shards, EpochFacts(service.kernel, began, record))
        finally:
            store.close()
    models.close()


def source(proxy: Proxy, *, epoch: int = 0, **more: Any) -> RemoteShards:
    terms = {"given_up": threading.Event(), "timeout_s": 20.0} | more
    return RemoteShards(0, proxy.address, token=TOKEN, tls=None, model=0, epoch=epoch, **terms)


def empty_like(shards: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
    return {index: [torch.full_like(each, 7) for each in tensors] for index, tensors in shards.items()}


@pytest.mark.parametrize("cuts", [(), (0.3,), (0.1, 0.4, 0.4)])
def test_all_of_a_shard_comes_however_often_the_link_is_cut(
    cuts: Sequence[float], caplog: pytest.LogCaptureFixture
) -> None:
    with owner() as there:
        came, size = empty_like(there.shards), sum(each.nbytes for tensors in there.shards.values() for each in tensors)
        there.proxy.cut_after(*(int(cut * size) for cut in cuts))
        with caplog.at_level(logging.WARNING):
            source(there.proxy).give(came)
        assert sum("is opened again" in line for line in caplog.messages) == len(cuts)
        for index, tensors in there.shards.items():
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(came[index], tensors, strict=True))


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
