"""Sends small transfers to one owner together: an RPC costs as much as moving hundreds of KiB."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from typing import Generic, Protocol, TypeVar

BATCH_BYTES = 8 << 20  # the most that travels together


class Part(Protocol):
    """A transfer that may travel with others."""

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        ...

    @property
    def kind(self) -> Hashable:
        """Parts of one kind may travel together."""
        ...


P = TypeVar("P", bound=Part)


class Batches(Generic[P]):
    """A queue of parts for one owner. When a thread is free, it takes all waiting parts that may travel together.

    So the first part of a burst goes at once, and the others go when a batch has ended: no part waits for a timer. An
    owner that hangs holds only the threads of its own batches, not those that other owners need. Knows sizes and kinds;
    not what a part is."""

    def __init__(self, pool: Executor, move: Callable[[list[P]], None], *, at_once: int = 1) -> None:
        """``move`` is called in ``pool`` with 1 or more parts of one kind; it must not raise. ``at_once``: the most
        batches under way."""
        self._pool, self._move, self._at_once = pool, move, at_once
        self._lock = threading.Lock()
        self._queue: deque[P] = deque()
        self._under_way = 0  # batches submitted or moving

    def add(self, part: P) -> None:
        """Queue ``part`` for the next batch. Raises RuntimeError if it needs a thread and the pool is shut down."""
        with self._lock:
            if self._under_way < self._at_once:
                self._pool.submit(self._run)
                self._under_way += 1
            self._queue.append(part)

    def _run(self) -> None:
        """Move one batch, then queue up behind other owners' batches."""
        while True:
            with self._lock:
                batch = self._take()
            if batch:  # else another thread took all
                self._move(batch)
            with self._lock:
                if not self._queue:
                    self._under_way -= 1
                    return
                try:
                    self._pool.submit(self._run)
                    return
                except RuntimeError:  # shut down: parts that were added before still go, in this thread
                    continue

    def _take(self) -> list[P]:
        batch: list[P] = []
        room = BATCH_BYTES
        while self._queue:
            part = self._queue[0]
            if batch and (part.kind != batch[0].kind or part.size > room):
                break
            batch.append(self._queue.popleft())
            room -= part.size
        return batch
