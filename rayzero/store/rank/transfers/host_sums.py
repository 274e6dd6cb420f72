"""Sends the sums of a host's ranks to owners elsewhere: those of the units whose sender this rank is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rayzero.concurrency.futures import chain, fail
from rayzero.concurrency.threads import use_torch_threads
from rayzero.layout.model_layout import Shard
from rayzero.protocol.messages import Contribution
from rayzero.store.rank.memory.host_ranks import HostRanks, HostSum

_AT_ONCE = 2  # sums of this rank in memory; plan/tiers.py counts them
_COURTESY_S = 10.0  # how long a rank that leaves waits for what only saves the others work

T = TypeVar("T")


class HostSums:
    """Adds up and sends each unit as soon as its last rank has pushed it, one after the other.

    Knows which sums it has sent; not how ranks are seen, or how bytes travel. One unit is added at a time; at most two
    sums are in memory, so that a network that is slower than backward fills none. Pushes do not wait for it, and a
    step's norm does: owners give theirs once they have the sums."""

    def __init__(
        self,
        ranks: HostRanks,
        away: Callable[[int], Sequence[Shard]],
        send: Callable[[HostSum], Future[None]],
        name: str,
        stall_timeout: float,
    ) -> None:
        """``away``: the shards of a unit whose owners are elsewhere now. ``send``: to these owners; done when nothing
        reads the sum any more. ``stall_timeout``: seconds that ``leave`` may last."""
        self._stall_timeout = stall_timeout
        self._ranks, self._away, self._send = ranks, away, send
        self._lock = threading.Condition()
        self._error: BaseException | None = None  # the first one
        self._waiting: set[Future[Any]] = set()  # answers that fail with it
        self._due: dict[int, None] = {}  # units that may have a new sum, in the order in which that was noticed
        self._moving: set[int] = set()  # units whose sums are in memory
        self._sent: dict[int, Contribution] = {}  # by unit, the last one
        self._free: list[Tensor] = []  # memory of sums that have left, for the next ones
        self._leaving = False  # the thread of ``leave`` wants to know of all that is announced
        self._paused = False  # nothing more is added
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Something was announced, perhaps."""
        try:
            changed = self._ranks.news()
        except Exception as error:  # whatever it is, the rank's next finish raises it
            self._fail(error)
            return
        if changed or self._leaving:
            with self._lock:
                self._due |= dict.fromkeys(sorted(changed, reverse=True))  # as backward makes them
                self._lock.notify_all()

    def _work(self) -> None:
        use_torch_threads(1)
        while (unit := self._next()) is not None:
            try:
                self._bring(unit)
            except Exception as error:  # whatever it is, the rank's next finish raises it
                self._fail(error)
                self._over(unit)

    def _next(self) -> int | None:
        """The next unit to look at; None at the end."""
        with self._lock:
            while not self._closing:
                unit = next((unit for unit in self._due if unit not in self._moving), None)
                if unit is not None and len(self._moving) < _AT_ONCE and not self._paused:
                    del self._due[unit]
                    self._moving.add(unit)
                    return unit
                self._lock.wait()
        return None

    def _bring(self, unit: int) -> None:
        """Send a unit's sum, if there is one that was not sent."""
        shards = self._away(unit)
        if not shards:
            self._over(unit)
            return
        memory = (
            self._free.pop()
            if self._free
            else torch.empty(self._ranks.most_elements, dtype=torch.float32, device="cpu")
        )
        made = self._ranks.sum(unit, shards, after=self._sent.get(unit), memory=memory)
        if made is None:
            self._over(unit, memory)
            return
        self._sent[unit] = made.contribution
        self._send(made).add_done_callback(partial(self._ended, unit, memory))

    def _ended(self, unit: int, memory: Tensor, sending: Future[None]) -> None:
        error = CancelledError() if sending.cancelled() else sending.exception()
        if error is not None:
            self._fail(error)
        self._over(unit, memory if error is None else None)

    def _over(self, unit: int, memory: Tensor | None = None) -> None:
        """``memory``: that nothing reads any more."""
        with self._lock:
            if memory is not None:
                self._free.append(memory)
            self._moving.discard(unit)
            self._lock.notify_all()

    def guard(self, asked: Future[T]) -> Future[T]:
        """An answer for which owners need sums: it fails if one that this rank sends has failed, or does."""
        answered = Future[T]()
        with self._lock:
            error = self._error
            self._waiting.add(answered)
        if error is not None:
            fail(answered, error)
        chain(asked, answered)
        answered.add_done_callback(self._forget)
        return answered

    def _forget(self, answered: Future[Any]) -> None:
        with self._lock:
            self._waiting.discard(answered)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            waiting = list(self._waiting)
            self._lock.notify_all()
        for each in waiting:
            fail(each, error)

    def leave(self) -> None:
        """Let the other ranks send this one's sums. As long as owners have not answered its last finish, they may need
        some: then the last rank to leave sends them first; blocks."""
        with self._lock:
            needed = bool(self._waiting) and self._error is None
            self._leaving = self._paused = True
            if needed:
                self._lock.wait_for(self._is_handed_over, min(_COURTESY_S, self._stall_timeout))
        self._ranks.leave()
        if needed and self._ranks.is_last:
            self.look()
            with self._lock:
                self._paused = False
                self._lock.notify_all()
                self._lock.wait_for(self._is_sent, self._stall_timeout)

    def _is_sent(self) -> bool:
        return self._error is not None or not (self._due or self._moving)

    def _is_handed_over(self) -> bool:
        return self._error is not None or (not self._moving and (self._ranks.is_known or self._ranks.is_last))

    def close(self) -> None:
        """End the thread. Sums on their way end with their links. Idempotent."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()
