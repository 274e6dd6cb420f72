"""Waits on a peer's progress: no deadline while something moves, an error that names who waits for what when not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rayzero.errors import StallError, StoreError
from rayzero.optimizer.futures import fail

T = TypeVar("T")


@dataclass(eq=False)
class _Wait:
    """A future that somebody else has to settle."""

    future: Future[Any]
    what: str  # "layers.7 v42 from optimizer 2"
    describe: Callable[[], str]
    since: float  # when it began, or when its description last changed
    began: float
    seen: str | None = None


class StallWatch:
    """Fails futures whose peer makes no progress for ``stall_timeout`` seconds.

    Progress is a change in what the peer says it is doing. Knows futures and clocks; not stores. One thread, started
    with the first wait."""

    def __init__(
        self,
        rank: int,
        stall_timeout: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        poll_s: float | None = 0.0,
    ) -> None:
        """``stall_timeout``: seconds; ``rank``: who waits, for messages. ``poll_s``: seconds between looks; 0: an
        eighth of the timeout, at most 5; None: no thread, somebody calls ``check_all``."""
        self._rank = rank
        self._timeout = stall_timeout
        self._clock = clock
        self._poll_s = min(stall_timeout / 8, 5.0) if poll_s == 0.0 else poll_s
        self._waits: list[_Wait] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: StoreError | None = None  # of waits that come after close()

    def watch(self, future: Future[T], what: str, describe: Callable[[], str]) -> Future[T]:
        """Fail ``future`` with StallError when it stalls; returns it. ``describe`` is called from the watch's
        thread, now and then while the wait lasts."""
        if future.done():
            return future
        now = self._clock()
        with self._changed:
            error = self._error
            if error is None:
                self._waits.append(_Wait(future, what, describe, now, now))
            if self._thread is None and not self._closed and self._poll_s is not None:
                self._thread = threading.Thread(target=self._run, name=f"stall-watch-{self._rank}", daemon=True)
                self._thread.start()
        if error is not None:
            fail(future, error)
        return future

    def close(self, error: StoreError | None = None) -> None:
        """Watch no more; with ``error``, what is still waited for fails with it. Idempotent."""
        with self._changed:
            self._closed, self._error = True, error
            waits, self._waits = self._waits, []
            self._changed.notify()
        if error is not None:
            for wait in waits:
                fail(wait.future, error)
        if self._thread is not None:
            self._thread.join()

    @property
    def num_waits(self) -> int:
        """Waits that are watched now."""
        with self._changed:
            return len(self._waits)

    def check_all(self) -> None:
        """Look at every wait once; drop those that ended."""
        with self._changed:
            waits = self._waits = [wait for wait in self._waits if not wait.future.done()]
        for wait in waits:
            self._check(wait)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._closed:
                    self._changed.wait(self._poll_s)
                if self._closed:
                    return
            self.check_all()

    def _check(self, wait: _Wait) -> None:
        """Fail the wait when nothing has changed for too long."""
        now = self._clock()
        doing = wait.describe()
        if doing != wait.seen:
            wait.seen, wait.since = doing, now
        elif now - wait.since >= self._timeout:
            waited = f"{now - wait.began:.3g} s"
            fail(wait.future, StallError(f"rank {self._rank} waits {waited} for {wait.what}: {doing}"))
