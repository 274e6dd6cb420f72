"""How bytes travel between hosts: small units together, gradients compressed."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from clock import StallClock

from rayzero.errors import StallError, StoreError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner import tensor_port
from rayzero.store.owner.streams import OwnerStream
from rayzero.telemetry.names import TRANSFER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder
from store.stores import connected, seeing_transfers, serving
from store.toy import WAIT, Grads, equal, make_spec, masters, random_grads, start, started, take_step

BF16 = torch.bfloat16


class Onlooker:
    """Sees an owner's Push and Fetch transfers; holds those of one method until told to let them go."""

    def __init__(self, hold: str = "") -> None:
        self.calls = {"Push": 0, "Fetch": 0}
        self.pushed: list[pb.PushRequest.Unit] = []
        self.came = threading.Event()  # a held call
        self._hold = hold
        self._go: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def let_go(self) -> None:
        assert self._loop is not None
        assert self._go is not None
        self._loop.call_soon_threadsafe(self._go.set)

    async def see(self, method: str, answer: Any, request: bytes) -> Any:
        if method in self.calls:
            self._loop, self._go = asyncio.get_running_loop(), self._go or asyncio.Event()
            self.calls[method] += 1
            if method == "Push":
                self.pushed += pb.PushRequest.FromString(request).units
            self.came.set()
            if self._hold == method:
                await self._go.wait()
        return await answer()


# ---- wire_compression


def one_step(grads: Grads, compression: str, **spec: Any) -> tuple[Grads, Grads, float, set[int]]:
    """Masters and first moments after one step, the bytes pushed, and the wire formats the owner was told."""
    recorder, onlooker, model = MemoryRecorder(), Onlooker(), make_spec(1, **spec)
    with (
        seeing_transfers(onlooker.see),
        serving() as servers,
        connected(servers, wire_compression=compression, recorder=recorder) as stores,
    ):
        (rank,) = start(stores, model)
        take_step([rank], [grads])
        moved = recorder.total(TRANSFER_BYTES, direction="push", transport="grpc")
        return masters(rank), rank.fetch(1, "exp_avg"), moved, {unit.format for unit in onlooker.pushed}


def test_compressed_gradients_are_the_rounded_ones_in_half_the_bytes() -> None:
    grads = {name: torch.randn(grad.shape) for name, grad in random_grads(make_spec(1), 1).items()}
    rounded = {name: grad.to(BF16).float() for name, grad in grads.items()}
    exact, _, whole, plain = one_step(rounded, "none")
    found, moments, half, formats = one_step(grads, "bf16")
    assert equal(found, exact)
    assert (half, formats, plain) == (whole / 2, {pb.WIRE_FORMAT_BF16}, {pb.WIRE_FORMAT_UNSPECIFIED})
    for name, grad in grads.items():
        assert torch.all((moments[name] / 0.1 - grad).abs() <= grad.abs() * (2**-8 + 2**-20)), name


@pytest.mark.parametrize(("dtype", "part"), [(torch.float32, 260 / 1024), (BF16, 260 / 512)])
def test_gradients_in_8_bits_are_near_in_a_quarter_or_half_the_bytes(dtype: torch.dtype, part: float) -> None:
    spec = make_spec(1, dtypes=[dtype] * 3)
    grads = {name: torch.randn(grad.shape).to(dtype) for name, grad in random_grads(spec, 1).items()}
    _, _, whole, _ = one_step(grads, "none", dtypes=[dtype] * 3)
    found, moments, fewer, formats = one_step(grads, "int8", dtypes=[dtype] * 3)
    assert formats == {pb.WIRE_FORMAT_INT8}
    assert part * whole <= fewer < 1.5 * part * whole, "the last block of a shard is sent whole"
    most = max(float(grad.abs().max()) for grad in grads.values() if grad.numel())  # blocks cross parameters
    for name, grad in grads.items():
        wide = grad.float()
        error = (moments[name] / 0.1 - wide).abs()
        assert torch.all(error <= most / 254 + wide.abs() * 2**-7), name
        assert found[name].isfinite().all()


