"""The lane of a device without streams: one thread per direction."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from rayzero.concurrency.futures import DONE
from rayzero.lanes.lane import SPANS_KEPT, Direction, Event, Span

BeforeCopy = Callable[[str, str], None]


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

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        overlap: bool = True,
        before_copy: BeforeCopy | None = None,
    ) -> None:
        """``overlap=False``: copies run at once in the caller. ``before_copy(direction, label)``: called before each
        copy in its thread, for tests that delay or fail copies."""
        self.device = torch.device(device)
        self._before_copy = before_copy
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
        run = partial(self._run, future, direction, copy, after or (), label, nbytes)
        thread = self._threads.get(direction)
        if thread is None:
            run()
            return event
        try:
            thread.submit(run)
        except RuntimeError:  # another thread has closed the lane meanwhile, or the interpreter is ending
            run()
        return event

    def _run(
        self,
        future: Future[None],
        direction: Direction,
        copy: Callable[[], object],
        after: Sequence[Event],
        label: str,
        nbytes: int,
    ) -> None:
        try:
            for earlier in after:
                earlier.wait()
            began = time.perf_counter()
            if self._before_copy is not None:
                self._before_copy(direction, label)
            with torch.no_grad():
                copied = copy() is not False
        except BaseException as error:  # the waiting thread raises it
            future.set_exception(error)
            return
        if copied and nbytes:
            self._spans.append(Span(direction, label, began, time.perf_counter(), nbytes))
        future.set_result(None)

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
