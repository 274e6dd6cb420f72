"""Memory pressure is measured, and shortens the prefetch by the strategy's numbers."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.config import AutoMemoryStrategy
from rayzero.memory.pressure import MemoryReading, PressureGauge, read_memory, scaled_depth

MIB = 1 << 20
A = AutoMemoryStrategy


def test_pressure_is_that_of_the_fuller_side_and_at_most_one() -> None:
    def pressure(cpu: int, gpu: int) -> float:
        return MemoryReading(cpu_used=cpu * MIB, gpu_used=gpu * MIB).pressure(
            max_cpu_memory_mb=2048, max_gpu_memory_mb=1024
        )

    assert pressure(1024, 512) == 0.5  # the documented vector
    assert (pressure(1024, 768), pressure(1843, 0)) == (0.75, 1843 / 2048)
    assert pressure(9999, 0) == 1.0
    assert pressure(0, 0) == 0.0


def test_the_reading_follows_the_process() -> None:
    before = read_memory()
    fresh = mmap.mmap(-1, 64 * MIB)  # an allocator may have as much that is resident already
    held = torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)
    after = read_memory()
    assert 48 * MIB < after.cpu_used - before.cpu_used < 128 * MIB
    assert (held.numel(), after.gpu_used) == (64 * MIB, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_reading_follows_the_device() -> None:
    before = read_memory("cuda")
    held = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    assert read_memory("cuda").gpu_used - before.gpu_used == held.numel()


@pytest.mark.parametrize(
    ("strategy", "pressure", "depth"),
    [
        (A.CONSERVATIVE, 0.9, 16),
        (A.CONSERVATIVE, 1.0, 13),  # a fifth of 16 given up, rounded in favour of prefetching
        (A.BALANCED, 0.75, 16),
        (A.BALANCED, 0.875, 12),
        (A.BALANCED, 1.0, 8),
        (A.AGGRESSIVE, 0.6, 16),
        (A.AGGRESSIVE, 0.64, 15),
        (A.AGGRESSIVE, 0.8, 10),
        (A.AGGRESSIVE, 1.0, 4),
        (A.EXTREME, 0.4, 16),
        (A.EXTREME, 0.7, 8),
        (A.EXTREME, 1.0, 0),
    ],
)
def test_depth_16_under_pressure(strategy: AutoMemoryStrategy, pressure: float, depth: int) -> None:
    assert scaled_depth(16, pressure, strategy) == depth


@given(st.integers(1, 64), st.floats(0, 2), st.floats(0, 2), st.sampled_from(A))
def test_more_pressure_never_means_more_depth(depth: int, p: float, q: float, strategy: AutoMemoryStrategy) -> None:
    low, high = sorted((p, q))
    assert depth >= scaled_depth(depth, low, strategy) >= scaled_depth(depth, high, strategy) >= 0
    assert strategy is A.EXTREME or scaled_depth(depth, high, strategy) >= 1


def test_pressure_is_measured_at_most_once_a_second() -> None:
    now = 0.0
    gauge = PressureGauge(torch.device("cpu"), 64 * 1024, 8 * 1024, clock=lambda: now)
    first = gauge.read()
    assert 0 < first < 1
    ballast = mmap.mmap(-1, 64 << 20)  # a thousandth of the limit, in pages that nobody had before
    ballast.write(b"x" * len(ballast))
    now = 0.9
    assert gauge.read() == first
    now = 1.0
    assert gauge.read() > first
    ballast.close()
