"""Spans for traces: each process keeps its latest spans, but only for a while after a request for them.

[Note: one clock] Spans are in seconds of ``time.perf_counter``, which is CLOCK_MONOTONIC on Linux: the same in all
processes of one host. Each process also reports the offset of its wall clock, by which the spans of other hosts are
moved to the first one's clock (telemetry/trace_file.py); the error is the difference of the hosts' wall clocks.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any, NamedTuple

MOST_SPANS = 32_768  # of a process, about 5 MB; the oldest go first
ASKED_S = 60.0  # how long spans are kept after a request

Over = Callable[[], None]


class TraceSpan(NamedTuple):
    """Work of a process, from ``start`` to ``end`` on its clock."""

    lane: str  # one of trace_file.LANES
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
        """The spans kept now, for other processes."""
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
        """Plain values, which ``parse_record`` reads again."""
        return {name: getattr(self, name) for name in ("host", "node", "pid", "wall_offset", "full", "spans")}


def clock_host() -> str:
    """A name for the clock that ``time.perf_counter`` reads here: this host's boot and time namespace; the host's name
    if the kernel does not provide them."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return os.uname().nodename
