"""Publishes versions of an owner's shards: answers reads of the present one, queues reads of the next, and notifies
listeners."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from torch import Tensor

from rayzero.concurrency.futures import fail, settle, settled
from rayzero.errors import StoreError
from rayzero.owner.rules import UpdateRule
from rayzero.owner.shard import OwnedShard, ShardState, Updater
from rayzero.protocol.messages import COMPUTE, MASTER, STEP, STORED, Published

Listener = Callable[[Sequence[Published]], None]
_Read = tuple[int, str, "Future[Tensor]"]  # version, kind, the reader's future

_READABLE = (ShardState.PUBLISHED, ShardState.DECIDED)
_TRIES = 2  # at a copy beside the updates


class PublishedCopy(NamedTuple):
    """What a shard had published at one moment."""

    version: int
    content: tuple[int, int]  # the version at which it last changed; writes of the user's: ``OwnedShard.writes``
    values: (
        Tensor | None
    )  # 1D, the shard's elements in the unit's dtype; of a coded unit its record, uint8; None: known


class Publisher:
    """The only writer of a shard's state; notifies listeners of each published version.

    Knows versions and the reads that wait for them; not how a version is made. Thread-safe: settles no future and calls
    no listener under its lock. Listeners are called in the updater's thread."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._rule: UpdateRule | None = None  # after ``open``
        self._lock = threading.Lock()
        self._loading: set[int] = set()  # shards whose first values are being copied
        self._waiting: dict[int, list[_Read]] = {}  # by shard
        self._unfilled: list[tuple[Sequence[OwnedShard], Future[None]]] = []  # waits for first values
        self._listeners: list[Listener] = []
        self._error: StoreError | None = None
        self._last = -1  # after an error: the last version that will still be published

    def open(self, rule: UpdateRule) -> None:
        """The owner has its shards. ``rule``: asked, in the updater's thread, for states that it keeps itself."""
        self._rule = rule

    # ---- the life of a shard

    def begin_load(self, owned: OwnedShard) -> bool:
        """Whether the caller may copy first values into a shard: only the first caller may."""
        with self._lock:
            begins = owned.state is ShardState.EMPTY and owned.shard.index not in self._loading
            self._loading.add(owned.shard.index)
        return begins

    def loaded(self, shards: Sequence[OwnedShard], version: int) -> None:
        """Shards have their first values, of ``version``."""
        with self._lock:
            for owned in shards:
                owned.published = owned.content = version
                owned.keep_slices()
                owned.move(ShardState.PUBLISHED)
            filled = [future for awaited, future in self._unfilled if _are_filled(awaited)]
            self._unfilled = [(awaited, future) for awaited, future in self._unfilled if not _are_filled(awaited)]
        self._updater.submit(lambda: self._announce(shards))
        for future in filled:
            settle(future, None)

    def filled(self, shards: Sequence[OwnedShard]) -> Future[None]:
        """Done once these shards have their first values. Fails with the error after which they will never have
        them."""
        future: Future[None] = Future()
        with self._lock:
            filled, error = _are_filled(shards), self._error
            if not filled and error is None:
                self._unfilled.append((shards, future))
        if filled:
            settle(future, None)
        elif error is not None:
            fail(future, error)
        return future

    def taken_over(self, shards: Sequence[OwnedShard]) -> None:
        """A former life of this owner published what these shards have."""
        with self._lock:
            for owned in shards:
                owned.move(ShardState.PUBLISHED)
        self._updater.submit(lambda: self._announce(shards))

    def decided(self, shards: Iterable[OwnedShard], version: int) -> None:
        """A decision that will make ``version`` was accepted."""
        with self._lock:
            for owned in shards:
                owned.pending += 1
                if owned.journal is not None:
                    owned.journal.decided(version)
                if owned.state is ShardState.PUBLISHED:
                    owned.move(ShardState.DECIDED)

    def updating(self, owned: OwnedShard) -> None:
        """An update begins to overwrite a shard's tiles."""
        with self._lock:
            owned.move(ShardState.UPDATING)

    def publish(self, shards: Sequence[OwnedShard], version: int) -> None:
        """Publish ``version`` of shards, whether or not their content changed. Called in the updater's thread."""
        with self._lock:
            for owned in shards:
                if owned.state is ShardState.UPDATING or owned.newest == version:
                    owned.content = version
                owned.pending -= 1
                owned.published = version
                owned.move(ShardState.PUBLISHED)
                if owned.pending:
                    owned.move(ShardState.DECIDED)
        self._announce(shards)

    # ---- readers

    def read(self, owned: OwnedShard, version: int, kind: str) -> Future[Tensor]:
        """A future of the shard's memory of ``kind``, done when ``version`` is published. Raises StoreError if that
        version is gone, or the error after which it will never be published."""
        future: Future[Tensor] = Future()
        with self._lock:
            if self._error is not None and version > max(self._last, owned.published):
                raise self._error
            ready = _is_readable(owned, version)
            if not ready and owned.published >= version:
                raise StoreError(
                    f"{owned.unit.name!r} v{version} is gone: shard {owned.shard.index} is at v{owned.published}, "
                    f"{owned.state.name.lower()}; a rank's reads of a version must end before its finish"
                )
            if not ready:
                self._waiting.setdefault(owned.shard.index, []).append((version, kind, future))
        if ready:
            self._answer(owned, [(version, kind, future)])
        return future

    def copy(self, owned: OwnedShard, known: tuple[int, int] | None) -> Future[PublishedCopy]:
        """What the shard has published now, for somebody for whom nobody waits: copied in this thread if no update or
        write comes in between, else between two tasks of the updater's thread. ``known``: a content that needs no copy.
        Fails with StoreError if there are no values yet."""
        for _ in range(_TRIES):
            copied = self._copied(owned, known)
            if copied is not None:
                return settled(copied)
        future: Future[PublishedCopy] = Future()

        def copy() -> None:
            alone = self._copied(owned, known)
            if alone is None:
                fail(future, StoreError(f"shard {owned.shard.index} of {owned.unit.name!r} has no values yet"))
            else:
                settle(future, alone)

        self._updater.submit(copy)
        return future

    def _copied(self, owned: OwnedShard, known: tuple[int, int] | None) -> PublishedCopy | None:
        """A copy of what is published; None: that changed meanwhile."""
        before = self._readable(owned)
        if before is None:
            return None
        kept = None if before[1] == known else owned.read(STORED if owned.unit.is_coded else COMPUTE).clone()
        return PublishedCopy(*before, kept) if self._readable(owned) == before else None

    def _readable(self, owned: OwnedShard) -> tuple[int, tuple[int, int]] | None:
        """Version and content of what can be read of a shard; None: its bytes may be changing."""
        with self._lock:
            still = owned.state in _READABLE and owned.writes % 2 == 0
            return (owned.published, (owned.content, owned.writes)) if still else None

    def content_at(self, owned: OwnedShard, version: int) -> int | None:
        """The version that a shard's content is from, if the shard has exactly ``version`` now; else None."""
        with self._lock:
            return owned.content if _is_readable(owned, version) else None

    def listen(self, listener: Listener, shards: Iterable[OwnedShard]) -> None:
        """Call ``listener`` with what these shards have published, and then with every version. Called in the updater's
        thread."""
        present = [owned for owned in shards if owned.published >= 0]
        if present:
            listener(_published(present))
        self._listeners.append(listener)

    def _announce(self, shards: Sequence[OwnedShard]) -> None:
        """Answer the reads that wait for what these shards have published, and notify listeners. Called in the
        updater's thread."""
        for owned in shards:
            with self._lock:
                waiting = self._waiting.pop(owned.shard.index, [])
                later = [read for read in waiting if read[0] > owned.published]
                if later:
                    self._waiting[owned.shard.index] = later
            self._answer(owned, [read for read in waiting if read[0] <= owned.published])
        if shards:
            published = _published(shards)
            for listener in self._listeners:
                listener(published)

    def _answer(self, owned: OwnedShard, reads: Sequence[_Read]) -> None:
        """Settle reads. What is kept in codes, and states that the optimizer class keeps itself, are copied in the
        updater's thread."""
        planned = {STORED if owned.unit.is_coded else COMPUTE} | ({MASTER} if owned.split is None else set())
        planned |= {kind for kind, state in owned.states.items() if not state.coded}
        _settle(owned, [read for read in reads if read[1] in planned], OwnedShard.read)
        others = [read for read in reads if read[1] not in planned]
        if others:
            self._updater.submit(lambda: _settle(owned, others, self._read_state))

    def _read_state(self, owned: OwnedShard, kind: str) -> Tensor:
        assert self._rule is not None
        if kind == STEP and owned.trainable:
            return owned.step_counts()
        states = self._rule.states(owned) if owned.trainable else {}
        return states[kind] if kind in states else owned.read(kind)

    # ---- the end

    def fail(self, error: StoreError, last_version: int) -> None:
        """No version after ``last_version`` will be published: reads of one, waiting or later, fail with ``error``."""
        with self._lock:
            self._last = last_version if self._error is None else min(last_version, self._last)
            self._error = self._error or error
            never = [read for reads in self._waiting.values() for read in reads if read[0] > self._last]
            kept = {shard: [read for read in reads if read[0] <= self._last] for shard, reads in self._waiting.items()}
            self._waiting = {shard: reads for shard, reads in kept.items() if reads}
            unfilled, self._unfilled = self._unfilled, []
        for _, _, future in never:
            fail(future, error)
        for _, filled in unfilled:
            fail(filled, error)


def _is_readable(owned: OwnedShard, version: int) -> bool:
    return owned.published == version and owned.state in _READABLE


def _are_filled(shards: Sequence[OwnedShard]) -> bool:
    return all(owned.state is not ShardState.EMPTY for owned in shards)


def _published(shards: Sequence[OwnedShard]) -> list[Published]:
    return [Published(owned.shard.index, owned.published, owned.content) for owned in shards]


def _settle(owned: OwnedShard, reads: Iterable[_Read], read: Callable[[OwnedShard, str], Tensor]) -> None:
    """Answer reads of the version that ``owned`` has now; reads of versions that were skipped fail."""
    for version, kind, future in reads:
        if version != owned.published:
            fail(
                future,
                StoreError(f"{owned.unit.name!r} v{version} was never readable; v{owned.published} is published"),
            )
            continue
        try:
            settle(future, read(owned, kind))
        except StoreError as exc:
            fail(future, exc)
