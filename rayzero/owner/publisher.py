"""Versions made known: reads that wait for one are answered, and whoever listens is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from torch import Tensor

from rayzero.concurrency.futures import fail
from rayzero.errors import RayZeroError
from rayzero.owner.publications import Listener, Publications, Published, Read, answer
from rayzero.owner.shard import OwnedShard
from rayzero.owner.updater import Task
from rayzero.protocol.messages import COMPUTE, MASTER


class Publisher:
    """One owner's versions as readers and listeners get them.

    Knows versions and who waits for them; not how one comes to be. ``announce`` and listeners run in the updater
    thread; the lock is the service's, and no future is settled under it."""

    def __init__(
        self, lock: threading.RLock, submit: Callable[[Task], None], read_state: Callable[[OwnedShard, str], Tensor]
    ) -> None:
        """``submit``: hands a task to the updater thread, where alone ``read_state(shard, kind)`` is called: it gives
        a copy of what an optimizer keeps for itself."""
        self._lock = lock
        self._submit = submit
        self._read_state = read_state
        self._waiting = Publications()
        self._listeners: list[Listener] = []
        self._error: RayZeroError | None = None
        self._last = -1  # after an error: the last version that still comes

    def read(self, owned: OwnedShard, version: int, kind: str) -> Future[Tensor]:
        """Done when ``version`` is there. Raises StoreError where it is gone, and the error after which it will not
        come."""
        future: Future[Tensor] = Future()
        with self._lock:
            if self._error is not None and version > max(self._last, owned.published):
                raise self._error
            ready = self._waiting.read(owned, version, kind, future)
        if ready:
            self._answer(owned, [(version, kind, future)])
        return future

    def _answer(self, owned: OwnedShard, reads: list[Read]) -> None:
        planned = {COMPUTE, MASTER, *owned.states}
        answer([read for read in reads if read[1] in planned], owned, OwnedShard.read)
        others = [read for read in reads if read[1] not in planned]
        if others:
            self._submit(lambda: answer(others, owned, self._read_state))

    def listen(self, listener: Listener, shards: list[OwnedShard]) -> None:
        """Tell ``listener`` what these have published, then of every announcement. In the updater thread."""
        present = [(owned.shard.index, owned.published, owned.content) for owned in shards if owned.published >= 0]
        if present:
            listener(present)
        self._listeners.append(listener)

    def announce(self, shards: list[OwnedShard]) -> None:
        """Answer the reads that wait for what these have published, and tell listeners. In the updater thread."""
        for owned in shards:
            with self._lock:
                reads = self._waiting.ready(owned)
            self._answer(owned, reads)
        published: Published = [(owned.shard.index, owned.published, owned.content) for owned in shards]
        for listener in self._listeners if published else ():
            listener(published)

    def fail(self, error: RayZeroError, last_version: int) -> None:
        """Versions after ``last_version`` never come: whoever waits for one, now or later, gets ``error``."""
        with self._lock:
            self._last = last_version if self._error is None else min(last_version, self._last)
            self._error = self._error or error
            reads = self._waiting.beyond(self._last)
        for read in reads:
            fail(read, error)
