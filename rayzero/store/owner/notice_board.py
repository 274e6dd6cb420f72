"""What an owner has published, told to every rank that listens."""

from __future__ import annotations

import asyncio

from rayzero.errors import RayZeroError
from rayzero.store.wire.notices import News, Notice


class Subscription:
    """What one listener has not been told yet: the newest version per shard, so a slow reader costs no memory."""

    def __init__(self, known: dict[int, Notice], error: RayZeroError | None) -> None:
        self._pending = dict(known)
        self._error = error
        self._news = asyncio.Event()
        self._news.set()  # the first notice says what there is, be it nothing

    def add(self, news: News, error: RayZeroError | None) -> None:
        """Remember news for the listener."""
        self._pending.update((notice[0], notice) for notice in news)
        self._error = self._error or error
        self._news.set()

    async def next(self) -> tuple[News, RayZeroError | None]:
        """Wait for news; the error, once there is one, is the last thing to say."""
        await self._news.wait()
        self._news.clear()
        news, self._pending = list(self._pending.values()), {}
        return news, self._error


class NoticeBoard:
    """What an owner has published, and the streams that want to hear of it.

    Lives on the event loop; ``publish`` and ``abort`` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: dict[int, Notice] = {}  # by shard
        self._error: RayZeroError | None = None
        self._subscriptions: set[Subscription] = set()

    @property
    def aborted(self) -> bool:
        """True once the run is over for this owner."""
        return self._error is not None

    def publish(self, news: News) -> None:
        """Tell everyone of new versions."""
        self._loop.call_soon_threadsafe(self._tell, list(news), None)

    def abort(self, error: RayZeroError) -> None:
        """Tell everyone that it is over; the first error counts."""
        self._loop.call_soon_threadsafe(self._tell, [], error)

    def subscribe(self) -> Subscription:
        """A new listener, who is told all there is first."""
        subscription = Subscription(self._known, self._error)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """The listener is gone."""
        self._subscriptions.discard(subscription)

    def _tell(self, news: News, error: RayZeroError | None) -> None:
        self._known.update((notice[0], notice) for notice in news)
        self._error = self._error or error
        for subscription in self._subscriptions:
            subscription.add(news, error)
