"""Ctrl-C and SIGTERM during a run: one exception out of the waiting code, then quiet while the run is taken down.

[Note: Ray's exit code] Where a signal comes while Ray waits (``ray.get``, ``ray.wait``), its handler raises within Ray,
and Ray raises a SystemExit of its own instead, with code 1 and without the first as its cause. So a block remembers
which signal it has raised for, and leaves with that signal's exception.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["interruptible", "postponed", "shielded"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_S = 0.5  # timeout(1) tells a process and then its whole group, itself again among it: one stop, two signals


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143) in the main thread; elsewhere, no effect. One
    that comes together with another is the same stop: it would end what the first began."""
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
    """The first signal waits for the end of the block and raises there, as in ``interruptible``; a second, unless it
    came together with the first, comes at once, should what the block calls hang. An exception out of the block takes
    the signal's place."""
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
def shielded() -> Iterator[None]:
    """SIGINT and SIGTERM are ignored: for clean-up of bounded length, which must not be left half done."""
    with _handlers(dict.fromkeys(_SIGNALS, signal.SIG_IGN)):
        yield


def _is_new(told: list[float]) -> bool:
    """Whether a signal that comes now is another stop than the last of ``told``; notes it."""
    is_new = not told or time.monotonic() - told[-1] >= _SAME_S
    told += [time.monotonic()] if is_new else []
    return is_new


@contextmanager
def _as_raised(raised: Sequence[int]) -> Iterator[None]:
    """A block that a signal ends leaves with the exception of the last signal in ``raised``; see [Note: Ray's exit
    code]. An exit without a signal stays as it is."""
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
