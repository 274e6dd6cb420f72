"""Which ranks have a link to an owner, which of the others are gone, and which calls run over each link. And the specs
that ranks have described as they attached: each travels, and is read, once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rayzero.concurrency.processes import ProcessIdentity, watch_process
from rayzero.errors import HandshakeError, StoreError, TransferError
from rayzero.protocol.messages import ModelSpec
from rayzero.quantities import count
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.traffic import count_reconnect
from rayzero.store.wire import translate
from rayzero.store.wire.rpc import LinkNumber
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

Gone = Callable[[int, str], None]  # rank, why


@dataclass(eq=False)
class _LinkedRank:
    """A rank that has attached and is not gone."""

    process: ProcessIdentity
    lease_s: float
    unwatch: Callable[[], None] | None  # ends the watch over its process; None: nothing here can see it
    down_since: float | None = None  # when its link broke
    lease: asyncio.TimerHandle | None = field(default=None, repr=False)  # runs while the link is down

    def forget(self) -> None:
        if self.lease is not None:
            self.lease.cancel()
        if self.unwatch is not None:
            self.unwatch()


class RankLinks:
    """Takes a rank for gone when its process has died or, where that cannot be seen, when its link was down for longer
    than its lease. A link that breaks and comes back is only logged and counted.

    Knows ranks, processes and the streams of notices; not what a rank does. Lives on the event loop."""

    def __init__(self, owner: int, loop: asyncio.AbstractEventLoop, recorder: Recorder, gone: Gone) -> None:
        """``gone`` is called on the event loop, once for each rank that is gone without having left."""
        self._owner, self._loop, self._recorder, self._gone = owner, loop, recorder, gone
        self._ranks: dict[int, _LinkedRank] = {}
        self._processes: dict[int, ProcessIdentity] = {}  # of each rank that has ever attached, the newest
        self._streams: dict[int, object] = {}  # rank -> its newest stream of notices
        self._came = asyncio.Condition()  # notified when a rank attaches
        self._over = False

    def require_same(self, rank: int, process: ProcessIdentity) -> None:
        """Raise HandshakeError if ``rank`` was another process before."""
        before = self._processes.get(rank, process)
        if before != process:
            raise HandshakeError(
                f"optimizer {self._owner}: rank {rank} was the process with pid {before.pid} and is now one with pid "
                f"{process.pid}, but this run replaces no ranks; start a new run, with optimizer actors of its own, "
                "from the newest checkpoint"
            )

    def attached(self, rank: int, process: ProcessIdentity, lease_s: float) -> None:
        """A rank has shaken hands; also a repeat of that. ``lease_s``: see ``AttachRequest``."""
        self.left(rank)
        self._processes[rank] = process
        unwatch = watch_process(process, partial(self._died, rank, process))
        self._ranks[rank] = _LinkedRank(process, lease_s, unwatch)
        if rank not in self._streams:
            self._broke(rank)
        self._loop.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._came:
            self._came.notify_all()

    def is_known(self, rank: int) -> bool:
        """Whether a rank has attached, in whichever life."""
        return rank in self._processes

    async def known(self, ranks: Collection[int]) -> None:
        """Wait until these ranks have attached, in whichever life."""
        async with self._came:
            await self._came.wait_for(lambda: self._processes.keys() >= set(ranks))

    def left(self, rank: int) -> None:
        """A rank has left, or somebody who knows says that it is gone: nothing more is expected of it."""
        known = self._ranks.pop(rank, None)
        if known is not None:
            known.forget()

    def opened(self, rank: int) -> object:
        """A rank's stream of notices has begun. Returns what ``ended`` takes."""
        stream = self._streams[rank] = object()
        known = self._ranks.get(rank)
        if known is not None and known.down_since is not None:
            self._is_back(rank, known, time.monotonic() - known.down_since)
        return stream

    def _is_back(self, rank: int, known: _LinkedRank, down_s: float) -> None:
        known.down_since = None
        if known.lease is not None:
            known.lease.cancel()
        log.warning("optimizer %d: the link to rank %d is back after %.3g s", self._owner, rank, down_s)
        count_reconnect(self._recorder, "rank", down_s)

    def ended(self, rank: int, stream: object) -> None:
        """A stream of notices has ended."""
        if self._streams.get(rank) is stream:
            del self._streams[rank]
            self._broke(rank)

    def _broke(self, rank: int) -> None:
        known = self._ranks.get(rank)
        if known is None or self._over:
            return
        log.warning("optimizer %d lost the link to rank %d", self._owner, rank)
        known.down_since = time.monotonic()
        if known.unwatch is None and known.lease_s > 0:
            known.lease = self._loop.call_later(known.lease_s, self._expired, rank, known)

    def _expired(self, rank: int, known: _LinkedRank) -> None:
        self._end(rank, f"its link broke {known.lease_s:.3g} s ago and did not come back")

    def _died(self, rank: int, process: ProcessIdentity) -> None:
        known = self._ranks.get(rank)
        if known is not None and known.process == process and not self._over:  # else another life of it has attached
            log.warning("optimizer %d: rank %d (pid %d) has died", self._owner, rank, process.pid)
            self._end(rank, f"its process, pid {process.pid}, died")

    def _end(self, rank: int, why: str) -> None:
        if rank in self._ranks and not self._over:
            self.left(rank)
            self._gone(rank, why)

    def close(self) -> None:
        """The run is over for this owner: nobody is missed any more. Idempotent."""
        self._over = True
        for rank in list(self._ranks):
            self.left(rank)


