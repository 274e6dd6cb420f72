"""A lock that defers calls until it is free, so that its holder calls no other code while it holds the lock."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any


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
