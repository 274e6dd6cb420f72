"""Ends waits whose peer makes no progress, with an error that names who waits for what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any, TypeVar

from rayzero.concurrency.futures import fail, future_raises
from rayzero.errors import StallError, StoreError

T = TypeVar("T")

Describe = Callable[[float], Future[str]]  # seconds the peer has for an answer -> what it says it is doing

_POLL_S = 5.0  # the longest time between two checks of the waits
_ANSWER_S = (1.0, 5.0)  # a peer has a quarter of the timeout to answer, within these bounds


@dataclass(eq=False)
class _PeerWait:
    """A future that a peer has to settle."""

    future: Future[Any]
    what: str  # "layers.7 v42 from optimizer 2"
    describe: Describe
    moved: Callable[[], object]  # what this process sees of the progress
    began: float
    since: float  # when it began, or when the peer last made progress
    at: object = None  # the latest value of ``moved``
    said: str | None = None  # the peer's latest answer
    silence: str | None = None  # why there was no answer the last time

    def take(self, answer: Future[str], now: float) -> None:
        """Note what the peer says. [Note: silence] Only news counts as progress: a peer that does not answer makes
        none, even if the reason for its silence changes."""
        error = answer.exception() if answer.done() else TimeoutError("it does not answer")
        self.silence = None if error is None else str(error)
        known = self.moved(), answer.result() if error is None else self.said
        if known != (self.at, self.said):
            self.at, self.said = known
            self.since = now

    def account(self) -> str:
        """What is known of the peer, as part of a message."""
        if self.silence is None:
            return str(self.said)
        return self.silence if self.said is None else f"{self.silence}; its last answer: {self.said}"


class StallWatch:
    """Fails futures whose peer makes no progress for ``stall_timeout`` seconds; from 3 s on, within 1.5 times that.

    Progress is a change in what the peer says it is doing, or in what this process sees arrive. Knows futures and
    clocks; not stores. One thread, started with the first wait."""

    def __init__(
        self,
        who: str,
        stall_timeout: float,
        *,
        poll_s: float | None = 0.0,
    ) -> None:
        """``who``: waits, for messages ("rank 3"). ``stall_timeout``: seconds. ``poll_s``: seconds between two checks,
        and how old a wait is before its peer is asked; 0: an eighth of the timeout, at most 5; None: without a thread,
        the caller calls ``check_all``, which asks about every wait."""
        self._who = who
        self._timeout = stall_timeout
        self._poll_s = min(stall_timeout / 8, _POLL_S) if poll_s == 0.0 else poll_s
        least, most = _ANSWER_S
        self._answer_s = min(max(stall_timeout / 4, least), most)
        self._waits: dict[int, _PeerWait] = {}  # pending, by number, oldest first
        self._numbers = count()
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: StoreError | None = None  # fails waits that begin after close()

    def watch(
        self, future: Future[T], what: str, describe: Describe, moved: Callable[[], object] = lambda: None
    ) -> Future[T]:
        """Fail ``future`` with StallError when it stalls; returns it.

        ``describe`` is called from the watch's thread, now and then while the wait lasts: it must not block, and its
        future must end within the seconds it is given. ``moved`` returns a value that changes as this process sees
        progress, such as the number of messages received."""
        if future.done():
            return future
        now = monotonic()
        wait = _PeerWait(future, what, describe, moved, began=now, since=now, at=moved())
        number = next(self._numbers)
        with self._changed:
            error = self._error
            if not self._closed:
                self._waits[number] = wait
                if self._thread is None and self._poll_s is not None:
                    self._thread = threading.Thread(target=self._run, name=f"stall-watch-{self._who}", daemon=True)
                    self._thread.start()
        if error is not None:
            fail(future, error)
        future.add_done_callback(lambda _: self._forget(number))  # no reference cycle: an ended wait is freed
        return future

    def close(self, error: StoreError | None = None) -> None:
        """Stop watching. With ``error``, pending waits and later ones fail with it. Idempotent."""
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
        """How many waits are watched now."""
        with self._changed:
            return len(self._waits)

    def check_all(self) -> None:
        """Check every wait that is old enough, once. All peers are asked at once, with one deadline, so a check takes
        as long as the slowest answer, however many waits there are or begin meanwhile."""
        now = monotonic()
        with self._changed:
            due = [wait for wait in self._waits.values() if now - wait.began >= (self._poll_s or 0.0)]
        answers = [future_raises(wait.describe)(self._answer_s) for wait in due]
        futures.wait(answers, self._answer_s + 1.0)  # answers end by themselves; one second more is for a busy machine
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

    def _check(self, wait: _PeerWait, answer: Future[str]) -> None:
        """Fail the wait when nothing has changed for too long."""
        if wait.future.done():
            return
        now = monotonic()
        wait.take(answer, now)
        if now - wait.since >= self._timeout:
            waited = f"{now - wait.began:.3g} s"
            fail(wait.future, StallError(f"{self._who} waits {waited} for {wait.what}: {wait.account()}"))

    def _forget(self, number: int) -> None:
        with self._changed:
            self._waits.pop(number, None)
