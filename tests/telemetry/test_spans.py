"""Spans: kept only while somebody wants them, and put beside those of other processes on one clock."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from itertools import pairwise

import pytest
from clock import Clock

from rayzero.records import parse_record
from rayzero.telemetry.spans import (
    LANES,
    Recorded,
    SpanRing,
    TraceSpan,
    clock_host,
    last_steps,
    nothing,
    rows_of,
    trace_of,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rayzero.telemetry.spans.perf_counter", clock)
    return clock


@pytest.fixture
def ring(clock: Clock) -> SpanRing:
    return SpanRing(most=3)


def names_in(ring: SpanRing) -> list[str]:
    return [span.name for span in ring.recorded().spans]


# ---- the ring ---------------------------------------------------------------------------------------------------


def test_nothing_is_kept_before_somebody_asks_and_after_a_while(ring, clock) -> None:
    ring.add("update", "early", 1.0, 2.0, 0)
    assert ring.begin("update", "early", 0) is nothing
    ring.ask(10.0)
    ring.add("update", "wanted", 1.0, 2.0, 0)
    clock.now += 11
    assert not ring.wanted
    ring.add("update", "late", 1.0, 2.0, 0)
    assert names_in(ring) == ["wanted"]


def test_asking_again_goes_on_and_asking_anew_starts_over(ring, clock) -> None:
    ring.ask(10.0)
    ring.add("update", "first", 1.0, 2.0, 0)
    clock.now += 9
    ring.ask(10.0)
    clock.now += 9
    assert names_in(ring) == ["first"]
    clock.now += 9
    ring.ask(10.0)
    assert names_in(ring) == []


def test_what_is_kept_for_good_outlasts_every_asking_and_the_oldest_goes_first(ring, clock) -> None:
    ring.keep()
    ring.ask(1.0)
    clock.now += 1e6
    for i in range(5):
        ring.add("update", str(i), 0.0, 1.0, i)
    assert names_in(ring) == ["2", "3", "4"]
    assert ring.recorded().full


def test_a_span_ends_once_however_many_see_its_end(ring, clock) -> None:
    ring.keep()
    over = ring.begin("push", "unit", 4)
    clock.now += 2
    over()
    clock.now += 2
    over()
    assert ring.recorded().spans == (TraceSpan("push", "unit", 100.0, 102.0, 4),)


def test_a_waiter_never_goes_on_before_the_span_that_it_waited_for_has_ended() -> None:
    """A future's waiters may run before its callbacks do: whoever waited ends the span too."""
    ring = SpanRing()
    ring.keep()
    for _ in range(200):
        done: Future[None] = Future()
        over = ring.begin("fetch", "unit", 0)
        done.add_done_callback(lambda _, over=over: over())
        thread = threading.Thread(target=done.set_result, args=(None,))
        thread.start()
        done.result()
        over()
        after = time.perf_counter()
        thread.join()
        assert ring.recorded().spans[-1].end <= after


def test_the_clock_is_the_hosts_monotonic_one() -> None:
    assert time.get_clock_info("perf_counter").implementation == "clock_gettime(CLOCK_MONOTONIC)"
    assert abs(time.perf_counter() - time.clock_gettime(time.CLOCK_MONOTONIC)) < 1.0
    assert clock_host() == clock_host()


def test_spans_travel_as_json(ring) -> None:
    ring.keep()
    ring.add("update", "unit shard 0", 1.25, 2.5, 3)
    recorded = ring.recorded()
    assert parse_record(json.dumps(recorded.to_json()), Recorded) == recorded


# ---- rows -------------------------------------------------------------------------------------------------------


def spans(*times: tuple[float, float]) -> list[TraceSpan]:
    return [TraceSpan("fetch", f"{start:g}-{end:g}", start, end, 0) for start, end in times]


def rows(found: list[list[TraceSpan]]) -> list[list[str]]:
    return [[span.name for span in row] for row in found]


