"""Streams what an owner has published to every rank that listens over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rayzero.errors import RayZeroError
from rayzero.protocol.messages import Published


class PublishStream:
    """What one listener has yet to hear: only the newest version per shard, so a slow reader costs no memory."""

    def __init__(self, known: dict[int, Published], error: RayZeroError | None) -> None:
        self._pending = dict(known)
        self._error = error
        self._news = asyncio.Event()
        self._news.set()  # the first message says what is published, even if that is nothing

    def add(self, published: Sequence[Published], error: RayZeroError | None) -> None:
        """Add to what the listener has yet to hear."""
        self._pending.update((each.shard, each) for each in published)
        self._error = self._error or error
        self._news.set()

    async def next(self) -> tuple[Sequence[Published], RayZeroError | None]:
        """Wait for news. An error ends the run: it comes with the last news."""
        await self._news.wait()
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
        self._streams: set[PublishStream] = set()

    @property
    def aborted(self) -> bool:
        """True once the run is over for this owner."""
        return self._error is not None

    def publish(self, published: Sequence[Published]) -> None:
        """Pass new versions on to every listener."""
        self._loop.call_soon_threadsafe(self._tell, published, None)

    def abort(self, error: RayZeroError) -> None:
        """Tell every listener that the run has failed; the first error wins."""
        self._loop.call_soon_threadsafe(self._tell, (), error)

    def open(self) -> PublishStream:
        """Add a listener, which first hears of everything published so far."""
        stream = PublishStream(self._known, self._error)
        self._streams.add(stream)
        return stream

    def close(self, stream: PublishStream) -> None:
        """Remove a listener."""
        self._streams.discard(stream)

    def _tell(self, published: Sequence[Published], error: RayZeroError | None) -> None:
        self._known.update((each.shard, each) for each in published)
        self._error = self._error or error
        for stream in self._streams:
            stream.add(published, error)
