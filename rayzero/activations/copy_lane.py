"""Copies beside the computation: what a lane is, and the lane of a device without streams (two threads).

[Note: three ways to wait] ``finished()`` asks and never blocks. ``wait()`` orders: what the caller computes after it
sees the copy done (on CUDA the stream waits, not the thread). ``join()`` blocks the calling thread until the copy is
done; only host buffers that are about to be reused need it."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rayzero.activations.tensors.codec import Codec
from rayzero.concurrency.exit import abandon_at_exit
from rayzero.errors import RayZeroError

_SPANS_KEPT = 4096


class Resident:
    """The device's bytes of something on its way out; ``bytes`` is None once the device memory may go.

    Cleared by the lane, in any thread: read it once into a local. ``on_clear(nbytes)`` is called once, there."""

    __slots__ = ("_held", "_lock", "_on_clear", "bytes")

    def __init__(self, data: Tensor, on_clear: Callable[[int], None]) -> None:
        self.bytes: Tensor | None = data  # 1D uint8 on the device; freed by: clear()
        self._on_clear = on_clear
        self._held = False
        self._lock = threading.Lock()

    def hold(self) -> bool:
        """Keep the device memory after all, until ``drop``: its bytes are wanted soon. False if it is gone already."""
        with self._lock:
            self._held = self.bytes is not None
            return self._held

    def clear(self) -> None:
        """Let the device memory go, unless it is held; a second call changes nothing."""
        with self._lock:
            if self._held:
                return
            data, self.bytes = self.bytes, None
        if data is not None:
            self._on_clear(data.numel())

    def drop(self) -> None:
        """Let the device memory go; a second call changes nothing."""
        with self._lock:
            data, self.bytes = self.bytes, None
        if data is not None:
            self._on_clear(data.numel())


@dataclass(frozen=True, slots=True)
class Parcel:
    """One copy's two ends. ``host`` is 1D uint8 in a host buffer and holds ``codec``'s form of ``dtype`` values."""

    host: Tensor
    codec: Codec
    dtype: torch.dtype
    label: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """One copy that happened: ``direction`` is "out" or "in", times in seconds on one clock, host bytes."""

    direction: str
    label: str
    start: float
    stop: float
    nbytes: int


class Ticket(Protocol):
    """One copy in flight. See [Note: three ways to wait]."""

    def finished(self) -> bool:
        """True once the copy has ended, well or not; never blocks."""
        ...

    def failed(self) -> bool:
        """True when it has ended badly."""
        ...

    def wait(self) -> None:
        """Order the caller's following work after the copy; raises what the copy raised."""
        ...

    def join(self) -> None:
        """Block until the copy has ended, well or not."""
        ...


class Stamp(Protocol):
    """A point in the computation's time, made by ``CopyLane.stamp``."""


class CopyLane(Protocol):
    """Moves bytes between one device and host buffers, in order per direction, beside the computation."""

    device: torch.device
    pins: bool  # page-locked host buffers are worth while

    def copy_out(self, source: Resident, parcel: Parcel, *, take: int, keep: bool) -> Ticket:
        """The last ``take`` bytes, device to host. ``source`` is cleared when its memory may go, with ``keep`` only by
        ``let_go``."""
        ...

    def copy_in(self, parcel: Parcel, target: Tensor, *, after: Ticket) -> Ticket:
        """Host to ``target`` (1D uint8 on the device), not before ``after``."""
        ...

    def let_go(self, source: Resident, ticket: Ticket) -> None:
        """Free a ``keep`` source as soon as its copy is through: the computation waits for it."""
        ...

    def drop_out(self, source: Resident, ticket: Ticket) -> None:
        """Free a source that nobody wants any more, its copy under way or not."""
        ...

    def drop_in(self, ticket: Ticket) -> None:
        """Make it safe to free a target that nobody waited for."""
        ...

    def capturing(self) -> bool:
        """True while the current stream records a CUDA graph."""
        ...

    def stamp(self) -> Stamp:
        """Now, in the computation's order."""
        ...

    def seconds(self, start: Stamp, stop: Stamp) -> float | None:
        """Time between two stamps; None while it is not known yet."""
        ...

    def spans(self) -> list[Span]:
        """The latest copies that have ended, in the order they ended."""
        ...

    def join_out(self) -> None:
        """Order the caller's following work after every copy out so far."""
        ...

    def join_in(self) -> None:
        """Order the caller's following work after every copy in so far."""
        ...

    def close(self) -> None:
        """End the lane's threads, after what is queued; copies asked for later run at once in the caller."""
        ...


