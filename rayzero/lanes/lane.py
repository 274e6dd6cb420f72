"""The protocol of a lane: one call issues a copy, another waits for it. How fast copies are, measured by itself. And
the lane of a device without streams: one thread per direction.

[Note: ways to wait] ``finished()`` asks and never blocks. ``wait()`` orders: what the caller computes next comes after
the copy. On CUDA the stream waits for that and not the thread; without streams, the thread has to block. ``join()``
blocks the thread until the bytes are there: for host memory that the CPU reads or reuses, and for device memory that
any stream may use next, because what is over needs no order.

[Note: who may free device memory] The device tensors of a copy are memory of the stream that was current when they were
allocated, and the allocator hands them out again behind that stream. Their owner may let go of one in three ways. It
can name the tensor in ``holds``: the allocator then keeps the memory until the copy has run. It can keep the tensor
until after ``wait()`` on that same stream: then reuse is in order without the allocator's help, as a CUDA graph needs
it. Or, if nobody waits for the copy there, it can call ``before_free()``.

[Note: several computing streams] A program may compute on several streams (``torch.cuda.stream()``), and autograd runs
a node's backward on the stream of its forward. So the stream that allocates and requests need not be the one that
reads. A reader of memory that may be another stream's calls ``used()``: freed by then or later, it is handed out
again only after what the reading stream has done. Where host memory is to be overwritten, or device memory filled
again, that comes after ``now(stream)`` of every stream that has used it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, Protocol

import torch
from torch import Tensor

from rayzero.concurrency.futures import DONE

Direction = Literal["out", "in"]  # device to host, host to device


SPANS_KEPT = 4096  # how many of the latest copies a lane remembers
AT_ONCE_S = 2e-5  # on a device: what two events without a wait between them are apart, with a margin


@dataclass(frozen=True, slots=True)
class Span:
    """One copy that has run. Times are in seconds of the lane's clock."""

    direction: Direction
    label: str
    start: float
    stop: float
    nbytes: int  # bytes of host memory that it read or wrote


class Event(Protocol):
    """The end of a copy, or a moment of the computation. See [Note: ways to wait]."""

    def finished(self) -> bool:
        """True once the copy has ended, even with an error. Never blocks."""
        ...

    def settle(self) -> BaseException | None:
        """Order the caller's following work after the copy. Returns the copy's error, if there is one."""
        ...

    def wait(self) -> None:
        """Order the caller's following work after the copy. Raises the copy's error, if there is one."""
        ...

    def join(self) -> BaseException | None:
        """Block until the copy has ended. Returns its error, if there is one."""
        ...

    def before_free(self, *memory: Tensor) -> None:
        """Make it safe for the caller to free ``memory`` (of any shape and dtype), which the copy uses on the device,
        whether the copy has run or not and whichever stream it was allocated on."""
        ...


class Lane(Protocol):
    """Runs copies between one device and host memory, in order per direction, beside the computation.

    Knows order and time; not what is copied, whose memory it is, or why."""

    device: torch.device

    def issue(
        self,
        direction: Direction,
        copy: Callable[[], object],
        *,
        after: Sequence[Event] | None = None,
        holds: Sequence[Tensor] = (),
        label: str = "",
        nbytes: int = 0,
    ) -> Event:
        """Start ``copy`` after the events in ``after``, or if that is None, after what the caller has computed so far.

        ``copy`` runs once, without recording gradients. With streams it runs in this call, which queues its work and
        raises its error; otherwise it runs on the lane's thread, and the event has its error. It returns False if it
        had nothing to copy. ``holds``: device tensors of the copy, of any shape and dtype, that nobody else will keep,
        see [Note: who may free device memory]. ``label``, ``nbytes``: what ``spans()`` reports about the copy. Without
        ``nbytes``, it reports nothing."""
        ...

    def now(self, stream: Hashable = None) -> Event:
        """An event at this point of the caller's work; inside ``copy``, of the copy's. ``stream``: of another stream's,
        one that ``stream()`` returned."""
        ...

    def stream(self) -> Hashable:
        """The stream that the caller computes on now; always the same value where there are no streams."""
        ...

    def used(self, memory: Tensor) -> None:
        """The caller's stream uses device memory (of any shape and dtype), which may be another stream's: see
        [Note: several computing streams]."""
        ...

    def seconds(self, start: Event, stop: Event) -> float | None:
        """The seconds between two events that ``now`` made; None while they are not known yet."""
        ...

    def spans(self) -> list[Span]:
        """The latest copies that were given ``nbytes`` and have ended without an error."""
        ...

    def settle(self, direction: Direction) -> None:
        """Order the caller's following work after every copy of a direction so far, failed ones included."""
        ...

    def drain(self, direction: Direction) -> None:
        """Block until every copy of a direction so far has ended, failed ones included."""
        ...

    def capturing(self) -> bool:
        """True while the current stream records a CUDA graph."""
        ...

    def close(self) -> None:
        """Finish the queued copies and end the lane's threads. Later copies on a thread lane run in the caller.
        Idempotent."""
        ...


