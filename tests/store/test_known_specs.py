"""A rank names its spec by a digest; an owner asks one rank for all of it, and another one if that does not come."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rayzero.errors import HandshakeError, TransferError
from rayzero.protocol.messages import ModelSpec
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.rank_links import KnownSpecs
from rayzero.store.wire import translate

from .toy import make_spec

SPEC = make_spec(3)
DESCRIBED = translate.spec_to_bytes(SPEC)
LONG = 60.0


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 60.0))

    return run


async def compute(work: Callable[[], ModelSpec]) -> ModelSpec:
    await asyncio.sleep(0)  # as in a pool: other ranks' calls come meanwhile
    return work()


def request(rank: int, *, whole: bool = False, described: bytes = DESCRIBED) -> pb.AttachRequest:
    return pb.AttachRequest(
        rank=rank,
        spec=described if whole else b"",
        spec_digest=translate.spec_digest(described),
        layout_digest=SPEC.layout.digest,
    )


@in_a_loop
async def test_one_rank_is_asked_and_the_others_get_what_it_sends() -> None:
    specs = KnownSpecs(0, compute, LONG)
    assert await specs.of(request(0)) is None  # asked for it
    others = [asyncio.create_task(specs.of(request(rank))) for rank in (1, 2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in others)
    first = await specs.of(request(0, whole=True))
    assert first == SPEC
    assert [await task is first for task in others] == [True, True]
    assert await specs.of(request(2)) is first
    assert await specs.of(request(1, whole=True)) is first


@in_a_loop
async def test_ranks_that_send_it_at_the_same_time_get_the_same_object() -> None:
    specs = KnownSpecs(0, compute, LONG)
    first, second = await asyncio.gather(*(specs.of(request(rank, whole=True)) for rank in (0, 1)))
    assert first is second


@in_a_loop
async def test_another_rank_is_asked_if_the_first_one_dies() -> None:
    specs = KnownSpecs(0, compute, 0.05)
    assert await specs.of(request(0)) is None
    waiting = [asyncio.create_task(specs.of(request(rank))) for rank in (1, 2)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    asked = [task for task in waiting if task.done()]
    assert [task.result() for task in asked] == [None]  # one of the two
    sent = await specs.of(request(1, whole=True))
    assert await next(task for task in waiting if task not in asked) is sent


@in_a_loop
async def test_what_is_no_spec_is_refused_and_the_next_rank_is_asked() -> None:
    specs = KnownSpecs(0, compute, 0.05)
    assert await specs.of(request(0, described=b"{}")) is None
    with pytest.raises(TransferError, match="this is not the description of a model"):
        await specs.of(request(0, whole=True, described=b"{}"))
    assert await specs.of(request(1, described=b"{}")) is None


@in_a_loop
async def test_few_specs_are_kept() -> None:
    specs = KnownSpecs(0, compute, LONG)
    for world_size in range(2, 9):
        described = translate.spec_to_bytes(make_spec(world_size))
        assert (await specs.of(request(0, whole=True, described=described))).world_size == world_size
    assert await specs.of(request(1, described=translate.spec_to_bytes(make_spec(2)))) is None
    assert (await specs.of(request(1, described=translate.spec_to_bytes(make_spec(8))))).world_size == 8


@in_a_loop
async def test_specs_that_never_come_are_forgotten() -> None:
    specs = KnownSpecs(0, compute, LONG)
    for number in range(200):
        assert await specs.of(request(0, described=b"%d" % number)) is None
    assert len(specs._coming) == 64
    assert await specs.of(request(0, whole=True)) == SPEC


@in_a_loop
async def test_a_name_that_is_no_digest_is_refused() -> None:
    named = request(0)
    named.spec_digest = "x" * 1000
    with pytest.raises(HandshakeError, match="rank 0 names its spec by 1,000 characters, and optimizer 0 by the 64"):
        await KnownSpecs(0, compute).of(named)
