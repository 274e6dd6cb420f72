"""One future for work that goes to several owners."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

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