def test_16_bit_units_are_never_compressed() -> None:
    spec = make_spec(1, dtypes=[BF16] * 3)
    grads = random_grads(spec, 1)
    none = one_step(grads, "none", dtypes=[BF16] * 3)
    bf16 = one_step(grads, "bf16", dtypes=[BF16] * 3)
    assert equal(none[0], bf16[0])
    assert none[2:] == bf16[2:]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_compression_keeps_what_is_not_finite(bad: float, compression: str) -> None:
    spec = make_spec(1)
    grads = random_grads(spec, 1)
    grads["layers.0.w"][3, 5] = bad
    with serving() as servers, connected(servers, wire_compression=compression) as stores:
        assert not take_step(start(stores, spec), [grads]).finite


def test_an_owner_refuses_a_wire_format_that_does_not_fit_the_unit() -> None:
    with serving() as servers, connected(servers) as (store,):
        (rank,) = start([store], make_spec(1, dtypes=[BF16] * 3))
        channel = store.connection._links[0].channel()
        sent = pb.Contribution(step=0, attempt=0, rank=0, unit=0, seq=0, presence=b"\1")
        unit = pb.PushRequest.Unit(contribution=sent, shards=[0], format=pb.WIRE_FORMAT_BF16)
        with (
            pytest.raises(StoreError, match=r"gradients of 'emb' \(bfloat16\) cannot come in wire format 1"),
            channel.transfer("Push", pb.PushRequest(units=[unit]), WAIT) as transfer,
        ):
            transfer.answer()
        assert rank.step == 0


# ---- small units travel together


def test_a_fetch_that_stalls_between_shards_says_so_and_ends_its_call(stall_clock: StallClock) -> None:
    """The owner sends one shard of a visit to a thread, and does not get to the next."""
    spec, ended = make_spec(1), threading.Event()

    class Halting(OwnerStream):
        async def send(self, shards: Iterable[tuple[int, memoryview]]) -> None:
            await super().send(itertools.islice(shards, 1))
            try:
                await asyncio.sleep(WAIT)
            finally:
                ended.set()

    with (
        patch.object(tensor_port, "OwnerStream", Halting),
        serving() as servers,
        connected(servers, stall_timeout=60.0) as stores,
    ):
        (rank,) = start(stores, spec)
        waiting, _ = rank.fetch_unit(1)
        says = r"rank 0 waits \S+ s for layers.0 v0 from optimizer 0: 1/\d shards are here"
        with pytest.raises(StallError, match=says):
            stall_clock.stall(waiting)
        assert ended.wait(WAIT)


def test_fetches_that_wait_for_a_thread_go_in_one_stream() -> None:
    spec, onlooker = make_spec(1, frozen=[1]), Onlooker("Fetch")
    with seeing_transfers(onlooker.see), serving() as servers, started(connected(servers), spec) as (rank,):
        asked = [rank.fetch_unit(unit) for _ in range(4) for unit in (0, 1, 2)]
        assert onlooker.came.wait(WAIT)
        onlooker.let_go()
        for future, _ in asked:
            future.result(WAIT)
        assert onlooker.calls["Fetch"] <= 3  # two threads begin, one takes what came meanwhile
        moments = [rank.fetch_unit(unit, 0, "exp_avg")[0] for unit in (0, 2, 1, 0, 2)]
        with pytest.raises(StoreError, match=r"'layers.0' has no 'exp_avg'"):
            moments.pop(2).result(WAIT)
        for future in moments:  # the error of one is not the others'
            future.result(WAIT)


def test_pushes_that_wait_for_a_thread_go_in_one_stream() -> None:
    spec, onlooker = make_spec(1), Onlooker("Push")
    grads = random_grads(spec, 1)
    with serving() as servers, started(connected(servers), spec) as (rank,):
        take_step([rank], [grads])
        expected = masters(rank)
    with seeing_transfers(onlooker.see), serving() as servers, started(connected(servers), spec) as (rank,):
        landed = [rank.push_unit(unit, grads) for unit in (2, 1, 0)]
        landed += [rank.push_unit(unit, grads, seq=0) for _ in range(3) for unit in (2, 1, 0)]  # repeats
        assert onlooker.came.wait(WAIT)
        onlooker.let_go()
        for future in landed:
            future.result(WAIT)
        assert onlooker.calls["Push"] <= 3  # two threads begin, one takes what came meanwhile
        assert len(onlooker.pushed) == 12
        rank.finish().result(WAIT)
        assert equal(masters(rank), expected)


# ---- published
