"""The one event loop of a process, on its own thread. grpc.aio only works with a single loop per process."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An asyncio loop that runs on its own thread until the interpreter exits.

    Knows how to start and stop it; not what runs on it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rayzero-grpc-loop", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the loop. Call this from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run ``work`` on the loop and wait for its result. Never call this on the loop. Raises what ``work`` raises,
        and TimeoutError after ``timeout_s`` seconds."""
        return self.submit(work).result(timeout_s)

    def stop(self) -> None:
        if self._thread.is_alive() and self.pid == os.getpid():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=5.0)


_lock = threading.Lock()
_shared: LoopThread | None = None


def shared_loop() -> LoopThread:
    """This process's loop. The first call starts it; so does the first call in a forked child, which has no such
    thread."""
    global _shared
    with _lock:
        if _shared is None or _shared.pid != os.getpid():
            _shared = LoopThread()
        return _shared
