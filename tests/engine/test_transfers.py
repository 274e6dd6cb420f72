"""The transfers of a device, over a lane of threads in place of streams: what waits for what, and memory given back."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

import rayzero.engine.units.transfers as transfers_module
from rayzero.engine.units.partition import build_layout
from rayzero.engine.units.residency import UnitBuffer
from rayzero.engine.units.transfers import DeviceTransfers, UnitTransfers, device_transfers, make_transfers
from rayzero.lanes import ThreadLane
from rayzero.layout.model_layout import UnitLayout
from rayzero.memory.pool import BufferPool, buffer_bytes
from rayzero.protocol.messages import Contribution
from tests.cuda_driver import OURS, Driver, driver
from tests.support.waiting import until
from tests.support.watched_lane import WatchedLane

CORES = len(os.sched_getaffinity(0))

__all__ = ["driver"]


class OneUnit:
    """A store of one unit: what is fetched is there at once, what is pushed is kept."""

    takes_scattered = in_process = False

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.pushed: list[Tensor] = []

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        out.copy_(self.values)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def mapped(self, unit: int) -> None:
        return None

    def landing(self, contribution: Contribution) -> None:
        return None

    def push(self, contribution: Contribution, grads: Tensor) -> Future[None]:
        self.pushed.append(grads.clone())
        done: Future[None] = Future()
        done.set_result(None)
        return done


def one_unit() -> tuple[UnitLayout, OneUnit, Future[int]]:
    (unit,) = build_layout(torch.nn.Linear(64, 64, bias=False)).layout.units
    published: Future[int] = Future()
    published.set_result(0)
    return unit, OneUnit(torch.arange(float(unit.numel))), published


def large_unit(*, bias: bool) -> UnitLayout:
    """So large that a thread gathers it."""
    (unit,) = build_layout(torch.nn.Linear(1024, 512, bias=bias)).layout.units
    return unit


def buffer_of(unit: UnitLayout) -> UnitBuffer:
    lease = BufferPool().acquire(unit.size_bytes)
    assert lease is not None
    return UnitBuffer(torch.zeros(unit.numel), (), lease, mapped=False)


def held_up(held: list[str]) -> ThreadLane:
    def hold(direction: str, label: str) -> None:
        while direction in held:
            time.sleep(1e-3)

    return WatchedLane(hold)


def test_a_fetch_is_waited_for_until_its_copy_has_run() -> None:
    unit, store, published = one_unit()
    held = ["in"]
    carried = DeviceTransfers(store, BufferPool(), held_up(held), {})
    buffer = buffer_of(unit)
    fetching = carried.fetch(unit, 0, buffer, published=published, held=None, ahead=True)
    assert fetching.done.done(), "its copy is issued"
    assert not buffer.flat.any()
    again = carried.fetch(unit, 0, UnitBuffer(torch.zeros(unit.numel), (), buffer.lease, mapped=False),
                          published=published, held=None, ahead=True)  # fmt: skip
    assert carried.allocated()["staging", "ram"] == 2 * buffer_bytes(unit.size_bytes), "neither is read to its end"
    held.clear()
    fetching.wait()
    again.wait()
    assert torch.equal(buffer.flat, store.values)
    carried.close()


def test_a_gradient_is_announced_once_its_copy_has_run() -> None:
    unit, store, _ = one_unit()
    held = ["out"]
    carried = DeviceTransfers(store, BufferPool(poison=True), held_up(held), {})
    contribution = Contribution(step=1, attempt=0, rank=0, unit=unit.index, seq=0, presence=b"\x01")
    landed = carried.push(unit, contribution, [store.values.view(64, 64)])
    time.sleep(0.02)
    assert not landed.done()
    assert not store.pushed
    held.clear()
    landed.result(60)
    assert torch.equal(store.pushed[0], store.values)
    carried.close()


def test_staging_is_page_locked_for_the_device_of_the_lane(driver: Driver) -> None:
    """Whichever one the fetching thread is on: the driver fails at what would make a context there."""
    unit, store, published = one_unit()
    lane = ThreadLane()
    lane.device = OURS
    carried = device_transfers(store, lane, [unit], pinned=True)
    buffer = buffer_of(unit)
    carried.fetch(unit, 0, buffer, published=published, held=None, ahead=False).wait()
    assert list(driver.registered.values()) == [buffer_bytes(unit.size_bytes)]
    lane.drain("in")
    deadline = time.monotonic() + 20
    while len(driver.events) < 3 and time.monotonic() < deadline:  # the fetching thread may still be giving it back
        carried.trim()
    assert driver.events[1:] == [("synchronize", OURS.index), ("unregister", buffer_bytes(unit.size_bytes))]
    assert ("staging", "pinned") in carried.allocated()
    carried.close()


class Landing(OneUnit):
    """A store that has memory of its own for the gradients of a push."""

    def landing(self, contribution: Contribution) -> Tensor:
        return torch.zeros_like(self.values)


@pytest.mark.parametrize("bias", [True, False], ids=["gathered", "whole"])
@pytest.mark.parametrize("store_of", [OneUnit, Landing])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_backward_faster_than_the_copies_keeps_the_gradients_of_two_units_and_waits(
    on_device: bool, store_of: type[OneUnit], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were there no end to those that wait for their copy, a slow link would keep the whole model's on the device."""
    unit = large_unit(bias=bias)
    store, held = store_of(torch.zeros(unit.numel)), ["out"]
    if on_device:
        carried: UnitTransfers = device_transfers(store, held_up(held), [unit], pinned=False)
    else:
        carried = make_transfers(store, torch.device("cpu"), [unit], pinned=False)
        carried._thread.submit(until, lambda: not held)

    def push(seq: int) -> Future[None] | None:
        contribution = Contribution(step=1, attempt=0, rank=0, unit=unit.index, seq=seq, presence=b"\x03")
        return carried.push(unit, contribution, [torch.full(slot.shape, float(seq)) for slot in unit.slots])

    try:
        first, second, third = push(0), push(1), push(2)
    finally:
        held.clear()
    assert third is None
    first.result(60)
    second.result(60)
    push(2).result(60)
    assert [float(pushed[0]) for pushed in store.pushed] == [0.0, 1.0, 2.0]
    carried.close()
    assert carried._staging.budget.used == 0


