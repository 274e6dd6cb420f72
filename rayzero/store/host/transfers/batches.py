"""The threads that move the bytes of one caller. Small transfers to one owner go together: an RPC costs as much as
moving hundreds of KiB."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from rayzero.concurrency.threads import use_torch_threads

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


class TransferThreads:
    """The threads that move the bytes of one caller to and from all of its owners. So a push never queues behind
    fetches, or behind the pushes to an owner that hangs."""

    def __init__(self, num_owners: int, who: str, streams: int | None = None) -> None:
        """``who``: "rank 3". ``streams``: of each method, to one owner at once, at most; None: as many as there are
        threads for it."""
        threads, shared = _shared_out(num_owners)
        self.streams = shared if streams is None else streams
        self.closing = threading.Event()  # set when the caller closes: nothing is repeated any more
        self.fetches, self.pushes = (
            ThreadPoolExecutor(
                threads, f"rayzero-{who.replace(' ', '')}-{way}", initializer=use_torch_threads, initargs=(1,)
            )
            for way in ("fetch", "push")
        )  # freed by: close()

    def close(self) -> None:
        """End the threads, once the links are closed. Idempotent."""
        for pool in (self.fetches, self.pushes):
            pool.shutdown(wait=True)


def _shared_out(num_owners: int) -> tuple[int, int]:
    threads = min(8, max(2, num_owners))
    return threads, max(1, threads // num_owners)


def most_transfers(num_owners: int) -> int:
    """The most transfers between a rank and one owner at a time: fetches, and in other threads pushes, stages, and
    loads, after which come fetches of what the rank multiplies."""
    threads, streams = _shared_out(num_owners)
    return streams + min(threads, 3 * streams)
