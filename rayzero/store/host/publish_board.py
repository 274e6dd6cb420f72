"""Keeps the versions that a process has heard owners publish, and ends the waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rayzero.concurrency.futures import fail, settle
from rayzero.errors import RayZeroError
from rayzero.protocol.gradient_sum import has_pushed
from rayzero.protocol.messages import Published, Pushed


@dataclass(eq=False, slots=True)
class _PublishWait:
    """A wait until shards of one owner have a version."""

    owner: int
    missing: set[int]
    version: int
    published: Future[None]


class PublishBoard:
    """The versions that a rank, or a door, has heard of, and the waits they end. Any thread may call it.

    Knows versions and waits; not how notices arrive. Its futures complete in the thread that brings the notice,
    outside the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, Published] = {}  # by shard
        self._totals: dict[int, int] = {}  # by shard, the ``total_word`` of its total
        self._copied: frozenset[int] = frozenset()  # shards that are read in a copy of this host
        self._waits: set[_PublishWait] = set()
        self._released: dict[int, RayZeroError] = {}  # owners that are ending the run, and why
        self._error: RayZeroError | None = None

    def when(self, owner: int, shards: Sequence[int], version: int) -> Future[None]:
        """Done once all ``shards`` have ``version`` or a later one, or ``owner`` is released; fails after ``fail``."""
        wait = _PublishWait(owner, set(shards), version, Future())
        with self._lock:
            ready = self._arrived(wait) or owner in self._released
            error = None if ready else self._error
            if not ready and error is None:
                self._waits.add(wait)
        if error is not None:
            fail(wait.published, error)
        elif ready:
            settle(wait.published, None)
        return wait.published

    def content(self, shards: Sequence[int], version: int) -> int | None:
        """See ``Versions.content`` (store/rank/connection.py)."""
        with self._lock:
            there = [self._known[shard].content for shard in shards if self._has(shard, version)]
            return max(there, default=0) if len(there) == len(shards) else None

    def are_at(self, shards: Sequence[int], version: int) -> bool:
        """Whether all ``shards`` have exactly ``version``, as far as this rank has heard."""
        with self._lock:
            return all(shard in self._known and self._known[shard].version == version for shard in shards)

    def in_total(self, shard: int, pushed: Pushed) -> bool:
        """Whether what a rank has pushed is in a shard's total."""
        with self._lock:
            return has_pushed(self._totals.get(shard, 0), pushed)

    def copied(self, shards: Iterable[int]) -> None:
        """These shards are read in a copy of this host: what counts is not what their owners publish, or have, but what
        is in the copy (``arrived``)."""
        with self._lock:
            self._copied = frozenset(shards)
            self._known = {shard: known for shard, known in self._known.items() if shard not in self._copied}

    def publish(self, published: Iterable[Published]) -> None:
        """Note what owners have published, and end the waits for it."""
        self._note(published, copied=False)

    def arrived(self, published: Iterable[Published]) -> None:
        """Note which versions this host has copies of, and end the waits for them."""
        self._note(published, copied=True)

    def _note(self, published: Iterable[Published], *, copied: bool) -> None:
        with self._lock:
            for each in published:  # what comes over a new link, or from another rank, may be older than what is known
                self._totals[each.shard] = max(each.total, self._totals.get(each.shard, 0))
                if (each.shard in self._copied) is not copied:
                    continue
                known = self._known.get(each.shard)
                if known is None or (known.version, known.content) <= (each.version, each.content):
                    self._known[each.shard] = each
            ready = self._take(self._arrived)
        for wait in ready:
            settle(wait.published, None)

    def _arrived(self, wait: _PublishWait) -> bool:
        wait.missing = {shard for shard in wait.missing if not self._has(shard, wait.version)}
        return not wait.missing

    def _has(self, shard: int, version: int) -> bool:
        return shard in self._known and self._known[shard].version >= version

    def _take(self, wanted: Callable[[_PublishWait], bool]) -> list[_PublishWait]:
        taken = [wait for wait in self._waits if wanted(wait)]
        self._waits.difference_update(taken)
        return taken

    def release(self, owner: int, reason: RayZeroError) -> None:
        """``owner`` is ending the run: it still publishes what is decided, and nothing else. Every wait for it, now and
        later, ends, so that the caller asks the owner itself: it answers with bytes or with its error. ``reason``:
        the error to raise if it no longer answers."""
        with self._lock:
            self._released.setdefault(owner, reason)
            released = self._take(lambda wait: wait.owner == owner)
        for wait in released:
            settle(wait.published, None)

    def fail(self, error: RayZeroError) -> None:
        """End every wait, now and later, with ``error``; the first error wins."""
        with self._lock:
            error = self._error = self._error or error
            ended = self._take(lambda _: True)
        for wait in ended:
            fail(wait.published, error)

    def ended(self, owner: int) -> RayZeroError | None:
        """Why ``owner``, which does not answer, publishes no more; None while the run goes on."""
        with self._lock:
            return self._error or self._released.get(owner)
