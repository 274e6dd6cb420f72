"""Waits on a peer's progress: no deadline while something moves, an error that names who waits for what when not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from rayzero.concurrency.futures import fail, failed
from rayzero.errors import RayZeroError, StallError, StoreError

T = TypeVar("T")

Describe = Callable[[float], Future[str]]  # seconds the peer has for an answer -> what it says it is doing

_POLL_S = 5.0  # at most this long between two looks at the waits
_ANSWER_S = (1.0, 5.0)  # a peer has a quarter of the timeout for an answer, within these bounds


@dataclass(eq=False)
class _Wait:
    """A future that somebody else has to settle."""

    future: Future[Any]
    what: str  # "layers.7 v42 from optimizer 2"
    describe: Describe
    moved: Callable[[], object]  # what this process sees of the progress
    began: float
    since: float  # when it began, or when what is known of it last changed
    at: object = None  # what was seen of the progress here
    said: str | None = None  # the peer's latest answer
    silence: str | None = None  # why there was no answer the last time

    def take(self, answer: Future[str], now: float) -> None:
        """Note what the peer says. [Note: silence] Only news are progress: a peer that does not answer stands still
        for us, however the reason that is given for its silence changes."""
        error = answer.exception() if answer.done() else TimeoutError("it gives no answer")
        self.silence = None if error is None else str(error)
        known = self.moved(), answer.result() if error is None else self.said
        if known != (self.at, self.said):
            self.at, self.said = known
            self.since = now

    def account(self) -> str:
        """What is known of it, for people."""
        if self.silence is None:
            return str(self.said)
        return self.silence if self.said is None else f"{self.silence}; its last answer: {self.said}"


class StallWatch:
    """Fails futures whose peer makes no progress for ``stall_timeout`` seconds, at most half as late again.

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
        """``stall_timeout``: seconds; ``rank``: who waits, for messages. ``poll_s``: seconds between looks, and how
        long a wait lasts before its peer is asked; 0: an eighth of the timeout, at most 5; None: no thread, somebody
        calls ``check_all``, which asks about every wait."""
        self._rank = rank
        self._timeout = stall_timeout
        self._clock = clock
        self._poll_s = min(stall_timeout / 8, _POLL_S) if poll_s == 0.0 else poll_s
        least, most = _ANSWER_S
        self._answer_s = min(max(stall_timeout / 4, least), most)
        self._waits: dict[int, _Wait] = {}  # that have not ended, by number, oldest first
        self._numbers = count()
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: StoreError | None = None  # of waits that come after close()

    def watch(
        self, future: Future[T], what: str, describe: Describe, moved: Callable[[], object] = lambda: None
    ) -> Future[T]:
        """Fail ``future`` with StallError when it stalls; returns it.

        ``describe`` is called from the watch's thread, now and then while the wait lasts: it must not block, and its
        future must end within the seconds it is given. ``moved``: a value that changes as this process sees progress,
        such as the number of bytes that have come."""
        if future.done():
            return future
        now = self._clock()
        wait = _Wait(future, what, describe, moved, began=now, since=now, at=moved())
        number = next(self._numbers)
        with self._changed:
            error = self._error
            if not self._closed:
                self._waits[number] = wait
                if self._thread is None and self._poll_s is not None:
                    self._thread = threading.Thread(target=self._run, name=f"stall-watch-{self._rank}", daemon=True)
                    self._thread.start()
        if error is not None:
            fail(future, error)
        future.add_done_callback(lambda _: self._forget(number))  # no cycle: what ends is freed
        return future

    def close(self, error: StoreError | None = None) -> None:
        """Watch no more; with ``error``, what is still waited for fails with it. Idempotent."""
        with self._changed:
            self._closed, self._error = True, error
            waits = list(self._waits.values())
            self._waits.clear()
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
        """Look once at every wait that is old enough. All peers are asked at once, and one deadline is theirs: a pass
        is as long as the slowest answer, however many wait and however many waits begin meanwhile."""
        now = self._clock()
        with self._changed:
            due = [wait for wait in self._waits.values() if now - wait.began >= (self._poll_s or 0.0)]
        answers = [_asked(wait, self._answer_s) for wait in due]
        futures.wait(answers, self._answer_s + 1.0)  # they end by themselves: the second is for a busy machine
        for wait, answer in zip(due, answers, strict=True):
            self._check(wait, answer)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._closed:
                    self._changed.wait(self._poll_s)
                if self._closed:
                    return
            self.check_all()

    def _check(self, wait: _Wait, answer: Future[str]) -> None:
        """Fail the wait when nothing has changed for too long."""
        if wait.future.done():
            return
        now = self._clock()
        wait.take(answer, now)
        if now - wait.since >= self._timeout:
            waited = f"{now - wait.began:.3g} s"
            fail(wait.future, StallError(f"rank {self._rank} waits {waited} for {wait.what}: {wait.account()}"))

    def _forget(self, number: int) -> None:
        with self._changed:
            self._waits.pop(number, None)


def _asked(wait: _Wait, answer_s: float) -> Future[str]:
    """The peer's answer to come; failed where it cannot even be asked."""
    try:
        return wait.describe(answer_s)
    except RayZeroError as error:
        return failed(error)
