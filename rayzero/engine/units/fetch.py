"""A fetch in flight: what the store was asked for, when it arrived, and how long the rank waited for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rayzero.concurrency.futures import fail, settle
from rayzero.engine.units.residency import UnitBuffer
from rayzero.lanes import Event, Lane
from rayzero.telemetry.spans import Over, nothing


class Waited(NamedTuple):
    """Seconds that the host waited for a fetch, by cause."""

    optimizer: float  # the version was not published yet
    fetch: float  # its bytes were still being copied

    @property
    def total(self) -> float:
        """Both."""
        return self.optimizer + self.fetch


_NOTHING = Waited(0.0, 0.0)


class Request(Protocol):
    """What the store was asked for."""

    def cancel(self) -> bool:
        """Cancel the request; True if it will not write to the buffer any more."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class DeviceCopy:
    """A copy to a device that is issued."""

    event: Event  # its end
    moments: list[Event]  # its begin and its end, once the lane has come to it

    def seconds(self, lane: Lane) -> float | None:
        """How long the copy itself took; None while that is not known."""
        return lane.seconds(*self.moments) if len(self.moments) == 2 else None


@dataclass(eq=False, slots=True)
class Fetching:
    """A fetch in flight. Owns its buffer until somebody waits for it or drops it.

    Knows its futures; not units, or which bytes they are."""

    version: int
    published: Future[int]  # the version is published
    done: Future[Any]  # every byte is in the buffer, or its copy to the device is issued
    request: Request | None  # None: the buffer is the owners' memory, so nothing is requested
    buffer: UnitBuffer
    ahead: bool  # True: prefetched; False: requested when it was needed
    ready: Future[DeviceCopy | None] | None = None  # CUDA: ``done``, with the copy where there is one
    _asked: float = 0.0
    _published_at: float | None = None
    _done_at: float | None = None
    _arrived: Over = nothing

    def __post_init__(self) -> None:
        if self.request is not None:
            self._asked = time.perf_counter()
            self.published.add_done_callback(self._note_published)
        self.done.add_done_callback(self._note_done)

    def _note_published(self, _: Future[int]) -> None:
        self._published_at = time.perf_counter()

    def _note_done(self, _: Future[Any]) -> None:
        self._done_at = time.perf_counter()

    def follow(self, arrived: Over) -> None:
        """Call ``arrived`` once the bytes are there, before anyone who waits for them continues. It is often called
        twice."""
        self._arrived = arrived
        self.done.add_done_callback(lambda _: arrived())

    @property
    def seconds(self) -> float | None:
        """The host's seconds from when the bytes were both requested and published until they were there, or until
        their copy to the device was issued. None if no bytes had to be copied."""
        held = isinstance(self.request, ConditionalFetch) and not self.request.renewed
        if self.request is None or held or self._done_at is None:
            return None
        return max(0.0, self._done_at - max(self._asked, self._published_at or 0.0))

    @property
    def lead(self) -> float:
        """Seconds since it was done; 0 if it is not."""
        return 0.0 if self._done_at is None else time.perf_counter() - self._done_at

    def cancel(self) -> bool:
        """Cancel the fetch; True if neither host nor device will write to the buffer any more."""
        if self.request is None or self.request.cancel():
            return True
        if not self.done.done():
            return False
        self.join()
        return True

    def join(self) -> None:
        """Block until the device has stopped writing to the buffer. The fetch must be done."""
        if (copied := self.copied) is not None:
            copied.event.join()

    @property
    def on_device(self) -> bool:
        """Whether the bytes go on to a device."""
        return self.ready is not None

    @property
    def copied(self) -> DeviceCopy | None:
        """The copy to the device; None if there was none or the fetch failed. The fetch must be done."""
        return None if self.ready is None or self.ready.exception() is not None else self.ready.result()

    def wait(self) -> Waited:
        """Block until the bytes are there, on the device too if it has one."""
        waited = self._wait()
        self._arrived()
        if (copied := self.copied) is not None:
            copied.event.wait()
        return waited

    def _wait(self) -> Waited:
        if self.done.done():
            self.done.result()
            return _NOTHING
        start = time.perf_counter()
        wait_for([self.published, self.done], return_when=FIRST_COMPLETED)  # a fetch may fail before it is published
        published = time.perf_counter()
        if self.done is self.published:
            self.done.result()
            return Waited(published - start, 0.0)
        self.done.result()
        return Waited(published - start, time.perf_counter() - published)


class ConditionalFetch:
    """A fetch that is requested only once the owners have published different content.

    Knows the version held and the version published; not whose bytes they are. ``done`` ends as the fetch does, or at
    once if the bytes held are still right."""

    def __init__(self, published: Future[int], held: int, ask: Callable[[], Future[None]]) -> None:
        """``held``: the version that the bytes held are right for. ``ask`` requests the fetch; it is called at most
        once, on the thread that completes ``published``."""
        self.done: Future[None] = Future()
        self._held = held
        self._ask = ask
        self._lock = threading.Lock()
        self._cancelled = False
        self._fetch: Future[None] | None = None
        published.add_done_callback(self._begin)

    @property
    def renewed(self) -> bool:
        """Whether the fetch replaces, or will replace, the bytes held."""
        return self._fetch is not None

    def _begin(self, published: Future[int]) -> None:
        try:
            if published.result() <= self._held:
                settle(self.done, None)
                return
            with self._lock:
                if self._cancelled:
                    return
                self._fetch = self._ask()
        except Exception as exc:  # must not end the thread that completes ``published``; the rank's wait raises it
            fail(self.done, exc)
            return
        self._fetch.add_done_callback(self._follow)

    def _follow(self, fetch: Future[None]) -> None:
        error = CancelledError() if fetch.cancelled() else fetch.exception()
        if error is None:
            settle(self.done, None)
        else:
            fail(self.done, error)

    def cancel(self) -> bool:
        """Call it off; True when nothing will be written any more."""
        with self._lock:
            if self._fetch is not None:
                return self._fetch.cancel()
            self._cancelled = True
        self.done.cancel()
        return True
