"""A unit's pushes reach an owner one after the other, in their sequence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from rayzero.concurrency.futures import DONE, fail, failed, settle
from rayzero.protocol.messages import Contribution

Try = tuple[int, int]  # (step, attempt)


@dataclass
class _Lane:
    """The pushes of one unit to one owner."""

    current: Try = (-1, 0)
    next_seq: int = 0
    parked: dict[int, Future[None]] = field(default_factory=dict)  # seq -> its turn
    error: Exception | None = None  # of the push whose turn it was


class PushOrder:
    """Gives pushes their turn: push ``seq`` of a unit starts when ``seq - 1`` has landed.

    An owner adds a rank's pushes in that order and would keep a later one waiting, which would hold one of the
    rank's few sending threads, perhaps the one that the earlier push needs. Knows headers; not bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lanes: dict[tuple[int, int], _Lane] = {}  # (owner, unit)

    def turn(self, owner: int, push: Contribution) -> Future[None]:
        """Done when ``push`` may be sent to ``owner``; repeats and pushes of an older attempt may be at once. Failed
        where one before it in its attempt has failed."""
        turn: Future[None] = DONE
        with self._lock:
            lane = self._lanes.setdefault((owner, push.unit), _Lane())
            passed_over = self._enter(lane, (push.step, push.attempt))
            if _try(push) == lane.current and push.seq > lane.next_seq:
                turn = failed(lane.error) if lane.error is not None else lane.parked.setdefault(push.seq, Future())
        for other in passed_over:
            settle(other, None)
        return turn

    def _enter(self, lane: _Lane, new: Try) -> list[Future[None]]:
        """Begin a newer step or attempt; what was parked for an older one may go, the owner drops it."""
        if new <= lane.current:
            return []
        parked = list(lane.parked.values())
        lane.current, lane.next_seq, lane.parked, lane.error = new, 0, {}, None
        return parked

    @contextmanager
    def sending(self, owner: int, push: Contribution) -> Iterator[None]:
        """Around the sending of a push: ``end`` afterwards."""
        try:
            yield
        except Exception as error:
            self.end(owner, push, error)
            raise
        self.end(owner, push, None)

    def end(self, owner: int, push: Contribution, error: Exception | None) -> None:
        """A push has landed, and it is the next one's turn; or it failed, and so do those behind it."""
        for turn in self._end(owner, push, error):
            if error is None:
                settle(turn, None)
            else:
                fail(turn, error)

    def fail(self, error: Exception) -> None:
        """End every wait for a turn with ``error``."""
        with self._lock:
            parked = [turn for lane in self._lanes.values() for turn in lane.parked.values()]
            for lane in self._lanes.values():
                lane.parked = {}
        for turn in parked:
            fail(turn, error)

    def _end(self, owner: int, push: Contribution, error: Exception | None) -> list[Future[None]]:
        with self._lock:
            lane = self._lanes[owner, push.unit]
            if _try(push) != lane.current or push.seq != lane.next_seq:
                return []
            lane.error = error
            if error is not None:
                parked, lane.parked = list(lane.parked.values()), {}
                return parked
            lane.next_seq += 1
            turn = lane.parked.pop(lane.next_seq, None)
            return [] if turn is None else [turn]


def _try(push: Contribution) -> Try:
    return push.step, push.attempt
