"""Ctrl-C and SIGTERM during a run: one exception out of the waiting code, then quiet while the run is taken down."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["interruptible", "shielded"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt and SIGTERM raises SystemExit(143) in the main thread; elsewhere, no effect."""
    with _handlers({signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _exit_on_term}):
        yield


@contextmanager
def shielded() -> Iterator[None]:
    """SIGINT and SIGTERM are ignored: for clean-up of bounded length, which must not be left half done."""
    with _handlers(dict.fromkeys(_SIGNALS, signal.SIG_IGN)):
        yield


def _exit_on_term(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


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