@pytest.mark.parametrize(("in_process", "threads"), [(False, 1), (False, CORES), (True, 1)])
def test_a_large_unit_is_gathered_where_no_thread_has_to_wait(
    in_process: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the computing thread, or there if a thread beside it would take its cores."""
    gathered_by: list[threading.Thread] = []
    unit, store = large_unit(bias=True), OneUnit(torch.empty(0))
    real = transfers_module.gather_into
    monkeypatch.setattr(
        transfers_module, "gather_into", lambda *of: (gathered_by.append(threading.current_thread()), real(*of))
    )
    store.in_process = in_process
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    carried = make_transfers(store, torch.device("cpu"), [unit], pinned=False)  # type: ignore[arg-type]
    push = Contribution(step=0, attempt=0, rank=0, unit=unit.index, seq=0, presence=b"\3")
    sent = carried.push(unit, push, [torch.ones(512, 1024), torch.ones(512)])
    assert sent is not None
    sent.result(60)
    carried.close()
    assert (gathered_by == [threading.current_thread()]) is (in_process or threads == CORES)
    assert store.pushed[0].count_nonzero() == 512 * 1025


def test_a_push_that_finds_the_thread_ended_is_sent_by_its_caller() -> None:
    """Another thread may close the transfers in the middle of a backward."""
    unit, store = large_unit(bias=True), OneUnit(torch.empty(0))
    carried = UnitTransfers(store, BufferPool())  # type: ignore[arg-type]
    carried.close()
    push = Contribution(step=0, attempt=0, rank=0, unit=unit.index, seq=0, presence=b"\3")
    sent = carried.push(unit, push, [torch.ones(512, 1024), torch.ones(512)])
    assert sent is not None
    sent.result(0)
    assert store.pushed[0].count_nonzero() == 512 * 1025
