"""Reused byte buffers: counted, bounded, never handed out twice; and leases of a byte budget, which never block."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import ConfigError
from rayzero.memory.pool import Buffer, BufferPool, Lease, MemoryBudget, buffer_bytes


def acquire(pool: BufferPool, nbytes: int) -> Buffer:
    buffer = pool.acquire(nbytes)
    assert buffer is not None
    return buffer


def address(buffer: Buffer) -> int:
    return buffer.tensor.untyped_storage().data_ptr()


def test_a_released_buffer_serves_the_next_request_of_about_its_size() -> None:
    pool = BufferPool()
    first = acquire(pool, 9000)
    where = address(first)
    first.release()
    again = acquire(pool, 8500)
    assert address(again) == where
    assert (again.size_bytes, again.tensor.dtype, again.tensor.shape) == (8500, torch.uint8, (8500,))
    assert pool.held_bytes == buffer_bytes(9000)


def test_what_is_made_over_a_buffer_stays_with_its_memory_and_goes_with_it() -> None:
    pool = BufferPool()
    first = acquire(pool, 1024)
    first.made["view"] = view = first.tensor.view(torch.float32)
    first.release()
    again = acquire(pool, 1024)
    assert again.made["view"] is view
    other = acquire(pool, 1024)
    assert "view" not in other.made
    again.release()
    other.release()
    pool.trim()
    assert "view" not in acquire(pool, 1024).made


def test_a_buffer_much_larger_than_the_request_is_not_used_for_it() -> None:
    pool = BufferPool()
    acquire(pool, 9000).release()
    small = acquire(pool, 4000)
    assert (pool.held_bytes, pool.budget.used) == (buffer_bytes(9000) + buffer_bytes(4000), buffer_bytes(4000))
    small.release()


def test_the_tightest_kept_buffer_is_taken() -> None:
    pool = BufferPool()
    sizes = [9216, 8704, 9728]
    held = [acquire(pool, size) for size in sizes]
    where = {size: address(buffer) for size, buffer in zip(sizes, held, strict=True)}
    for buffer in held:
        buffer.release()
    assert address(acquire(pool, 8700)) == where[8704]
    assert address(acquire(pool, 8700)) == where[9216]


def test_kept_buffers_make_room_for_new_ones_within_the_limit() -> None:
    pool = BufferPool(budget=MemoryBudget(4096))
    for size in (1024, 2048):
        acquire(pool, size).release()
    assert pool.held_bytes == 3072
    acquire(pool, 3584)
    assert pool.held_bytes == pool.budget.used == 3584


def test_trim_drops_the_longest_unused_first() -> None:
    pool = BufferPool()
    held = [acquire(pool, size) for size in (1024, 2048, 4096)]
    for buffer in held:
        buffer.release()
    assert pool.trim(6144) == 1024
    assert pool.trim() == 6144
    assert pool.held_bytes == 0


def test_a_second_release_is_caught_and_changes_nothing() -> None:
    pool = BufferPool()
    buffer = acquire(pool, 100)
    buffer.release()
    with pytest.raises(RuntimeError, match="100 bytes was released twice"):
        buffer.release()
    assert (pool.held_bytes, pool.budget.used) == (512, 0)


def test_a_poisoned_buffer_reads_as_nan_after_release() -> None:
    pool = BufferPool(poison=True)
    buffer = acquire(pool, 64)
    floats = buffer.tensor.view(torch.float32)
    floats.fill_(1.0)
    buffer.release()
    assert bool(floats.isnan().all())
    assert bool(floats.view(torch.bfloat16).isnan().all())


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6000)), max_size=50))
def test_live_buffers_never_share_memory_and_the_counts_agree(actions: list[tuple[bool, int]]) -> None:
    budget = MemoryBudget(16384)
    pool = BufferPool(budget=budget)
    live: list[Buffer] = []
    for take, number in actions:
        if take:
            buffer = pool.acquire(number)
            live += [buffer] if buffer is not None else []
        elif live:
            live.pop(number % len(live)).release()
        whole = [buffer.tensor.untyped_storage().nbytes() for buffer in live]
        assert len({address(buffer) for buffer in live}) == len(live)
        assert budget.used == sum(whole) <= pool.held_bytes <= 16384


def test_pinned_memory_needs_cuda() -> None:
    if torch.cuda.is_available():
        assert acquire(BufferPool(pinned_for=torch.device("cuda")), 100).tensor.is_pinned()
    else:
        with pytest.raises(ConfigError, match="need host memory and CUDA"):
            BufferPool(pinned_for=torch.device("cuda"))


@given(st.none() | st.integers(1, 100), st.lists(st.tuples(st.booleans(), st.integers(0, 150)), max_size=60))
def test_used_is_the_sum_of_live_leases_and_stays_within_the_limit(
    limit: int | None, actions: list[tuple[bool, int]]
) -> None:
    budget = MemoryBudget(limit)
    live: list[Lease] = []
    most = 0
    for take, number in actions:
        if take:
            before = budget.used
            lease = budget.reserve(number)
            fits = limit is None or before + number <= limit or before == 0
            assert (lease is not None) == fits
            live += [lease] if lease else []
        elif live:
            live.pop(number % len(live)).release()
        sizes = [lease.size for lease in live]
        most = max(most, sum(sizes))
        assert (budget.used, budget.peak) == (sum(sizes), most)
        if limit is not None and budget.used > limit:
            assert [size for size in sizes if size > 0] == [budget.used]  # one oversize lease, alone


def test_threads_never_exceed_the_limit() -> None:
    budget = MemoryBudget(100)
    start = threading.Barrier(4)

    def take_and_release() -> None:
        start.wait(60)
        for size in range(1, 400):
            lease = budget.reserve(size % 60 + 1)
            if lease is not None:
                assert budget.used <= 100
                lease.release()

    threads = [threading.Thread(target=take_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert budget.used == 0
    assert budget.peak <= 100


def test_wrong_numbers_are_errors() -> None:
    with pytest.raises(ConfigError, match="more than 0 bytes, got 0"):
        MemoryBudget(0)
    with pytest.raises(ConfigError, match="cannot reserve -1 bytes"):
        MemoryBudget(10).reserve(-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_buffers_live_on_the_pools_device() -> None:
    pool = BufferPool("cuda")
    before = torch.cuda.memory_allocated()
    buffer = acquire(pool, 1 << 20)
    assert buffer.tensor.is_cuda
    assert torch.cuda.memory_allocated() - before == 1 << 20
    buffer.release()
    del buffer
    pool.trim()
    assert torch.cuda.memory_allocated() == before
