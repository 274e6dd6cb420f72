"""Waits of a rank or a door for owners: for a version, which ends once the process has heard that it is published; of a
push for its turn, so that each unit's pushes to an owner stay in sequence; and the end of any wait whose peer makes no
progress, with an error that names who waits for what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Any, TypeVar

from rayzero.concurrency.futures import DONE, fail, failed, future_raises, settle
from rayzero.errors import RayZeroError, StallError, StoreError
from rayzero.protocol.gradient_sum import has_pushed
from rayzero.protocol.messages import Contribution, Published, Pushed


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


Try = tuple[int, int]  # (step, attempt)


@dataclass
class _Queue:
    """The pushes of one unit to one owner."""

    current: Try = (-1, 0)
    next_seq: int = 0
    parked: dict[int, Future[None]] = field(default_factory=dict)  # seq -> its turn
    error: Exception | None = None  # why the push whose turn it was has failed


class PushOrder:
    """Gives pushes their turn: push ``seq`` of a unit starts when ``seq - 1`` has landed.

    An owner adds a rank's pushes in that order. A later push that was sent early would wait at the owner and hold one
    of the rank's few sending threads, perhaps the one that the earlier push needs. Knows headers; not bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], _Queue] = {}  # (owner, unit)

    def turn(self, owner: int, push: Contribution) -> Future[None]:
        """Done when ``push`` may be sent to ``owner``: at once for a repeat or a push of an older attempt. Fails if an
        earlier push of the same attempt has failed."""
        turn: Future[None] = DONE
        with self._lock:
            queue = self._queues.setdefault((owner, push.unit), _Queue())
            passed_over = self._enter(queue, (push.step, push.attempt))
            if _try(push) == queue.current and push.seq > queue.next_seq:
                turn = failed(queue.error) if queue.error is not None else queue.parked.setdefault(push.seq, Future())
        for other in passed_over:
            settle(other, None)
        return turn

    def go_on(self, owner: int, unit: int, new: Try, next_seq: int) -> None:
        """An owner of a later epoch has the pushes of ``new`` before ``next_seq``."""
        with self._lock:
            queue = self._queues.setdefault((owner, unit), _Queue())
            queue.current, queue.next_seq = new, next_seq

    def _enter(self, queue: _Queue, new: Try) -> list[Future[None]]:
        """Begin a newer step or attempt. Pushes parked for an older one may go: the owner drops them."""
        if new <= queue.current:
            return []
        parked = list(queue.parked.values())
        queue.current, queue.next_seq, queue.parked, queue.error = new, 0, {}, None
        return parked

    def end(self, owner: int, push: Contribution, error: Exception | None) -> None:
        """Note that a push has landed, so the next one has its turn; or that it has failed, so those behind it fail."""
        for turn in self._end(owner, push, error):
            if error is None:
                settle(turn, None)
            else:
                fail(turn, error)

    def fail(self, error: Exception) -> None:
        """End every wait for a turn with ``error``."""
        with self._lock:
            parked = [turn for queue in self._queues.values() for turn in queue.parked.values()]
            for queue in self._queues.values():
                queue.parked = {}
        for turn in parked:
            fail(turn, error)

    def _end(self, owner: int, push: Contribution, error: Exception | None) -> list[Future[None]]:
        with self._lock:
            queue = self._queues[owner, push.unit]
            if _try(push) != queue.current or push.seq != queue.next_seq:
                return []
            queue.error = error
            if error is not None:
                parked, queue.parked = list(queue.parked.values()), {}
                return parked
            queue.next_seq += 1
            turn = queue.parked.pop(queue.next_seq, None)
            return [] if turn is None else [turn]


def _try(push: Contribution) -> Try:
    return push.step, push.attempt


T = TypeVar("T")

Describe = Callable[[float], Future[str]]  # seconds the peer has for an answer -> what it says it is doing

_POLL_S = 5.0  # the longest time between two checks of the waits
_ANSWER_S = (1.0, 5.0)  # a peer has a quarter of the timeout to answer, within these bounds


