"""Keeps each unit's pushes to an owner in sequence."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from rayzero.concurrency.futures import DONE, fail, failed, settle
from rayzero.protocol.messages import Contribution

Try = tuple[int, int]  # (step, attempt)


@dataclass
class _Queue:
    """The pushes of one unit to one owner."""

    current: Try = (-1, 0)
    next_seq: int = 0
    parked: dict[int, Future[None]] = field(default_factory=dict)  # seq -> its turn
    error: Exception | None = None  # why the push whose turn it was has failed


class PushOrder:
    """Gives pushes their turn: push ``seq`` of a unit starts when ``seq - 1`` has landed.

    An owner adds a rank's pushes in that order. A later push that was sent early would wait at the owner and hold one
    of the rank's few sending threads, perhaps the one that the earlier push needs. Knows headers; not bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], _Queue] = {}  # (owner, unit)

    def turn(self, owner: int, push: Contribution) -> Future[None]:
        """Done when ``push`` may be sent to ``owner``: at once for a repeat or a push of an older attempt. Fails if an
        earlier push of the same attempt has failed."""
        turn: Future[None] = DONE
        with self._lock:
            queue = self._queues.setdefault((owner, push.unit), _Queue())
            passed_over = self._enter(queue, (push.step, push.attempt))
            if _try(push) == queue.current and push.seq > queue.next_seq:
                turn = failed(queue.error) if queue.error is not None else queue.parked.setdefault(push.seq, Future())
        for other in passed_over:
            settle(other, None)
        return turn

    def go_on(self, owner: int, unit: int, new: Try, next_seq: int) -> None:
        """An owner of a later epoch has the pushes of ``new`` before ``next_seq``."""
        with self._lock:
            queue = self._queues.setdefault((owner, unit), _Queue())
            queue.current, queue.next_seq = new, next_seq

    def _enter(self, queue: _Queue, new: Try) -> list[Future[None]]:
        """Begin a newer step or attempt. Pushes parked for an older one may go: the owner drops them."""
        if new <= queue.current:
            return []
        parked = list(queue.parked.values())
        queue.current, queue.next_seq, queue.parked, queue.error = new, 0, {}, None
        return parked

    def end(self, owner: int, push: Contribution, error: Exception | None) -> None:
        """Note that a push has landed, so the next one has its turn; or that it has failed, so those behind it fail."""
        for turn in self._end(owner, push, error):
            if error is None:
                settle(turn, None)
            else:
                fail(turn, error)

    def fail(self, error: Exception) -> None:
        """End every wait for a turn with ``error``."""
        with self._lock:
            parked = [turn for queue in self._queues.values() for turn in queue.parked.values()]
            for queue in self._queues.values():
                queue.parked = {}
        for turn in parked:
            fail(turn, error)

    def _end(self, owner: int, push: Contribution, error: Exception | None) -> list[Future[None]]:
        with self._lock:
            queue = self._queues[owner, push.unit]
            if _try(push) != queue.current or push.seq != queue.next_seq:
                return []
            queue.error = error
            if error is not None:
                parked, queue.parked = list(queue.parked.values()), {}
                return parked
            queue.next_seq += 1
            turn = queue.parked.pop(queue.next_seq, None)
            return [] if turn is None else [turn]


def _try(push: Contribution) -> Try:
    return push.step, push.attempt
