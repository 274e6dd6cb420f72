"""Settling futures that their holder may have cancelled meanwhile, and waiting for several without a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


DONE = _done()  # of what is over before anybody asks: it cannot change any more, so one serves all (making one is 2 us)


def settle(future: Future[T], value: T) -> None:
    """Give ``future`` its result, unless it is done or cancelled."""
    with suppress(InvalidStateError):
        future.set_result(value)


def fail(future: Future[T], error: BaseException) -> None:
    """Give ``future`` its error, unless it is done or cancelled."""
    with suppress(InvalidStateError):
        future.set_exception(error)


def settled(value: T) -> Future[T]:
    """A future that is done."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> Future[T]:
    """A future that has failed."""
    future: Future[T] = Future()
    future.set_exception(error)
    return future


def is_well(future: Future[Any]) -> bool:
    """Whether it is done, and neither failed nor cancelled."""
    return future.done() and not future.cancelled() and future.exception() is None


def when_all(
    futures: Sequence[Future[Any]], then: Callable[[list[Any]], None], otherwise: Callable[[BaseException], None]
) -> None:
    """Call ``then`` with all results once all are there, or ``otherwise`` with the first error, once."""
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
    """As ``when_all``, but nothing is called before each of ``futures`` is done; the first in order has its error."""
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
    """Counts down to one event, which may be called off, from any thread."""

    def __init__(self, count: int) -> None:
        self._lock, self._left = threading.Lock(), count

    def step(self) -> bool:
        """True for the last one."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def cancel(self) -> bool:
        """True for the first call before the end."""
        with self._lock:
            first = self._left > 0
            self._left = -1
            return first


def chain(source: Future[T], target: Future[T]) -> None:
    """Give ``target`` what ``source`` gets."""

    def pass_on(done: Future[T]) -> None:
        error = done.exception()
        if error is None:
            settle(target, done.result())
        else:
            fail(target, error)

    source.add_done_callback(pass_on)


def then(source: Future[T], pack: Callable[[T], Any]) -> Future[Any]:
    """A future of ``pack`` of what comes; an error of ``pack`` is its own."""
    target: Future[Any] = Future()

    def pass_on(done: Future[T]) -> None:
        error = done.exception()
        if error is not None:
            fail(target, error)
            return
        try:
            settle(target, pack(done.result()))
        except Exception as exc:  # whatever it is, who waits raises it
            fail(target, exc)

    source.add_done_callback(pass_on)
    return target
