"""Writes spans of several processes as one file for Perfetto and chrome://tracing: JSON in the trace-event format.

A process of the run is a process of the trace, and each of its lanes a thread. Spans of a lane that overlap without
nesting get separate rows ("fetch", "fetch 2"), because slices of one thread must nest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rayzero.telemetry.spans import Recorded, TraceSpan

LANES = (
    "step",  # rank: its phases, one after the other
    "forward",  # rank: a module's forward with its units up; parts of it inside
    "backward",  # rank: until a unit's gradients are complete; recomputations inside
    "wait",  # rank: the loop waits, and for what
    "fetch",  # rank: a unit's parameters, from request to arrival; includes waiting for their version
    "push",  # rank: a unit's gradients, from complete to landed
    "touch",  # rank: parameters are used outside forward and backward
    "decide",  # owner: from all ranks' reports to the decision
    "norm",  # owner: sums of squares
    "update",  # owner: one shard
    "publish",  # owner: announces the new version of one or more shards
    "checkpoint",  # owner: writes its checkpoint file
)
"""From top to bottom. On CUDA a rank's spans are the host's: the device is behind what the host has queued."""

_NESTED = ("forward", "backward", "touch")

Event = dict[str, Any]


def last_steps(processes: Mapping[str, Recorded], steps: int) -> dict[str, Recorded]:
    """Only the spans of the last ``steps`` updated steps, and of the next one as far as it was done by then."""
    updated = [span.step for one in processes.values() for span in one.spans if span.lane == "update"]
    newest = max(updated, default=0)
    return {
        who: replace(one, spans=tuple(span for span in one.spans if span.step > newest - steps))
        for who, one in processes.items()
    }


def trace_of(run: str, processes: Mapping[str, Recorded]) -> dict[str, Any]:
    """The file's content. ``processes``: by process name ("rank 0"), in display order.

    All times are on the first one's clock; zero is the earliest span's start."""
    first = next(iter(processes.values()))
    shifts = {  # seconds to add to a process's times. [Note: one clock]
        who: 0.0 if one.host == first.host else one.wall_offset - first.wall_offset for who, one in processes.items()
    }
    zero = min((span.start + shifts[who] for who, one in processes.items() for span in one.spans), default=0.0)
    events: list[Event] = []
    for number, (who, one) in enumerate(processes.items(), start=1):
        events.append(_metadata("process_name", number, 0, name=who))
        events.append(_metadata("process_labels", number, 0, labels=f"{one.node}, pid {one.pid}"))
        events.append(_metadata("process_sort_index", number, 0, sort_index=number))
        events += _lanes_of_process(number, one.spans, shifts[who] - zero)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run,
            "clock": f"CLOCK_MONOTONIC of {first.node}",
            "zero": datetime.fromtimestamp(zero + first.wall_offset, UTC).isoformat(),
            "moved by wall clocks, s": {who: shift for who, shift in shifts.items() if shift},
            "earlier spans lost": [who for who, one in processes.items() if one.full],
        },
    }


def _lanes_of_process(process: int, spans: Iterable[TraceSpan], shift: float) -> Iterator[Event]:
    thread = 0
    by_lane: dict[str, list[TraceSpan]] = {lane: [] for lane in LANES}
    for span in spans:
        by_lane[span.lane].append(span)
    for lane, its in by_lane.items():
        for number, row in enumerate(rows_of(its, nested=lane in _NESTED), start=1):
            thread += 1
            yield _metadata("thread_name", process, thread, name=lane if number == 1 else f"{lane} {number}")
            yield _metadata("thread_sort_index", process, thread, sort_index=thread)
            yield from (_slice(process, thread, span, shift) for span in row)


def rows_of(spans: Iterable[TraceSpan], *, nested: bool) -> list[list[TraceSpan]]:
    """Distribute spans over few rows so that no two in a row overlap. ``nested``: one may lie inside another."""
    rows: list[list[TraceSpan]] = []
    open_ends: list[list[float]] = []  # of each row's spans that the next one may be inside of, outermost first
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        for row, ends in zip(rows, open_ends, strict=True):
            while ends and ends[-1] <= span.start:
                ends.pop()
            if not ends or (nested and span.end <= ends[-1]):
                row.append(span)
                ends.append(span.end)
                break
        else:
            rows.append([span])
            open_ends.append([span.end])
    return rows


def _slice(process: int, thread: int, span: TraceSpan, shift: float) -> Event:
    start, end = (round((time + shift) * 1e9) for time in (span.start, span.end))  # whole ns: none overlaps by rounding
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": process,
        "tid": thread,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"step": span.step},
    }


def _metadata(what: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
