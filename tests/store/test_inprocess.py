"""What only the in-process store promises: cancelled fetches, counted bytes, its own threads."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import Future
from contextlib import ExitStack

import pytest
import torch
from owner.owner import Gate

from rayzero.errors import StoreError
from rayzero.owner.service import ShardService
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.rank.rank_store import RankStore
from rayzero.telemetry.names import FETCH_SECONDS, PUSH_SECONDS, TRANSFER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder
from store.stores import inprocess
from store.toy import WAIT, Rank, make_spec, random_grads, start, started, take_step


def service_of(rank: Rank) -> ShardService:
    """Of the only owner."""
    return rank.store.connection.owners.services[0]  # type: ignore[attr-defined, no-any-return]


def test_a_fetch_that_is_being_filled_cannot_be_cancelled() -> None:
    with started(inprocess(1, 1), make_spec(1)) as (rank,):
        gate = Gate(service_of(rank), hold_at=(4, 1))  # shards 2..4 of the unit are there, 5..8 are not
        rank.push(random_grads(rank.spec, 1))
        rank.finish()
        gate.wait()
        future, out = rank.fetch_unit(1, 1)
        probe, _ = rank.fetch_unit(0, 1)  # the pool works in order
        probe.result(WAIT)
        assert not future.cancel()
        gate.release()
        future.result(WAIT)
        assert not out.isnan().any()


def test_a_fetch_that_fails_is_over_only_when_nobody_writes_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    with started(inprocess(1, 1), make_spec(1)) as (rank,):
        reads: dict[int, Future[torch.Tensor]] = defaultdict(Future)
        monkeypatch.setattr(service_of(rank), "read", lambda shard, *_: reads[shard])
        future, out = rank.fetch_unit(0)
        (broken, *others) = reads.values()
        broken.set_exception(StoreError("as planned"))
        assert not future.done()
        for shard, read in zip(rank.spec.layout.shards_by_unit[0][1:], others, strict=True):
            read.set_result(torch.ones(shard.numel))
        with pytest.raises(StoreError, match="as planned"):
            future.result(WAIT)
        assert out[512:].eq(1).all()


def test_bytes_and_seconds_are_counted_by_direction() -> None:
    spec = make_spec(1, dtypes=[torch.bfloat16, torch.float32, torch.float32])
    recorder = MemoryRecorder()
    with ExitStack() as stack:
        owners = LocalOwners(2)
        stack.callback(owners.close)
        store = RankStore(LocalConnection(0, owners, recorder=recorder))
        stack.callback(store.close)
        (rank,) = start([store], spec)
        take_step([rank], [random_grads(spec, 1)])
    sizes = [unit.size_bytes for unit in spec.layout.units]
    numels = [unit.numel for unit in spec.layout.units]
    assert recorder.total(TRANSFER_BYTES, direction="load", transport="inproc") == 4 * sum(numels)
    assert recorder.total(TRANSFER_BYTES, direction="fetch", transport="inproc") == sum(sizes)
    assert recorder.total(TRANSFER_BYTES, direction="push", transport="inproc") == sum(sizes)
    assert recorder.timing(FETCH_SECONDS, transport="inproc").count == 3
    assert recorder.timing(PUSH_SECONDS, transport="inproc").count == 3