class ThreadTicket:
    """A copy on a thread."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        """The copy has ended."""
        self.error = error
        self._ended.set()

    def finished(self) -> bool:
        """True once the copy has ended, well or not."""
        return self._ended.is_set()

    def failed(self) -> bool:
        """True when it raised."""
        return self._ended.is_set() and self.error is not None

    def wait(self) -> None:
        """Blocks: a thread has no other way to order its work."""
        self._ended.wait()
        if self.error is not None:
            raise RayZeroError(f"a copy of saved activations failed: {self.error!r}") from self.error

    def join(self) -> None:
        """Block until it has ended, well or not."""
        self._ended.wait()


@dataclass(slots=True)
class _Job:
    run: Callable[[], bool]  # whether it copied
    direction: str
    parcel: Parcel
    ticket: ThreadTicket = field(default_factory=ThreadTicket)


class ThreadLane:
    """A copy lane for devices without streams: one thread out, one thread in, started at the first copy.

    Knows byte buffers and their order; not what they mean. ``before_copy(direction, label)`` is called on the copy
    thread before each copy, for tests that delay or fail copies."""

    pins = False

    def __init__(
        self, device: torch.device | str = "cpu", *, before_copy: Callable[[str, str], None] | None = None
    ) -> None:
        self.device = torch.device(device)
        self._before_copy = before_copy
        self._spans: deque[Span] = deque(maxlen=_SPANS_KEPT)
        self._queues: dict[str, queue.SimpleQueue[_Job | None]] = {}
        self._threads: list[threading.Thread] = []
        self._last: dict[str, ThreadTicket] = {}
        self._lock = threading.Lock()
        self._closed = False
        weakref.finalize(self, _stop_queues, self._queues)
        abandon_at_exit(self)

    def copy_out(self, source: Resident, parcel: Parcel, *, take: int, keep: bool) -> Ticket:
        """Queue it; the copy thread clears ``source`` unless told to keep it. A copy that fails clears nothing."""

        def run() -> bool:
            data = source.bytes
            if data is None:
                return False  # dropped while it waited
            parcel.host.copy_(parcel.codec.encode(data[-take:], parcel.dtype))
            if not keep:
                source.clear()
            return True

        return self._submit(_Job(run, "out", parcel))

    def copy_in(self, parcel: Parcel, target: Tensor, *, after: Ticket) -> Ticket:
        """Queue it; the copy thread waits for ``after``."""

        def run() -> bool:
            after.wait()
            parcel.codec.decode(parcel.host, parcel.dtype, target)
            return True

        return self._submit(_Job(run, "in", parcel))

    def let_go(self, source: Resident, ticket: Ticket) -> None:
        """Block until the copy is through, then clear; a failed copy keeps its source."""
        ticket.join()
        if not ticket.failed():
            source.clear()

    def drop_out(self, source: Resident, ticket: Ticket) -> None:
        """Drop: a copy that has not begun is skipped, one that has holds the memory itself."""
        source.drop()

    def drop_in(self, ticket: Ticket) -> None:
        """Nothing: the copy thread holds the target."""

    def capturing(self) -> bool:
        """Never."""
        return False

    def stamp(self) -> Stamp:
        """Seconds of the performance counter."""
        return time.perf_counter()

    def seconds(self, start: Stamp, stop: Stamp) -> float | None:
        """Their difference."""
        assert isinstance(start, float)
        assert isinstance(stop, float)
        return stop - start

    def spans(self) -> list[Span]:
        """The latest copies that have ended."""
        return list(self._spans)

    def join_out(self) -> None:
        """Block until every copy out so far has ended."""
        self._join("out")

    def join_in(self) -> None:
        """Block until every copy in so far has ended."""
        self._join("in")

    def close(self) -> None:
        """End both threads after what is queued; idempotent."""
        with self._lock:
            self._closed = True
            _stop_queues(self._queues)
        for thread in self._threads:
            thread.join()

    def abandon(self) -> None:
        """The same: what is queued are copies of a few milliseconds."""
        self.close()

    def _join(self, direction: str) -> None:
        last = self._last.get(direction)
        if last is not None:
            last.join()

    def _submit(self, job: _Job) -> ThreadTicket:
        with self._lock:
            self._last[job.direction] = job.ticket
            if not self._closed:
                self._queue(job.direction).put(job)
                return job.ticket
        _run_job(job, self._spans, self._before_copy)
        return job.ticket

    def _queue(self, direction: str) -> queue.SimpleQueue[_Job | None]:
        if direction not in self._queues:
            jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            self._queues[direction] = jobs
            thread = threading.Thread(
                target=_serve, args=(jobs, self._spans, self._before_copy), name=f"activations-{direction}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return self._queues[direction]


def _stop_queues(queues: dict[str, queue.SimpleQueue[_Job | None]]) -> None:
    for jobs in queues.values():
        jobs.put(None)


def _serve(
    jobs: queue.SimpleQueue[_Job | None], spans: deque[Span], before_copy: Callable[[str, str], None] | None
) -> None:
    while (job := jobs.get()) is not None:
        _run_job(job, spans, before_copy)
        del job  # it holds device memory: not until the next one comes


def _run_job(job: _Job, spans: deque[Span], before_copy: Callable[[str, str], None] | None) -> None:
    start = time.perf_counter()
    try:
        if before_copy is not None:
            before_copy(job.direction, job.parcel.label)
        with torch.no_grad():
            copied = job.run()
    except BaseException as error:  # handed to whoever waits for this copy
        job.ticket.end(error)
        return
    if copied:
        spans.append(Span(job.direction, job.parcel.label, start, time.perf_counter(), job.parcel.host.numel()))
    job.ticket.end()