class StreamUses:
    """The streams that use one piece of device memory, and the copy that filled it.

    Knows streams; not what the memory is for. See [Note: several computing streams] in lane.py."""

    def __init__(self, lane: Lane, memory: Tensor) -> None:
        """``memory``: of any shape and dtype."""
        self._lane, self._memory = lane, memory
        self._streams: set[Hashable] = set()  # all that have used it
        self._behind: set[Hashable] = set()  # those that come after the last copy
        self._filled: Event | None = None

    def filled(self, copied: Event) -> None:
        """A copy that ends with ``copied`` fills the memory. Nobody uses it while the copy is issued."""
        self._behind = set()
        self._filled = copied

    def use(self) -> None:
        """The caller's stream is about to compute with the memory: order it after the copy, unless it is."""
        stream = self._lane.stream()
        if stream in self._behind:
            return
        if self._filled is not None:
            self._filled.wait()
        self._lane.used(self._memory)
        self._streams.add(stream)
        self._behind.add(stream)

    def so_far(self) -> list[Event]:
        """What must be over before the memory may be written again: what every stream that uses it has been given so
        far, and the caller's."""
        return [self._lane.now(stream) for stream in self._streams | {self._lane.stream()}]


_BYTES = 64 << 20
_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Bytes per second of one copy at a time, in each direction."""

    to_device: float
    to_host: float


def measure_link(device: torch.device, nbytes: int = _BYTES) -> LinkSpeed:
    """Measure now: page-locked memory to and from a CUDA device; for the CPU, from host memory to host memory.

    The best of a few copies of ``nbytes`` each."""
    on_gpu = device.type == "cuda"
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu, device="cpu")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def into() -> object:
        return there.copy_(host, non_blocking=True)

    def out() -> object:
        return host.copy_(there, non_blocking=True)

    return LinkSpeed(to_device=nbytes / fastest(into, device), to_host=nbytes / fastest(out, device))


def fastest(act: Callable[[], object], device: torch.device, clock: Callable[[], float] = perf_counter) -> float:
    """Seconds of the fastest of a few calls, each with what it makes the device do."""
    seconds = []
    for _ in range(_ROUNDS + 1):  # the first warms up
        start = clock()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - start)
    return min(seconds[1:])


class ThreadEvent:
    """The end of a copy on a thread, or a moment that has passed. Thread-safe."""

    __slots__ = ("_future", "at")

    def __init__(self, future: Future[None], at: float = 0.0) -> None:
        self._future = future
        self.at = at  # of a moment: seconds of the performance counter

    def finished(self) -> bool:
        return self._future.done()

    def settle(self) -> BaseException | None:
        """See ``Event``: blocks."""
        return self._future.exception()

    def wait(self) -> None:
        """See ``Event``: blocks."""
        self._future.result()

    def join(self) -> BaseException | None:
        return self.settle()

    def before_free(self, *memory: Tensor) -> None:
        """See ``Event``: does nothing, because the copy's thread holds the memory itself."""


class ThreadLane:
    """Copies on two threads, which start with the first copies and end with the lane. See ``Lane``.

    A program may end without closing the lane: queued copies run first."""

    def __init__(self, device: torch.device | str = "cpu", *, overlap: bool = True) -> None:
        """``overlap=False``: copies run at once in the caller."""
        self.device = torch.device(device)
        self._threads: dict[Direction, Executor] = {}
        if overlap:
            self._threads = {"out": ThreadPoolExecutor(1, "rayzero-out"), "in": ThreadPoolExecutor(1, "rayzero-in")}
        self._spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._last: dict[Direction, ThreadEvent] = {}

    def issue(
        self,
        direction: Direction,
        copy: Callable[[], object],
        *,
        after: Sequence[Event] | None = None,
        holds: Sequence[Tensor] = (),
        label: str = "",
        nbytes: int = 0,
    ) -> Event:
        """See ``Lane``. ``copy`` holds its tensors until it has run."""
        future: Future[None] = Future()
        event = self._last[direction] = ThreadEvent(future)

        def run() -> None:
            try:
                for earlier in after or ():
                    earlier.wait()
                began = time.perf_counter()
                with torch.no_grad():
                    copied = copy() is not False
            except BaseException as error:  # the waiting thread raises it
                future.set_exception(error)
                return
            if copied and nbytes:
                self._spans.append(Span(direction, label, began, time.perf_counter(), nbytes))
            future.set_result(None)

        thread = self._threads.get(direction)
        if thread is None:
            run()
            return event
        try:
            thread.submit(run)
        except RuntimeError:  # another thread has closed the lane meanwhile, or the interpreter is ending
            run()
        return event

    def now(self, stream: Hashable = None) -> Event:
        """See ``Lane``: an event that has passed, because the caller's work so far is done."""
        return ThreadEvent(DONE, time.perf_counter())

    def stream(self) -> Hashable:
        return None

    def used(self, memory: Tensor) -> None:
        """See ``Lane``: does nothing. The computation holds the memory meanwhile."""

    def seconds(self, start: Event, stop: Event) -> float | None:
        assert isinstance(start, ThreadEvent)
        assert isinstance(stop, ThreadEvent)
        return stop.at - start.at

    def spans(self) -> list[Span]:
        """See ``Lane``. The clock is the performance counter."""
        return list(self._spans)

    def settle(self, direction: Direction) -> None:
        """See ``Lane``: blocks."""
        if direction in self._last:
            self._last[direction].settle()

    def drain(self, direction: Direction) -> None:
        self.settle(direction)

    def capturing(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        threads, self._threads = self._threads, {}
        for thread in threads.values():
            thread.shutdown(wait=True)
