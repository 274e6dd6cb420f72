"""Spans for traces: each process keeps its latest spans, but only for a while after a request for them.
Those of several processes become one file for Perfetto and chrome://tracing: JSON in the trace-event format.

A process of the run is a process of the trace, and each of its lanes a thread. Spans of a lane that overlap without
nesting get separate rows ("fetch", "fetch 2"), because slices of one thread must nest.

[Note: one clock] Spans are in seconds of ``time.perf_counter``, which is CLOCK_MONOTONIC on Linux: the same in all
processes of one host. Each process also reports the offset of its wall clock, by which the spans of other hosts are
moved to the first one's clock (``trace_of``); the error is the difference of the hosts' wall clocks.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, time
from typing import Any, NamedTuple

MOST_SPANS = 32_768  # of a process, about 5 MB; the oldest go first
ASKED_S = 60.0  # how long spans are kept after a request

Over = Callable[[], None]


class TraceSpan(NamedTuple):
    """Work of a process, from ``start`` to ``end`` on its clock."""

    lane: str  # one of LANES
    name: str
    start: float
    end: float
    step: int  # the step it was done for; the first is 0


def nothing() -> None:
    """The end of a span that is not kept."""


class Spans:
    """Takes spans from any thread and never blocks. This one keeps none."""

    @property
    def wanted(self) -> bool:
        """Whether spans are kept now; if not, callers need not make them."""
        return False

    def add(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        """Keep a span that has ended."""

    def begin(self, lane: str, name: str, step: int) -> Over:
        """Begin a span. It ends at the first call of the returned function, which several threads may call."""
        return nothing


class SpanRing(Spans):
    """The latest spans of a process, while they are wanted. Knows spans; not who reads them."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._ring: deque[TraceSpan] = deque(maxlen=most)
        self._until = 0.0
        self.kept = False  # to the end of the process, and not only for a while

    @property
    def wanted(self) -> bool:
        return perf_counter() < self._until

    def keep(self) -> None:
        """Keep spans from now on, to the end of the process."""
        self.kept, self._until = True, float("inf")

    def ask(self, seconds: float = ASKED_S) -> None:
        """Keep spans for ``seconds`` from now on; drops those left from an earlier request."""
        if not self.wanted:
            self._ring.clear()
        self._until = max(self._until, perf_counter() + seconds)

    def add(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        if self.wanted:
            self._ring.append(TraceSpan(lane, name, start, end, step))

    def begin(self, lane: str, name: str, step: int) -> Over:
        # called hundreds of times a step, mostly when no request was ever made: then skip reading the clock
        if not self._until or not self.wanted:
            return nothing
        began = [perf_counter()]

        def over() -> None:
            now = perf_counter()  # read first, so that no thread sees the span ended before its end time
            with suppress(IndexError):  # another thread was quicker
                self.add(lane, name, began.pop(), now, step)

        return over

    def recorded(self) -> Recorded:
        spans = tuple(self._ring.copy())
        return Recorded(
            host=clock_host(),
            node=os.uname().nodename,
            pid=os.getpid(),
            wall_offset=time() - perf_counter(),
            full=len(spans) == self._ring.maxlen,
            spans=spans,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One process's spans, with what is needed to align them with other processes'. [Note: one clock]"""

    host: str  # equal in processes whose clocks are the same
    node: str  # the host's name
    pid: int
    wall_offset: float  # seconds: its wall clock less its monotonic one
    full: bool  # earlier spans are lost
    spans: tuple[TraceSpan, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("host", "node", "pid", "wall_offset", "full", "spans")}


def clock_host() -> str:
    """A name for the clock that ``time.perf_counter`` reads here: this host's boot and time namespace; the host's name
    if the kernel does not provide them."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return os.uname().nodename


# ---- the file for Perfetto ------------------------------------------------------------------------------------------


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
