"""Streams what an owner has published to ranks, and to optimizer actors that copy it for their hosts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from rayzero.errors import RayZeroError, TransferError
from rayzero.protocol.messages import Published


class PublishStream:
    """What one listener has yet to hear: only the newest version per shard, so a slow reader costs no memory."""

    def __init__(self, listener: str, known: dict[int, Published], error: RayZeroError | None) -> None:
        self.listener = listener
        self._pending = dict(known)
        self._error = error
        self._is_over = False
        self.hears_totals = True  # False: it sees in shared memory what is in totals
        self._news = asyncio.Event()
        self._news.set()  # the first message says what is published, even if that is nothing

    def add(self, published: Sequence[Published]) -> None:
        """Add to what the listener has yet to hear."""
        self._pending.update((each.shard, each) for each in published)
        self._news.set()

    def fail(self, error: RayZeroError) -> None:
        """The run is over: this comes with the last news."""
        self._error = self._error or error
        self._news.set()

    def end(self) -> None:
        """Its rank listens elsewhere from now on."""
        self._is_over, self._pending = True, {}
        self._news.set()

    async def next(self) -> tuple[Sequence[Published], RayZeroError | None]:
        """Wait for news. An error ends the run: it comes with the last news. Raises TransferError if the
        listener has opened another stream."""
        await self._news.wait()
        if self._is_over:
            raise TransferError(f"{self.listener} has opened a newer stream of notices")
        self._news.clear()
        published, self._pending = list(self._pending.values()), {}
        return published, self._error


class PublishStreams:
    """What an owner has published, as the event loop knows it, and the streams that pass it on.

    Lives on the event loop; ``publish`` and ``abort`` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: dict[int, Published] = {}  # by shard
        self._error: RayZeroError | None = None
        self._lock = threading.Lock()  # held while ``_totals`` changes
        self._totals: dict[int, int] = {}  # by shard, what is in its total that was not told yet
        self._anyone = True  # perhaps, somebody hears that
        self._streams: set[PublishStream] = set()
        self._newest: dict[str, PublishStream] = {}  # by listener, while it is open

    @property
    def aborted(self) -> bool:
        """True once the run is over for this owner."""
        return self._error is not None

    def publish(self, published: Sequence[Published]) -> None:
        """Pass new versions on to every listener."""
        self._loop.call_soon_threadsafe(self._tell, published)

    def abort(self, error: RayZeroError) -> None:
        """Tell every listener that the run has failed; the first error wins."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def open(self, listener: str) -> PublishStream:
        """Add a listener ("rank 3"), which first hears of everything published so far. It ends the older stream of the
        same name, because each remembers all shards."""
        older = self._newest.get(listener)
        if older is not None:
            self._streams.discard(older)
            older.end()
        self._tell_totals()  # those that nobody has heard
        stream = self._newest[listener] = PublishStream(listener, self._known, self._error)
        self._streams.add(stream)
        self._anyone = True
        return stream

    def close(self, stream: PublishStream) -> None:
        """Remove a listener."""
        self._streams.discard(stream)
        if self._newest.get(stream.listener) is stream:
            del self._newest[stream.listener]

    def total(self, shard: int, word: int) -> None:
        """Tell listeners what is in a shard's total (``total_word``): several at once, as it comes often."""
        with self._lock:
            asked, self._totals[shard] = bool(self._totals), word
        if not asked and self._anyone:
            self._loop.call_soon_threadsafe(self._tell_totals)

    def _tell_totals(self) -> None:
        with self._lock:
            totals, self._totals = self._totals, {}
        self._anyone = any(stream.hears_totals for stream in self._streams)
        told = [self._known[shard]._replace(total=word) for shard, word in totals.items() if shard in self._known]
        self._known.update((each.shard, each) for each in told)
        for stream in self._streams if told else ():
            if stream.hears_totals:
                stream.add(told)

    def _tell(self, published: Sequence[Published]) -> None:
        for each in published:
            before = self._known.get(each.shard)
            self._known[each.shard] = each if before is None else each._replace(total=before.total)
        for stream in self._streams:
            stream.add([self._known[each.shard] for each in published])

    def _fail(self, error: RayZeroError) -> None:
        self._error = self._error or error
        for stream in self._streams:
            stream.fail(self._error)
