"""Settles futures that their holder may have cancelled meanwhile, and waits for several futures without a thread. One
future for work that goes to several owners. A lock whose holder settles futures once it has released it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from rayzero.errors import RayZeroError

T = TypeVar("T")
P = ParamSpec("P")


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


DONE = _done()  # for work that is over already; it cannot change any more, so one serves all (making one takes 2 us)


def settle(future: Future[T], value: T) -> None:
    """Give ``future`` its result, unless it is done or cancelled."""
    with suppress(InvalidStateError):
        future.set_result(value)


def fail(future: Future[T], error: BaseException) -> None:
    """Give ``future`` its error, unless it is done or cancelled."""
    with suppress(InvalidStateError):
        future.set_exception(error)


def settled(value: T) -> Future[T]:
    """A new future that already has its result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> Future[T]:
    """A new future that has already failed."""
    future: Future[T] = Future()
    future.set_exception(error)
    return future


def future_raises(call: Callable[P, Future[T]]) -> Callable[P, Future[T]]:
    """A call whose future has what it raises, too: a RayZeroError."""

    @wraps(call)
    def made(*args: P.args, **named: P.kwargs) -> Future[T]:
        try:
            return call(*args, **named)
        except RayZeroError as error:
            return failed(error)

    return made


def is_well(future: Future[Any]) -> bool:
    """Whether ``future`` is done and neither failed nor cancelled."""
    return future.done() and not future.cancelled() and future.exception() is None


def when_all(
    futures: Sequence[Future[Any]], then: Callable[[list[Any]], None], otherwise: Callable[[BaseException], None]
) -> None:
    """Call ``then`` once with all results when all are there, or ``otherwise`` once with the first error."""
    left = _Countdown(len(futures))

    def one_done(future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            if left.cancel():
                otherwise(error)
        elif left.step():
            then([each.result() for each in futures])

    if not futures:
        then([])
    for future in futures:
        future.add_done_callback(one_done)


def when_ended(
    futures: Sequence[Future[Any]], then: Callable[[list[Any]], None], otherwise: Callable[[BaseException], None]
) -> None:
    """Like ``when_all``, but nothing is called before all ``futures`` are done. If several have failed, ``otherwise``
    gets the error of the first in the sequence."""
    left = _Countdown(len(futures))

    def one_done(_: Future[Any]) -> None:
        if not left.step():
            return
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            otherwise(errors[0])
        else:
            then([future.result() for future in futures])

    if not futures:
        then([])
    for future in futures:
        future.add_done_callback(one_done)


class _Countdown:
    """Counts down to one event, which can be called off. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._lock, self._left = threading.Lock(), count

    def step(self) -> bool:
        """Count one down. True for the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def cancel(self) -> bool:
        """Call the event off. True for the first call, if the event has not happened."""
        with self._lock:
            first = self._left > 0
            self._left = -1
            return first


def chain(source: Future[T], target: Future[T]) -> None:
    """Give ``target`` the result or error of ``source``."""

    def pass_on(done: Future[T]) -> None:
        error = done.exception()
        if error is None:
            settle(target, done.result())
        else:
            fail(target, error)

    source.add_done_callback(pass_on)


def then(source: Future[T], pack: Callable[[T], Any]) -> Future[Any]:
    """A future of ``pack(result of source)``. It fails with the error of ``source``, or with that of ``pack``."""
    target: Future[Any] = Future()

    def pass_on(done: Future[T]) -> None:
        error = done.exception()
        if error is not None:
            fail(target, error)
            return
        try:
            settle(target, pack(done.result()))
        except Exception as exc:  # the waiting thread raises it
            fail(target, exc)

    source.add_done_callback(pass_on)
    return target


class DeferringLock:
    """A lock, and the calls that its holder defers until it has released the lock.

    Knows their order; not what they do. They run in the thread that releases the lock, and may take it themselves."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calls: deque[Callable[[], Any]] = deque()  # to be made once the lock is free, in order

    def defer(self, call: Callable[..., Any], *args: Any) -> None:
        """Make this call once the lock is free. The caller must hold the lock."""
        self._calls.append(partial(call, *args))

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        calls = list(self._calls)
        self._calls.clear()
        self._lock.release()
        for call in calls:
            call()


Part = Callable[[], None]


class Gather:
    """Completes ``future`` when all parts have ended, with the first error if one failed.

    Knows how many parts are left; not what they do. The future completes only after all parts have ended, so nothing
    writes to the caller's memory afterwards. The future can be cancelled until the first part starts."""

    def __init__(self, parts: int, done: Callable[[], None] | None = None) -> None:
        """``parts``: their number. ``done``: called once, before the future completes, if every part succeeded."""
        self.future: Future[None] = Future()
        self._lock = threading.Lock()
        self._left = parts
        self._started: bool | None = None  # False: it was cancelled before the first part
        self._error: BaseException | None = None
        self._done = done
        if parts == 0:
            self._started = True
            self._complete()

    def run(self, part: Part) -> None:
        """Run one part in this thread unless the future was cancelled. Its error goes to the future."""
        if not self.start():
            return
        try:
            part()
        except Exception as error:  # the future raises it
            self.end(error)
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """One part has ended; ``error`` if it failed."""
        if not self.start():
            return
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._complete()

    def start(self) -> bool:
        """Call this before a part touches the caller's memory. False if the future was cancelled. Idempotent."""
        with self._lock:
            if self._started is None:
                self._started = self.future.set_running_or_notify_cancel()
            return self._started

    def _complete(self) -> None:
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        if self._done is not None:
            self._done()
        self.future.set_result(None)
