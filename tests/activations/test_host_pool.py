"""The host pool: classes, bounds, returns in flight."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from rayzero.activations.host_pool import HostPool, size_class
from rayzero.errors import RayZeroError, UnsupportedError


class Copy:
    """A copy in flight that ends when told."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def finished(self) -> bool:
        return self.ended.is_set()

    def join(self) -> None:
        assert self.ended.wait(60)


def test_size_classes_fit_and_waste_less_than_a_quarter():
    for nbytes in [1, 4096, 4097, 5120, 5121, 8192, 8193, 1 << 20, (1 << 20) + 1, 123_456_789]:
        size = size_class(nbytes)
        assert size >= nbytes
        assert size_class(size) == size
        assert size == 4096 or size < nbytes * 1.25


def test_buffers_are_reused_across_sizes_of_one_class():
    pool = HostPool()
    first = pool.acquire(9000)
    pool.give_back(first)
    second = pool.acquire(10000)
    assert second.whole.data_ptr() == first.whole.data_ptr()
    assert second.bytes.numel() == 10000
    status = pool.status()
    assert (status.requests, status.hits, status.misses) == (2, 1, 1)
    assert status.in_use_bytes == status.total_bytes == 10240


def test_a_double_free_is_named():
    pool = HostPool()
    buffer = pool.acquire(100)
    pool.give_back(buffer)
    with pytest.raises(RayZeroError, match="100 bytes was given back twice"):
        pool.give_back(buffer)


def test_a_buffer_still_read_by_a_copy_is_leased_at_once_with_what_to_come_after():
    pool, copy = HostPool(), Copy()
    first = pool.acquire(5000)
    pool.give_back(first, after=copy)
    status = pool.status()
    assert (status.returning_bytes, status.free_bytes) == (5120, 0)
    assert pool.trim() == 0  # the copy would lose its memory
    again = pool.acquire(5000)
    assert again is first
    assert again.after is copy
    pool.give_back(again, after=copy)
    copy.ended.set()
    assert pool.status().returning_bytes == 0
    assert pool.acquire(5000).after is None


def test_the_longest_free_buffer_is_leased_first():
    pool, copies = HostPool(), [Copy() for _ in range(3)]
    leased = [pool.acquire(5000) for _ in range(3)]
    for buffer, copy in zip(leased, copies, strict=True):
        pool.give_back(buffer, after=copy)
    assert [pool.acquire(5000) for _ in range(3)] == leased


def test_a_capture_takes_only_what_was_reserved():
    pool, copy = HostPool(), Copy()
    leased = [pool.acquire(5000), pool.acquire(5000), pool.acquire(100)]
    for buffer in leased:
        pool.give_back(buffer, after=copy)
    with pytest.raises(UnsupportedError, match="needs one more host buffer of 5,120 bytes"):
        pool.acquire(5000, captured=True)  # their copies may be in flight
    pool.reserve(2)
    made = pool.status().misses
    assert len({pool.acquire(5000, captured=True).whole.data_ptr() for _ in range(4)}) == 4
    assert pool.acquire(100, captured=True) is not None
    with pytest.raises(UnsupportedError, match=r"call prepare_capture\(\)"):
        pool.acquire(5000, captured=True)
    assert pool.status().misses == made


def test_a_capture_near_the_cap_keeps_tensors_on_the_device():
    pool = HostPool(cap_bytes=6000)
    pool.give_back(pool.acquire(5000))
    pool.reserve(2)
    assert pool.acquire(5000, captured=True) is not None
    assert pool.acquire(5000, captured=True) is None


def test_the_cap_refuses_after_trimming_and_waiting():
    pool, copy = HostPool(cap_bytes=20_000), Copy()
    small = pool.acquire(4096)
    pool.give_back(small)
    big = pool.acquire(16_384)  # the free small one goes
    assert pool.status().total_bytes == 16_384
    assert pool.acquire(8192) is None
    pool.give_back(big, after=copy)
    threading.Timer(0.02, copy.ended.set).start()
    assert pool.acquire(16_384) is not None  # waited for the copy
    assert pool.status().refusals == 1
    assert pool.status().peak_bytes <= 20_000


def test_trim_gives_back_the_biggest_first():
    pool = HostPool()
    for buffer in [pool.acquire(4096), pool.acquire(40_960)]:
        pool.give_back(buffer)
    assert pool.trim(keep_bytes=5000) == 40_960
    assert pool.status().free_bytes == 4096


def test_failed_pinning_falls_back_to_pageable_with_one_warning():
    asked = []

    def allocate(nbytes: int, pinned: bool) -> torch.Tensor:
        asked.append(pinned)
        if pinned:
            raise RuntimeError("no more page-locked memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    pool = HostPool(pinned_for=torch.device("cuda"), allocate=allocate)
    with pytest.warns(UserWarning, match="pageable"):
        assert pool.acquire(10) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pool.acquire(10) is not None
    assert asked == [True, False, False]


def test_the_pinned_cap_falls_back_too():
    pool = HostPool(
        pinned_for=torch.device("cuda"),
        pinned_cap_bytes=4096,
        allocate=lambda n, pinned: torch.empty(n, dtype=torch.uint8),
    )
    pool.acquire(10)
    with pytest.warns(UserWarning, match="cap of 4,096"):
        pool.acquire(10)
    assert pool.status().pinned_bytes == 4096


def test_poison_shows_a_late_reader():
    pool = HostPool(poison=True)
    buffer = pool.acquire(4096)
    buffer.bytes.zero_()
    pool.give_back(buffer)
    assert buffer.bytes.view(torch.float32).isnan().all()