class RunningCalls:
    """Ends calls that nobody waits for any more, and all of them when the server stops. Lives on the event loop.

    [Note: late calls] A caller whose link broke repeats its calls over a new one. What it sent over the old one may
    arrive after that, because a network delivers late what it had swallowed. That would not be harmless: a late Finish
    is of a step that is over, and the late bytes of a push would be written into a sum that has begun. So a call over a
    newer link ends those over older ones, and later arrivals are refused."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._tasks: dict[str, set[asyncio.Task[Any]]] = defaultdict(set)  # by caller; "" without a number
        self._newest: dict[str, int] = {}  # caller -> number of its newest link
        self._stopped: StoreError | None = None

    @contextmanager
    def running(self, link: LinkNumber | None) -> Iterator[None]:
        """Wraps every call. Raises StoreError in it if the server stops, TransferError if the caller has opened a newer
        link than ``link``. None: a caller without numbers, whose calls are not ordered."""
        if link is not None:
            self._order(link)
        task = asyncio.current_task()
        assert task is not None
        caller = "" if link is None else link.caller
        self._tasks[caller].add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._stopped is not None:
                raise self._stopped from None
            if link is not None and self._is_late(link):
                raise self._late(link) from None
            raise  # the caller is gone
        finally:
            self._forget(caller, task)

    def _forget(self, caller: str, task: asyncio.Task[Any]) -> None:
        self._tasks[caller].discard(task)
        if not self._tasks[caller]:
            del self._tasks[caller]
            if caller.startswith("follower "):  # no end of new names, and a late call only reads
                self._newest.pop(caller, None)

    def _order(self, link: LinkNumber) -> None:
        if self._is_late(link):
            raise self._late(link)
        if link.number == self._newest.get(link.caller):
            return
        self._newest[link.caller] = link.number
        for task in self._tasks.get(link.caller, ()):
            task.cancel()

    def _is_late(self, link: LinkNumber) -> bool:
        return link.number < self._newest.get(link.caller, link.number)

    def _late(self, link: LinkNumber) -> TransferError:
        return TransferError(f"optimizer {self._owner}: {link.caller} has opened a newer link than that of this call")

    def end(self, error: StoreError) -> None:
        """The server stops, or its epoch is over: end every call with ``error``."""
        self._stopped = error
        for task in [task for tasks in self._tasks.values() for task in tasks]:
            task.cancel()


_DIGEST_CHARS = 64
_KEPT = 4  # a run has one; ranks that come back may name another checkpoint
_AWAITED = 64  # specs that may be on their way; a caller could name any number of them
_PATIENCE_S = 5.0

Compute = Callable[[Callable[[], ModelSpec]], Awaitable[ModelSpec]]


class KnownSpecs:
    """Finds the spec that a rank attaches with.

    A spec of 10,000 parameters is a megabyte, and takes the event loop as long to read as a thousand small calls. All
    ranks of a run have the same, so a rank names it by its digest, and only the first is asked for all of it; others
    that come before that is here wait a moment for it.

    Knows digests; not what ranks do with a spec, or whether two may differ. Lives on the event loop."""

    def __init__(self, owner: int, compute: Compute, patience_s: float = _PATIENCE_S) -> None:
        """``compute``: runs work off the event loop. ``patience_s``: seconds that a rank waits for another one's spec
        before it is asked for its own."""
        self._owner, self._compute, self._patience_s = owner, compute, patience_s
        self._known: dict[str, ModelSpec] = {}  # by digest, the newest last
        self._coming: dict[str, asyncio.Event] = {}  # by digest, of a rank that was asked for it

    async def of(self, request: pb.AttachRequest) -> ModelSpec | None:
        """The spec of a rank's request; None: the rank has to send it. Raises HandshakeError if it is not the one that
        its digests name."""
        digest = request.spec_digest
        if len(digest) != _DIGEST_CHARS:
            raise HandshakeError(
                f"rank {request.rank} names its spec by {count(len(digest), 'character')}, and optimizer {self._owner} "
                f"by the {_DIGEST_CHARS} of a SHA-256: install the same rayzero on both"
            )
        if digest not in self._known and not request.spec and not await self._comes(digest):
            return None
        if digest not in self._known:
            await self._take(request)
        spec = self._known[digest]
        if spec.layout.digest != request.layout_digest:
            raise HandshakeError(
                f"rank {request.rank} describes a layout with digest {request.layout_digest[:12]}, "
                f"optimizer {self._owner} computes {spec.layout.digest[:12]} for it"
            )
        return spec

    async def _comes(self, digest: str) -> bool:
        """Wait for a spec that another rank was asked for. False: nobody was, or it does not come, so that the caller's
        rank is asked."""
        while (coming := self._coming.get(digest)) is not None:
            try:
                await asyncio.wait_for(coming.wait(), self._patience_s)
                return digest in self._known
            except TimeoutError:  # the rank that was asked may have died: one of those that wait is asked, too
                if self._coming.get(digest) is coming:
                    break
        self._coming[digest] = asyncio.Event()
        while len(self._coming) > _AWAITED:
            del self._coming[next(iter(self._coming))]
        return False

    async def _take(self, request: pb.AttachRequest) -> None:
        digest = request.spec_digest
        if translate.spec_digest(request.spec) != digest:
            raise HandshakeError(
                f"rank {request.rank} names its spec by {digest[:12]}, which is not the digest of what it "
                f"sends to optimizer {self._owner}: install the same rayzero on both"
            )
        spec = await self._compute(partial(translate.spec_from_bytes, request.spec))
        self._known.setdefault(digest, spec)  # always the same object: an owner compares that first
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        coming = self._coming.pop(digest, None)
        if coming is not None:
            coming.set()
