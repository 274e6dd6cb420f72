"""Keeps a copy of what owners on other hosts publish, once for all ranks of a host.

An owner says what it has published; what has changed is fetched at once, in the order of the forward, and a shard's
line is written behind its bytes. So a rank reads a copied shard as it reads one of an owner on its host: same memory,
same line, same bell.

[Note: one buffer] A copy is overwritten in place. An owner publishes a new content only once every rank has finished
the step of the one before, and a rank finishes after its last read. (Of a version that no rank of this host waits for,
bytes may come while the next one is made: no rank reads them.) What a version has changed is applied in place, and is
right in a copy of which some is of that version: after a death, say. Only a write by the user changes bytes within a
version: then each rank, once the write is made, asks for the unit again (``bring``), and reads it after the answer.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from rayzero.concurrency.futures import DONE, Gather, fail, settle
from rayzero.errors import RayZeroError, StallError, StoreClosedError, TransferError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import Published
from rayzero.store.host.mirror_memory import MirrorMemory
from rayzero.store.host.wire_transfers import WireTransfers

log = logging.getLogger(__name__)


class Mirror:
    """The copies of one owner's shards. Thread-safe: notices come in the link's thread, bytes in those of the pool."""

    def __init__(
        self,
        shards: Sequence[Shard],
        units: Sequence[UnitLayout],
        memory: MirrorMemory,
        fetches: WireTransfers,
        show: Callable[[], None],
    ) -> None:
        """``shards``: ascending. ``show``: called when versions have been written into lines."""
        self._shards, self._units, self._memory = {shard.index: shard for shard in shards}, units, memory
        self._fetches, self._show = fetches, show
        self._lock = threading.Lock()
        self._heard: dict[int, Published] = {}  # by shard, the newest
        self._here = {index: memory.former[index] for index in self._shards if index in memory.former}
        self._coming: set[int] = set()  # shards whose bytes are under way
        self._stale: set[int] = set()  # shards that have been written to since their bytes were asked for
        self._waits: list[tuple[set[int], Future[None]]] = []  # for stale shards
        self._end: RayZeroError | None = None

    def hear(self, published: Iterable[Published]) -> None:
        """The owner has published these versions, perhaps long ago."""
        newer = list(published)
        for each in newer:
            if each.total:
                self._memory.total(each.shard, each.total)
        if any(each.total for each in newer):
            self._show()
        with self._lock:
            self._heard.update((each.shard, each) for each in newer if each.shard in self._shards)
        self._advance(each.shard for each in newer)

    def bring(self, unit: int) -> Future[None]:
        """Fetch the shards of a unit again; done once they are here."""
        wanted = {index for index, shard in self._shards.items() if shard.unit == unit}
        if not wanted:
            return DONE
        done: Future[None] = Future()
        with self._lock:
            end = self._end
            if end is None:
                self._stale |= wanted
                self._waits.append((set(wanted), done))
        if end is not None:
            fail(done, end)
        else:
            self._advance(wanted)
        return done

    def _advance(self, indices: Iterable[int]) -> None:
        """Fetch what has another content here, and show the others' versions."""
        fetched: dict[tuple[int, int, int | None], list[Published]] = defaultdict(list)
        shown = False
        with self._lock:
            for index in sorted(indices):
                heard, here = self._heard.get(index), self._here.get(index)
                if heard is None or index in self._coming or self._end is not None:
                    continue
                if here is None or here.content != heard.content or index in self._stale:
                    if index in self._stale:
                        self._stale.remove(index)
                        self._here.pop(index, None)
                        self._memory.forget(self._shards[index])
                        here = None
                    self._coming.add(index)
                    unit = self._units[self._shards[index].unit]
                    changes = here is not None and unit.trainable and unit.dtype.itemsize == 2
                    since = here.content if here is not None and changes else None
                    fetched[unit.index, heard.version, since].append(heard)
                elif here.version < heard.version:
                    shown = True
                    self._show_one(heard)
        for (number, version, since), wanted in fetched.items():
            self._fetch(self._units[number], version, since, wanted)
        if shown:
            self._show()

    def _show_one(self, published: Published) -> None:
        self._here[published.shard] = published
        self._memory.show(published)

    def _fetch(self, unit: UnitLayout, version: int, since: int | None, wanted: Sequence[Published]) -> None:
        gather, shards = Gather(1), [self._shards[each.shard] for each in wanted]
        gather.future.add_done_callback(partial(self._came, wanted))
        self._fetches.fetch_kept(gather, unit, shards, version, self._memory.tensor, since)

    def _came(self, wanted: Sequence[Published], done: Future[None]) -> None:
        """Bytes are here, or do not come: a version that is gone has a next one, heard by now or soon."""
        error, ended = done.exception(), list[Future[None]]()
        with self._lock:
            for each in wanted:
                self._coming.remove(each.shard)
                if error is None:
                    self._show_one(each)
                    for left, _ in self._waits:
                        left -= {each.shard} - self._stale
            ended = [wait for left, wait in self._waits if not left]
            self._waits = [(left, wait) for left, wait in self._waits if left]
        if error is None:
            self._show()
        elif not isinstance(error, StoreClosedError):
            log.warning("the copy of %s for this host has to wait: %s", self._units[self._unit(wanted)].name, error)
        for wait in ended:
            settle(wait, None)
        again = error is None or isinstance(error, StallError | TransferError)
        self._advance(each.shard for each in wanted if again or self._heard[each.shard].version > each.version)

    def _unit(self, wanted: Sequence[Published]) -> int:
        return self._shards[wanted[0].shard].unit

    def end(self, error: RayZeroError) -> None:
        """Nothing comes any more: waits fail with ``error``. Idempotent."""
        with self._lock:
            self._end = self._end or error
            waits, self._waits = self._waits, []
        for _, wait in waits:
            fail(wait, error)
