"""What happened when, for a trace: each process keeps the latest spans, and only while somebody has asked for them.

[Note: one clock] Spans are in seconds of ``time.perf_counter``, which is CLOCK_MONOTONIC on Linux: the same in all
processes of one host. What each process also tells is how far its wall clock is ahead of that, by which the spans of
other hosts are moved to the first one's clock (telemetry/trace_file.py): those are as far apart as the hosts' wall
clocks are.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

MOST_SPANS = 32_768  # of a process, about 5 MB; the oldest go first
ASKED_S = 60.0  # for how long spans are kept after somebody has asked for them

Clock = Callable[[], float]
Over = Callable[[], None]


class Span(NamedTuple):
    """Something that a process did, from ``start`` to ``end`` on its clock."""

    lane: str  # one of trace_file.LANES
    name: str
    start: float
    end: float
    step: int  # that it was done for; the first is 0


class Spans(Protocol):
    """Takes spans from any thread and never blocks."""

    @property
    def wanted(self) -> bool:
        """Whether spans are kept now; where they are not, they need not be made."""
        ...

    def add(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        """Keep a span that is over."""
        ...

    def begin(self, lane: str, name: str, step: int) -> Over:
        """A span begins now and ends at the first call of what this returns: several threads may see its end."""
        ...


def nothing() -> None:
    """The end of a span that nobody wants."""


class NoSpans:
    """Keeps none."""

    wanted = False

    def add(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        """Nothing."""

    def begin(self, lane: str, name: str, step: int) -> Over:
        """Nothing."""
        return nothing


class SpanRing:
    """The latest spans of a process, while they are wanted.

    Knows spans; not who they are for."""

    def __init__(self, clock: Clock = time.perf_counter, most: int = MOST_SPANS) -> None:
        self._clock = clock
        self._ring: deque[Span] = deque(maxlen=most)
        self._until = 0.0
        self.kept = False  # to the end of the process, and not only for a while

    @property
    def wanted(self) -> bool:
        """See :class:`Spans`."""
        return self._clock() < self._until

    def keep(self) -> None:
        """From now on, for as long as the process lasts."""
        self.kept, self._until = True, float("inf")

    def ask(self, seconds: float = ASKED_S) -> None:
        """For so long from now on; what is left of an earlier asking goes first."""
        if not self.wanted:
            self._ring.clear()
        self._until = max(self._until, self._clock() + seconds)

    def add(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        """See :class:`Spans`."""
        if self.wanted:
            self._ring.append(Span(lane, name, start, end, step))

    def begin(self, lane: str, name: str, step: int) -> Over:
        """See :class:`Spans`."""
        # called hundreds of times a step, and mostly nobody has ever asked: that is known without a clock
        if not self._until or not self.wanted:
            return nothing
        began = [self._clock()]

        def over() -> None:
            now = self._clock()  # first: whoever finds the span ended knows that this was before
            with suppress(IndexError):  # another thread was quicker
                self.add(lane, name, began.pop(), now, step)

        return over

    def recorded(self) -> Recorded:
        """What there is now, for other processes."""
        spans = tuple(self._ring.copy())
        return Recorded(
            host=clock_host(),
            node=socket.gethostname(),
            pid=os.getpid(),
            wall_offset=time.time() - self._clock(),
            full=len(spans) == self._ring.maxlen,
            spans=spans,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One process's spans as they travel, and what it takes to put them beside others'. [Note: one clock]"""

    host: str  # equal in processes whose clocks are the same
    node: str  # the host's name
    pid: int
    wall_offset: float  # seconds: its wall clock less its monotonic one
    full: bool  # earlier spans are lost
    spans: tuple[Span, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {name: getattr(self, name) for name in ("host", "node", "pid", "wall_offset", "full", "spans")}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Recorded:
        """What ``to_json`` gave. Raises KeyError, TypeError where it is something else."""
        return cls(**found | {"spans": tuple(Span(*span) for span in found["spans"])})


def clock_host(proc: Path = Path("/proc")) -> str:
    """A name of the clock that ``time.perf_counter`` reads here: this boot of this host's kernel, in this time
    namespace; where the kernel does not tell, the host's name."""
    try:
        return f"{(proc / 'sys/kernel/random/boot_id').read_text().strip()} {os.readlink(proc / 'self/ns/time')}"
    except OSError:
        return socket.gethostname()
