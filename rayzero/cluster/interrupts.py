"""Ctrl-C and SIGTERM during a run: raise one exception in the waiting code, then ignore signals while the run is taken
down.

[Note: Ray's exit code] If a signal comes while Ray waits (``ray.get``, ``ray.wait``), our handler raises inside Ray,
and Ray raises its own SystemExit instead, with code 1 and without ours as its cause. So a block remembers the signal
that it raised for, and ends with that signal's exception.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
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
    with _stops(0):
        yield


@contextmanager
def postponed() -> Iterator[None]:
    """The first signal waits for the end of the block and raises there, as in ``interruptible``. A later second one
    raises at once, in case the block hangs. An exception from the block replaces the signal's."""
    with _stops(1) as came:
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


@contextmanager
def _stops(waiting: int) -> Iterator[list[int]]:
    """Yields the signals that come in the block. Those after the first ``waiting`` raise there; one that comes right
    after another belongs to the same stop. If a signal ends the block, it is by the exception of the last one that
    raised; see [Note: Ray's exit code]. An exit without a signal is not changed."""
    came: list[int] = []
    last = -math.inf

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last >= _SAME_S:
            last = time.monotonic()
            came.append(signum)
            if len(came) > waiting:
                _raise(signum)

    with _handlers(dict.fromkeys(_SIGNALS, stop)):
        try:
            yield came
        except (KeyboardInterrupt, SystemExit) as error:
            if len(came) > waiting and _code(error) != 128 + came[-1]:
                _raise(came[-1])
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
