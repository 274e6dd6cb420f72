"""Page-locked memory: as much as was asked for, and given back with its last tensor, after the device is done."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rayzero.activations import ActivationOffload
from rayzero.activations.host_pool import HostPool, size_class
from rayzero.errors import MemoryPlanError
from rayzero.hybrid.buckets import Bucket
from rayzero.hybrid.placement import Piece
from rayzero.lanes import ThreadLane
from rayzero.memory.mapping import PageLock, host_zeros, locked_bytes
from rayzero.memory.pool import BufferPool
from rayzero.quantities import PAGE
from tests.cuda_driver import OURS, Driver, driver

__all__ = ["driver"]


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@pytest.mark.parametrize("numel", [1, 1000, 3 << 20])
def test_page_locked_memory_takes_whole_pages_and_not_the_next_power_of_two(numel: int, driver: Driver) -> None:
    found = host_zeros(numel, torch.bfloat16, pinned_for=OURS)
    assert (found.shape, found.dtype, found.count_nonzero()) == ((numel,), torch.bfloat16, 0)
    found.fill_(1.0)
    assert driver.events == [("register", pages(2 * numel))]
    assert locked_bytes() == pages(2 * numel)


def test_it_is_given_back_with_its_last_tensor_once_the_device_is_done(driver: Driver) -> None:
    found = host_zeros(100, torch.float32, pinned_for=OURS)
    view = found[10:20]
    del found
    gc.collect()
    assert driver.events == [("register", PAGE)]
    view.fill_(2.0)
    del view
    gc.collect()
    assert driver.events[1:] == [("synchronize", OURS.index), ("unregister", PAGE)]
    assert locked_bytes() == 0


@pytest.mark.parametrize("fault", ["operation not permitted when stream is capturing", "unspecified launch failure"])
def test_it_is_given_back_and_the_error_logged_where_the_device_cannot_be_waited_for(
    fault: str, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the range would be unmapped while it is registered."""
    found = host_zeros(100, torch.float32, pinned_for=OURS)
    driver.fault = fault
    del found
    gc.collect()
    assert driver.registered == {}
    assert locked_bytes() == 0
    assert fault in caplog.text


def test_whoever_drops_the_last_tensor_makes_no_context_on_another_device(driver: Driver) -> None:
    """Threads begin on device 0. The collector runs in any of them, and so may a pool's first acquire."""

    def in_a_thread() -> int:
        pool = BufferPool(pinned_for=OURS)
        buffer = pool.acquire(4096)
        assert buffer is not None
        assert locked_bytes() == 4096
        buffer.release()
        del buffer
        pool.trim()
        return driver.devices.current()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(in_a_thread).result() == 0
    assert [event for event, _ in driver.events] == ["register", "synchronize", "unregister"]
    lock = PageLock([(PAGE, PAGE)], None, device=OURS)
    lock.release()
    assert driver.devices.contexts == {OURS.index}


def test_a_driver_that_refuses_is_named_and_nothing_is_kept(driver: Driver) -> None:
    driver.most = 0
    with pytest.raises(MemoryPlanError, match=r"CUDA refused to page-lock 4 KiB of host memory \(error 2\)"):
        host_zeros(100, torch.float32, pinned_for=OURS)
    assert locked_bytes() == 0


def test_memory_that_need_not_be_locked_is_torchs(driver: Driver) -> None:
    assert not host_zeros(100, torch.float32, pinned_for=None).count_nonzero()
    assert host_zeros(0, torch.float32, pinned_for=OURS).numel() == 0
    assert driver.events == []


def test_what_a_rank_locks_is_counted_wherever_it_is(driver: Driver) -> None:
    """Its staging, offloaded activations and the hybrid optimizer's buckets: what the metric reports."""
    staged = BufferPool(pinned_for=OURS).acquire(5 << 20)
    activations = HostPool(pinned_for=OURS)
    leased = activations.acquire(3 << 20)
    piece = Piece(param=0, start=0, stop=1000, whole=True)
    bucket = Bucket(
        [piece], {0: (1000,)}, torch.bfloat16, working=torch.float32, params_pinned_for=OURS, grads_pinned_for=OURS
    )
    bucket.gradient_memory(torch.bfloat16)
    assert staged is not None
    assert leased is not None
    assert locked_bytes() == (5 << 20) + (3 << 20) + 2 * pages(2 * 1024)
    assert activations.status().pinned_bytes == 3 << 20


def test_activations_go_on_in_pageable_memory_where_the_driver_refuses(driver: Driver) -> None:
    driver.most = 0
    with pytest.warns(UserWarning, match="continues with pageable host buffers"):
        leased: Any = HostPool(pinned_for=OURS).acquire(4096)
    assert not leased.pinned


def test_activations_are_locked_for_the_device_of_their_lane(driver: Driver) -> None:
    lane = ThreadLane()
    lane.device = OURS
    offload = ActivationOffload(torch.nn.Linear(4, 4), lane=lane)
    leased = offload._pool.acquire(4096)
    assert leased is not None
    assert leased.pinned
    assert locked_bytes() == size_class(4096)
    lane.close()


def test_a_device_without_a_number_is_the_one_that_is_current_then(driver: Driver) -> None:
    """And not the one of whichever thread comes later."""
    device = torch.device("cuda")
    with torch.cuda.device(OURS):
        found = host_zeros(100, torch.float32, pinned_for=device)
        lock = PageLock([(PAGE, PAGE)], None, device=device)
        pool = BufferPool(pinned_for=device)
    lock.release()
    pool.acquire(4096)
    del found, pool
    gc.collect()
    assert driver.registered == {}
    assert [index for event, index in driver.events if event == "synchronize"] == [OURS.index] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_refusal_is_not_the_error_of_the_next_kernel() -> None:
    device = torch.device("cuda")
    found = host_zeros(100, torch.float32, pinned_for=device)
    with pytest.raises(MemoryPlanError, match="CUDA refused to page-lock"):
        PageLock([(found.data_ptr(), PAGE)], found, device=device)  # it is registered already
    assert torch.ones(3, device="cuda").sum().item() == 3
