"""Counters and timings by name and labels, exact under threads."""

from __future__ import annotations

import threading

import pytest

from rayzero.telemetry import names
from rayzero.telemetry.recorder import MemoryRecorder, NullRecorder, Recorder, Timing, timed


def test_totals_sum_over_every_label_not_asked_for() -> None:
    recorder = MemoryRecorder()
    recorder.add("bytes", 3, direction="fetch", transport="grpc")
    recorder.add("bytes", 4, transport="inproc", direction="fetch")
    recorder.add("bytes", 5, direction="push", transport="grpc")
    assert recorder.total("bytes") == 12
    assert recorder.total("bytes", direction="fetch") == 7
    assert recorder.total("bytes", transport="grpc", direction="push") == 5
    assert recorder.total("bytes", direction="load") == recorder.total("other") == 0
    assert recorder.counters()["bytes"][(("direction", "fetch"), ("transport", "grpc"))] == 3


def test_timings_keep_count_sum_and_longest() -> None:
    recorder = MemoryRecorder()
    for seconds, rank in [(1.0, "0"), (3.0, "0"), (2.0, "1")]:
        recorder.observe("wait", seconds, rank=rank)
    assert recorder.timing("wait") == Timing(3, 6.0, 3.0)
    assert recorder.timing("wait", rank="0") == Timing(2, 4.0, 3.0)
    assert recorder.timing("none") == Timing()
    assert recorder.timings()["wait"][(("rank", "1"),)] == Timing(1, 2.0, 2.0)


def test_threads_lose_nothing() -> None:
    recorder = MemoryRecorder()

    def count() -> None:
        for _ in range(2000):
            recorder.add("n")
            recorder.observe("t", 0.5)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert recorder.total("n") == 8000
    assert recorder.timing("t") == Timing(8000, 4000.0, 0.5)


def test_a_timed_block_is_noted_also_when_it_raises() -> None:
    recorder = MemoryRecorder()
    ticks = iter([10.0, 12.5])

    def fail() -> None:
        with timed(recorder, "block", clock=lambda: next(ticks), rank="1"):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert recorder.timing("block", rank="1") == Timing(1, 2.5, 2.5)


def test_the_null_recorder_is_a_recorder() -> None:
    recorder: Recorder = NullRecorder()
    recorder.add("n", 1, rank="0")
    recorder.observe("t", 1.0)


def test_names_follow_the_rules() -> None:
    found = {value for key, value in vars(names).items() if key.isupper()}
    assert len(found) == sum(key.isupper() for key in vars(names))
    for name in found:
        assert name.startswith("rayzero_")
        assert name.endswith(("_total", "_seconds", "_bytes", "_units"))