def test_what_overlaps_gets_rows_of_its_own() -> None:
    found = rows_of(spans((0, 4), (1, 2), (2, 3), (4, 5), (3, 6)), nested=False)
    assert rows(found) == [["0-4", "4-5"], ["1-2", "2-3", "3-6"]]


def test_parts_stay_inside_what_they_are_part_of() -> None:
    found = rows_of(spans((0, 10), (1, 4), (2, 3), (4, 10), (9, 12)), nested=True)
    assert rows(found) == [["0-10", "1-4", "2-3", "4-10"], ["9-12"]]


# ---- the file ---------------------------------------------------------------------------------------------------


def recorded(*found: TraceSpan, host: str = "a", wall_offset: float = 1000.0) -> Recorded:
    return Recorded(host=host, node=f"node-{host}", pid=7, wall_offset=wall_offset, full=False, spans=found)


def slices(trace: dict) -> dict[tuple[int, str], tuple[float, float]]:
    return {(e["pid"], e["name"]): (e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"}


def test_a_trace_begins_at_zero_in_microseconds_with_named_processes_and_lanes() -> None:
    trace = trace_of(
        "demo",
        {
            "rank 0": recorded(TraceSpan("forward", "blocks.0", 50.0, 50.001, 2)),
            "optimizer 0": recorded(TraceSpan("update", "blocks.0 shard 0", 49.5, 49.5000015, 1)),
        },
    )
    assert slices(trace) == {(1, "blocks.0"): (500_000.0, 1000.0), (2, "blocks.0 shard 0"): (0.0, 1.5)}
    named = [(e["pid"], e["name"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "M"]
    assert (1, "process_name", {"name": "rank 0"}) in named
    assert (2, "thread_name", {"name": "update"}) in named
    assert trace["otherData"]["clock"] == "CLOCK_MONOTONIC of node-a"
    assert trace["otherData"]["zero"] == "1970-01-01T00:17:29.500000+00:00"
    json.dumps(trace)


def test_times_of_another_host_are_moved_by_the_wall_clocks_and_the_file_says_so() -> None:
    here = recorded(TraceSpan("forward", "here", 50.0, 51.0, 0))
    there = recorded(TraceSpan("update", "there", 8050.5, 8051.0, 0), host="b", wall_offset=-7000.0)
    same = recorded(TraceSpan("update", "same", 50.5, 51.0, 0), wall_offset=1000.3)
    trace = trace_of("demo", {"rank 0": here, "optimizer 0": there, "optimizer 1": same})
    assert slices(trace)[2, "there"] == (500_000.0, 500_000.0)
    assert slices(trace)[3, "same"] == (500_000.0, 500_000.0), "one host has one clock, whatever wall clocks say"
    assert trace["otherData"]["moved by wall clocks, s"] == {"optimizer 0": -8000.0}


def test_neighbours_never_overlap_by_rounding() -> None:
    third = 1e5 + 1 / 3
    chain = [TraceSpan("update", str(i), third + i * 1e-7, third + (i + 1) * 1e-7, 0) for i in range(1000)]
    events = [e for e in trace_of("demo", {"optimizer 0": recorded(*chain)})["traceEvents"] if e["ph"] == "X"]
    assert {e["tid"] for e in events} == {1}
    for one, after in pairwise(events):
        assert round(one["ts"] * 1e3) + round(one["dur"] * 1e3) <= round(after["ts"] * 1e3)


def test_the_last_steps_are_those_that_were_updated() -> None:
    rank = recorded(*(TraceSpan("fetch", str(i), i, i + 1, i) for i in range(6)))
    owner = recorded(*(TraceSpan("update", str(i), i, i + 1, i) for i in range(5)))
    found = last_steps({"rank 0": rank, "optimizer 0": owner}, 2)
    assert [[span.step for span in one.spans] for one in found.values()] == [[3, 4, 5], [3, 4]]


def test_a_trace_without_spans_is_one_too() -> None:
    assert slices(trace_of("demo", {"rank 0": recorded()})) == {}
    assert len(LANES) == len(set(LANES))
