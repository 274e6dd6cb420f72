"""Ctrl-C and SIGTERM during a run: one exception out of the waiting code, then quiet while the run is taken down."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["interruptible", "postponed", "shielded"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143) in the main thread; elsewhere, no effect."""
    with _handlers(dict.fromkeys(_SIGNALS, _raise)):
        yield


@contextmanager
def postponed() -> Iterator[None]:
    """Inside ``interruptible``: the first signal waits for the end of the block; a second comes at once, should what
    the block calls hang. An exception out of the block takes the signal's place."""
    came: list[int] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        if len(came) > 1:
            _raise(signum, frame)

    with _handlers(dict.fromkeys(_SIGNALS, hold)):
        yield
    if came:
        _raise(came[0], None)


@contextmanager
def shielded() -> Iterator[None]:
    """SIGINT and SIGTERM are ignored: for clean-up of bounded length, which must not be left half done."""
    with _handlers(dict.fromkeys(_SIGNALS, signal.SIG_IGN)):
        yield


def _raise(signum: int, frame: FrameType | None) -> NoReturn:
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
