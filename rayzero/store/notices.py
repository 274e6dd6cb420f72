"""Who has published what: the news an owner sends (server side) and what a rank makes of them (client side)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rayzero.errors import RayZeroError
from rayzero.optimizer.futures import fail, settle

Notice = tuple[int, int, int]  # shard, its version, the version that its content is from
News = list[Notice]

# ------------------------------------------------------------------------------------------------------- server


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


# ------------------------------------------------------------------------------------------------------- client


@dataclass(eq=False, slots=True)
class _Wait:
    """Someone waits for shards of one owner to have a version."""

    owner: int
    missing: set[int]
    version: int
    published: Future[None]


class PublishBoard:
    """The versions a rank has heard of, and the waits they end. Any thread may call it.

    Knows versions and who waits; its futures complete in the thread that brings the news, outside the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, Notice] = {}  # by shard
        self._waits: set[_Wait] = set()
        self._released: dict[int, RayZeroError] = {}  # owners that will not announce all that is asked for, and why
        self._error: RayZeroError | None = None

    def when(self, owner: int, shards: Sequence[int], version: int) -> Future[None]:
        """Done once all ``shards`` have ``version`` or a later one; fails if they never will."""
        wait = _Wait(owner, set(shards), version, Future())
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
        """The version that the newest content among ``shards`` is from; None while one of them lacks ``version``."""
        with self._lock:
            there = [self._known[shard][2] for shard in shards if self._has(shard, version)]
            return max(there) if len(there) == len(shards) else None

    def are_at(self, shards: Sequence[int], version: int) -> bool:
        """Whether all ``shards`` have exactly ``version``, as far as we have heard."""
        with self._lock:
            return all(shard in self._known and self._known[shard][1] == version for shard in shards)

    def publish(self, owner: int, news: Iterable[Notice]) -> None:
        """News of ``owner``."""
        with self._lock:
            self._known.update((notice[0], notice) for notice in news)
            ready = self._take(lambda wait: wait.owner == owner and self._arrived(wait))
        for wait in ready:
            settle(wait.published, None)

    def _arrived(self, wait: _Wait) -> bool:
        wait.missing = {shard for shard in wait.missing if not self._has(shard, wait.version)}
        return not wait.missing

    def _has(self, shard: int, version: int) -> bool:
        return shard in self._known and self._known[shard][1] >= version

    def _take(self, wanted: Callable[[_Wait], bool]) -> list[_Wait]:
        taken = [wait for wait in self._waits if wanted(wait)]
        self._waits.difference_update(taken)
        return taken

    def release(self, owner: int, reason: RayZeroError) -> None:
        """``owner`` ends the run: what it has decided is still published, nothing else. Let every wait, now and
        later, go and ask it: it answers when it can or with its error; ``reason`` is the answer of one that is gone."""
        with self._lock:
            self._released.setdefault(owner, reason)
            released = self._take(lambda wait: wait.owner == owner)
        for wait in released:
            settle(wait.published, None)

    def fail(self, error: RayZeroError) -> None:
        """End every wait, now and later, with ``error``; the first error counts."""
        with self._lock:
            error = self._error = self._error or error
            ended = self._take(lambda _: True)
        for wait in ended:
            fail(wait.published, error)

    def ended(self, owner: int) -> RayZeroError | None:
        """Why no more can be had from an ``owner`` that does not answer; None while it may."""
        with self._lock:
            return self._error or self._released.get(owner)
