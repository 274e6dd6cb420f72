"""The calls that an owner's server is handling for one prepared model."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rayzero.errors import StoreError, TransferError
from rayzero.store.wire.rpc import LinkNumber


class RunningCalls:
    """Ends calls that nobody waits for any more, and all of them when the server stops. Lives on the event loop.

    [Note: late calls] A caller whose link broke repeats its calls over a new one. What it sent over the old one may
    arrive after that, because a network delivers late what it had swallowed. That would not be harmless: a late Finish
    is of a step that is over, and the late bytes of a push would be written into a sum that has begun. So a call over a
    newer link ends those over older ones, and later arrivals are refused."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._tasks: dict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # by caller; "" without a number
        self._newest: dict[str, int] = {}  # caller -> number of its newest link
        self._stopped: StoreError | None = None

    @contextmanager
    def running(self, link: LinkNumber | None) -> Iterator[None]:
        """Wraps every call. Raises StoreError in it if the server stops, TransferError if the caller has opened a newer
        link than ``link``. None: a caller without numbers, whose calls are not ordered."""
        if link is not None:
            self._order(link)
        task = asyncio.current_task()
        assert task is not None
        caller = "" if link is None else link.caller
        self._tasks[caller].add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._stopped is not None:
                raise self._stopped from None
            if link is not None and self._is_late(link):
                raise self._late(link) from None
            raise  # the caller is gone
        finally:
            self._forget(caller, task)

    def _forget(self, caller: str, task: asyncio.Task[Any]) -> None:
        self._tasks[caller].discard(task)
        if not self._tasks[caller]:
            del self._tasks[caller]

    def _order(self, link: LinkNumber) -> None:
        if self._is_late(link):
            raise self._late(link)
        if link.number == self._newest.get(link.caller):
            return
        self._newest[link.caller] = link.number
        for task in self._tasks.get(link.caller, ()):
            task.cancel()

    def _is_late(self, link: LinkNumber) -> bool:
        return link.number < self._newest.get(link.caller, link.number)

    def _late(self, link: LinkNumber) -> TransferError:
        return TransferError(f"optimizer {self._owner}: {link.caller} has opened a newer link than that of this call")

    def end(self, error: StoreError) -> None:
        """The server stops, or its epoch is over: end every call with ``error``."""
        self._stopped = error
        for task in [task for tasks in self._tasks.values() for task in tasks]:
            task.cancel()
