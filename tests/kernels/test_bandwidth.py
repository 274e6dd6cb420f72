"""The memory limit: bytes over the seconds of the best run, and nothing kept."""

from __future__ import annotations

from itertools import chain

import pytest

from rayzero.kernels import native
from rayzero.memory.process_memory import process_memory


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Arrays of 1 MiB; the bytes that a run reads and writes."""
    if isinstance(native.load(), str):
        pytest.skip("no native library")
    monkeypatch.setattr(native, "_ELEMENTS", 1 << 18)
    return 6 << 20


def test_it_is_what_three_arrays_read_and_written_take_in_the_best_run(small, monkeypatch) -> None:
    class Clock:
        times = chain.from_iterable((0.0, seconds) for seconds in (4.0, 2.0, 0.5, 1.0, 3.0))

        @classmethod
        def perf_counter(cls) -> float:
            return next(cls.times)

    monkeypatch.setattr(native, "time", Clock)
    assert native.measure_bandwidth(1) == small / 0.5


@pytest.mark.parametrize("threads", [1, 2])
def test_a_real_one_is_positive_and_possible(small, threads) -> None:
    measured = native.measure_bandwidth(threads)
    assert measured is not None
    assert 1e7 < measured < 1e13


def test_without_the_native_library_nothing_is_claimed(monkeypatch) -> None:
    monkeypatch.setattr(native, "load", lambda: "no compiler")
    assert native.measure_bandwidth(1) is None


def test_its_memory_is_given_back() -> None:
    if isinstance(native.load(), str):
        pytest.skip("no native library")
    native.measure_bandwidth(1)
    before = process_memory().anonymous
    native.measure_bandwidth(1)
    assert process_memory().anonymous - before < 32 << 20, "of 96 MiB"
