"""Small transfers to one owner that travel together: an RPC costs as much as hundreds of KiB of bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from typing import Generic, Protocol, TypeVar

BATCH_BYTES = 8 << 20  # together at most


class Part(Protocol):
    """What travels."""

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
    """A queue of parts for one owner; whoever gets a thread takes all that wait and may go together.

    So the first part of a burst goes at once, the others go when a thread is free: no part waits for a timer. Knows
    sizes and kinds; not what a part is."""

    def __init__(self, pool: Executor, move: Callable[[list[P]], None]) -> None:
        """``move`` is called in ``pool`` with 1 or more parts of one kind; it must not raise."""
        self._pool, self._move = pool, move
        self._lock = threading.Lock()
        self._queue: deque[P] = deque()

    def add(self, part: P) -> None:
        """Let ``part`` go with the next batch. Raises ``RuntimeError`` when the pool is shut down."""
        with self._lock:
            self._queue.append(part)
        self._pool.submit(self._run)

    def _run(self) -> None:
        with self._lock:
            batch = self._take()
        if batch:  # else an earlier thread took it along
            self._move(batch)

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
