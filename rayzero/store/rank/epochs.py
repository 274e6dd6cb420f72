"""Lets a rank's calls outlive the change of the owners that they were made to.

[Note: a call over two epochs] While owners change, whatever was asked of those of the last epoch fails, or is never
answered. Every such call can be made again, because owners and the lead execute a repeat once. So a call that has no
answer when its epoch ends is made again over the next epoch's connection, in the order in which calls were first made;
the caller notices nothing but time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, TypeVar

from rayzero.concurrency.futures import chain, fail, future_raises
from rayzero.errors import EpochOverError, RayZeroError

T = TypeVar("T")


class _Answer(Future[T]):
    """The answer to a call over several epochs. Like that of one call, it can be cancelled until something is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.made: Future[T] | None = None  # the call that is under way

    def cancel(self) -> bool:
        """See ``Gather``."""
        with self.lock:
            return (self.made is None or self.made.cancel()) and super().cancel()


class Epochs:
    """The calls of one rank's store, and the epoch over which they are made now.

    Knows calls and their order; not what they ask, or whom. Thread-safe."""

    def __init__(self, number: int = 0, *, change: bool = True) -> None:
        """``number``: of the present epoch. ``change``: owners may change; else a call is made once."""
        self._change = change
        self._lock = threading.Condition()
        self._number = number
        self._between = False  # the last epoch is over, and the next one has not begun
        self._waiting: dict[int, tuple[Callable[[], None], Future[Any]]] = {}  # by number of the call: it, its answer
        self._calls = count()
        self._making = 0  # calls that are being made now
        self._error: RayZeroError | None = None

    def make(self, call: Callable[[], Future[T]]) -> Future[T]:
        """Make a call, and again in each epoch until it is answered. See [Note: a call over two epochs]."""
        if not self._change:
            return call()
        number, answer = next(self._calls), _Answer[T]()
        if not self._begins(number, call, answer, after=None):
            return answer
        epoch, made = self._number, self._made(call)
        if made.done() and not made.cancelled() and made.exception() is None:  # the usual case of a read
            return made
        answer.made = made
        made.add_done_callback(partial(self._take, number, epoch, call, answer))
        return answer

    def _make(self, number: int, call: Callable[[], Future[T]], answer: _Answer[T]) -> None:
        """Make a call that ``_begins`` has let through."""
        with answer.lock:
            if answer.cancelled():
                self._end_making()
                return
            epoch, made = self._number, self._made(call)
            answer.made = made
        made.add_done_callback(partial(self._take, number, epoch, call, answer))

    def _made(self, call: Callable[[], Future[T]]) -> Future[T]:
        try:
            return future_raises(call)()
        finally:
            self._end_making()

    def _end_making(self) -> None:
        with self._lock:
            self._making -= 1
            self._lock.notify_all()

    def _take(
        self, number: int, epoch: int, call: Callable[[], Future[T]], answer: _Answer[T], made: Future[T]
    ) -> None:
        """A call has ended: pass its result on, or make it again if its epoch is over."""
        if made.cancelled() or answer.done():  # the caller has given up
            return
        error = made.exception()
        if error is None or not (isinstance(error, EpochOverError) or self.is_over(epoch)):
            chain(made, answer)
        elif self._begins(number, call, answer, after=epoch):
            self._make(number, call, answer)

    def is_over(self, epoch: int) -> bool:
        """Whether calls of ``epoch`` are to be made again in a later one."""
        with self._lock:
            return self._error is None and (self._between or epoch < self._number)

    def _begins(self, number: int, call: Callable[[], Future[T]], answer: _Answer[T], after: int | None) -> bool:
        """Whether a call can be made now; else it waits until the epoch behind ``after`` (None: the present one) has
        begun, or fails."""
        with self._lock:
            begins, error = not self._between and (after is None or after < self._number), self._error
            if error is None and begins:
                self._making += 1
            elif error is None:
                self._waiting[number] = partial(self._make, number, call, answer), answer
        if error is not None:
            fail(answer, error)
        return begins and error is None

    @property
    def number(self) -> int:
        """Of the present epoch."""
        return self._number

    def wait(self, after: int, timeout_s: float) -> None:
        """Block until the epoch behind ``after`` has begun, or ``timeout_s`` is over. Raises the error after which none
        begins."""
        with self._lock:
            self._lock.wait_for(lambda: self._number > after or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error

    def over(self) -> None:
        """The present epoch is over: calls wait for ``begin``."""
        with self._lock:
            self._between = True

    def drain(self) -> None:
        """Block until no call is being made any more, after ``over``, and after whatever would hold one up has ended:
        one that was let through before would else find its way to the next owners before these expect any."""
        with self._lock:
            self._lock.wait_for(lambda: not self._making)

    def begin(self, number: int) -> None:
        """The next epoch has begun: make the calls that wait, in their order."""
        with self._lock:
            self._number, self._between = number, False
            waiting, self._waiting = self._waiting, {}
            self._making += len(waiting)
            self._lock.notify_all()
        for _, (make, _) in sorted(waiting.items()):
            make()

    def fail(self, error: RayZeroError) -> None:
        """No other epoch begins: calls that wait for one, now or later, fail with ``error``."""
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, {}
            self._lock.notify_all()
        for _, answer in waiting.values():
            fail(answer, self._error)