@dataclass(eq=False)
class _PeerWait:
    """A future that a peer has to settle."""

    future: Future[Any]
    what: str  # "layers.7 v42 from optimizer 2"
    describe: Describe
    moved: Callable[[], object]  # what this process sees of the progress
    began: float
    since: float  # when it began, or when the peer last made progress
    at: object = None  # the latest value of ``moved``
    said: str | None = None  # the peer's latest answer
    silence: str | None = None  # why there was no answer the last time

    def take(self, answer: Future[str], now: float) -> None:
        """Note what the peer says. [Note: silence] Only news counts as progress: a peer that does not answer makes
        none, even if the reason for its silence changes."""
        error = answer.exception() if answer.done() else TimeoutError("it does not answer")
        self.silence = None if error is None else str(error)
        known = self.moved(), answer.result() if error is None else self.said
        if known != (self.at, self.said):
            self.at, self.said = known
            self.since = now

    def account(self) -> str:
        """What is known of the peer, as part of a message."""
        if self.silence is None:
            return str(self.said)
        return self.silence if self.said is None else f"{self.silence}; its last answer: {self.said}"


class StallWatch:
    """Fails futures whose peer makes no progress for ``stall_timeout`` seconds; from 3 s on, within 1.5 times that.

    Progress is a change in what the peer says it is doing, or in what this process sees arrive. Knows futures and
    clocks; not stores. One thread, started with the first wait."""

    def __init__(
        self,
        who: str,
        stall_timeout: float,
        *,
        poll_s: float | None = 0.0,
    ) -> None:
        """``who``: waits, for messages ("rank 3"). ``stall_timeout``: seconds. ``poll_s``: seconds between two checks,
        and how old a wait is before its peer is asked; 0: an eighth of the timeout, at most 5; None: without a thread,
        the caller calls ``check_all``, which asks about every wait."""
        self._who = who
        self._timeout = stall_timeout
        self._poll_s = min(stall_timeout / 8, _POLL_S) if poll_s == 0.0 else poll_s
        least, most = _ANSWER_S
        self._answer_s = min(max(stall_timeout / 4, least), most)
        self._waits: dict[int, _PeerWait] = {}  # pending, by number, oldest first
        self._numbers = count()
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: StoreError | None = None  # fails waits that begin after close()

    def watch(
        self, future: Future[T], what: str, describe: Describe, moved: Callable[[], object] = lambda: None
    ) -> Future[T]:
        """Fail ``future`` with StallError when it stalls; returns it.

        ``describe`` is called from the watch's thread, now and then while the wait lasts: it must not block, and its
        future must end within the seconds it is given. ``moved`` returns a value that changes as this process sees
        progress, such as the number of messages received."""
        if future.done():
            return future
        now = monotonic()
        wait = _PeerWait(future, what, describe, moved, began=now, since=now, at=moved())
        number = next(self._numbers)
        with self._changed:
            error = self._error
            if not self._closed:
                self._waits[number] = wait
                if self._thread is None and self._poll_s is not None:
                    self._thread = threading.Thread(target=self._run, name=f"stall-watch-{self._who}", daemon=True)
                    self._thread.start()
        if error is not None:
            fail(future, error)
        future.add_done_callback(lambda _: self._forget(number))  # no reference cycle: an ended wait is freed
        return future

    def close(self, error: StoreError | None = None) -> None:
        """Stop watching. With ``error``, pending waits and later ones fail with it. Idempotent."""
        with self._changed:
            self._closed, self._error = True, error
            waits = list(self._waits.values())
            self._waits.clear()
            self._changed.notify()
        if error is not None:
            for wait in waits:
                fail(wait.future, error)
        if self._thread is not None:
            self._thread.join()

    def check_all(self) -> None:
        """Check every wait that is old enough, once. All peers are asked at once, with one deadline, so a check takes
        as long as the slowest answer, however many waits there are or begin meanwhile."""
        now = monotonic()
        with self._changed:
            due = [wait for wait in self._waits.values() if now - wait.began >= (self._poll_s or 0.0)]
        answers = [future_raises(wait.describe)(self._answer_s) for wait in due]
        futures.wait(answers, self._answer_s + 1.0)  # answers end by themselves; one second more is for a busy machine
        for wait, answer in zip(due, answers, strict=True):
            self._check(wait, answer)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._closed:
                    self._changed.wait(self._poll_s)
                if self._closed:
                    return
            self.check_all()

    def _check(self, wait: _PeerWait, answer: Future[str]) -> None:
        """Fail the wait when nothing has changed for too long."""
        if wait.future.done():
            return
        now = monotonic()
        wait.take(answer, now)
        if now - wait.since >= self._timeout:
            waited = f"{now - wait.began:.3g} s"
            fail(wait.future, StallError(f"{self._who} waits {waited} for {wait.what}: {wait.account()}"))

    def _forget(self, number: int) -> None:
        with self._changed:
            self._waits.pop(number, None)
