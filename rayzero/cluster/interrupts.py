"""Ctrl-C and SIGTERM during a run: raise one exception in the waiting code, then ignore signals while the run is taken
down.

[Note: Ray's exit code] If a signal comes while Ray waits (``ray.get``, ``ray.wait``), our handler raises inside Ray,
and Ray raises its own SystemExit instead, with code 1 and without ours as its cause. So a block remembers the signal
that it raised for, and ends with that signal's exception.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 0.5  # timeout(1) signals a process and then its whole group, so one stop brings two signals


@contextmanager
def interruptible() -> Iterator[None]:
    """A context in which SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143), in the main thread only. A
    second signal right after the first belongs to the same stop and is ignored: it would end the clean-up that the
    first began."""
    told: list[float] = []
    raised: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        if _is_new(told):
            raised.append(signum)
            _raise(signum)

    with _handlers(dict.fromkeys(_SIGNALS, stop)), _as_raised(raised):
        yield


@contextmanager
def postponed() -> Iterator[None]:
    """The first signal waits for the end of the block and raises there, as in ``interruptible``. A later second one
    raises at once, in case the block hangs. An exception from the block replaces the signal's."""
    came: list[int] = []
    told: list[float] = []
    raised: list[int] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        if _is_new(told):
            came.append(signum)
        if len(came) > 1:
            raised.append(signum)
            _raise(signum)

    with _handlers(dict.fromkeys(_SIGNALS, hold)), _as_raised(raised):
        yield
    if came:
        _raise(came[0])


@contextmanager
def delayed() -> Iterator[None]:
    """A signal that comes in the block does at its end what it would have done at once. If the block raises, the signal
    is dropped."""
    came: list[int] = []
    with _handlers(dict.fromkeys(_SIGNALS, lambda number, frame: came.append(number))):
        yield
    for number in came:
        signal.raise_signal(number)


@contextmanager
def shielded() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM inside the block: for short clean-up that must not stop halfway."""
    with _handlers(dict.fromkeys(_SIGNALS, signal.SIG_IGN)):
        yield


def _is_new(told: list[float]) -> bool:
    """Whether a signal that comes now is a new stop, not part of the last one in ``told``; notes it."""
    is_new = not told or time.monotonic() - told[-1] >= _SAME_S
    told += [time.monotonic()] if is_new else []
    return is_new


@contextmanager
def _as_raised(raised: Sequence[int]) -> Iterator[None]:
    """If a signal ends the block, raise the exception of the last signal in ``raised``; see [Note: Ray's exit code]. An
    exit without a signal is not changed."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if raised and _code(error) != 128 + raised[-1]:
            _raise(raised[-1])
        raise


def _code(error: KeyboardInterrupt | SystemExit) -> object:
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else error.code


def _raise(signum: int) -> NoReturn:
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


@contextmanager
def _handlers(handlers: dict[signal.Signals, object]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
