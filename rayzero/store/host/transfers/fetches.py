"""Moves bytes between one caller and one owner over TCP: what travels together, what is sent again.

When the link breaks, a stream is repeated whole once it is open again: owners drop what they already have.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from rayzero.codecs import RAW
from rayzero.codecs.record import codec_of
from rayzero.concurrency.backoff import backoff
from rayzero.concurrency.futures import DONE, Gather, settle, then
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import RayZeroError, StallError, StoreClosedError, TransferError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import COMPUTE, STORED
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.channel import QUICK_S, BrokenLinkError, NoStreamError
from rayzero.store.host.links.owner_link import AnyChannel, OwnerLink
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.host.stall import Describe, StallWatch
from rayzero.store.host.transfers.batches import Batches
from rayzero.store.host.transfers.calls import Move, download
from rayzero.store.host.transfers.parts import Download, Sending
from rayzero.store.traffic import count_bytes
from rayzero.telemetry.names import TRANSFER_RETRIES
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

ATTEMPTS = 3  # at a stream whose bytes are damaged
RETRY_PAUSE_S = 0.1
_SHUT_S = 30.0  # how long an owner that answers calls may let no connection for tensors in
_SLOWEST_BYTES_PER_S = 10e6  # a stream slower than this is given up


class Progress:
    """Counts the chunks of a stream as they pass. When it is repeated, only chunks beyond the best try are progress: a
    link that breaks again and again must not hide that nothing moves."""

    def __init__(self) -> None:
        self.chunks = 0  # of the best try
        self._now = 0  # of this one

    def begin(self) -> None:
        """Another try."""
        self._now = 0

    def moved(self) -> None:
        """One chunk has passed."""
        self._now += 1
        self.chunks = max(self.chunks, self._now)


class TransferThreads:
    """The threads that move the bytes of one caller to and from all of its owners. So a push never queues behind
    fetches, or behind the pushes to an owner that hangs."""

    def __init__(self, num_owners: int, who: str, streams: int | None = None) -> None:
        """``who``: "rank 3". ``streams``: of each method, to one owner at once, at most; None: as many as there are
        threads for it."""
        threads, shared = _shared_out(num_owners)
        self.streams = shared if streams is None else streams
        self.closing = threading.Event()  # set when the caller closes: nothing is repeated any more
        self.fetches, self.pushes = (
            ThreadPoolExecutor(
                threads, f"rayzero-{who.replace(' ', '')}-{way}", initializer=use_torch_threads, initargs=(1,)
            )
            for way in ("fetch", "push")
        )  # freed by: close()

    def close(self) -> None:
        """End the threads, once the links are closed. Idempotent."""
        for pool in (self.fetches, self.pushes):
            pool.shutdown(wait=True)


class WireFetches:
    """Fetches what one owner has published.

    Knows the owner's link and what travels; not who waits for it, or other owners."""

    def __init__(
        self,
        link: OwnerLink,
        threads: TransferThreads,
        *,
        board: PublishBoard,
        watch: StallWatch,
        recorder: Recorder,
    ) -> None:
        """``threads``: shared by all owners. ``board``: says whether the owner is ending the run."""
        self.owner, self.transport = link.owner, "grpc"
        self._link, self._board, self._watch = link, board, watch
        self._closing, self._recorder = threads.closing, recorder
        self._fetches: Batches[Download] = Batches(
            threads.fetches, partial(self._run, self._download), at_once=threads.streams
        )

    def fetch_kept(
        self,
        gather: Gather,
        unit: UnitLayout,
        shards: list[Shard],
        version: int,
        place: Callable[[Shard], Tensor],
    ) -> None:
        """Fetch published parameters as the owner keeps them. ``place``: where a shard goes: 1D, its values in the
        unit's dtype, or its record (codecs/record.py)."""
        part = Download(
            gather=gather,
            awaited=f"{unit.name} v{version}",
            shards=shards,
            version=version,
            what=STORED if unit.is_coded else COMPUTE,
            dtype=unit.dtype,
            place=place,
            kept=unit if unit.is_coded else None,
            decode=False,
        )
        self._when(DONE, part, lambda: self._fetches.add(part))

    # ---- waiting

    def _when(self, ready: Future[None], part: Download | Sending, go: Callable[[], object]) -> None:
        """Start a part once ``ready`` is done; if ``ready`` fails, the part ends with its error."""

        def begin(done: Future[None]) -> None:
            error = done.exception()
            if error is not None:
                part.gather.end(error)
                return
            try:
                go()
            except RuntimeError:  # the pool is shut down
                part.gather.end(StoreClosedError(f"{self._link.caller.name} used its store after close()"))

        ready.add_done_callback(begin)

    def _name(self, awaited: str) -> str:
        return f"{awaited} from optimizer {self._link.owner}"

    def _describe(self, shard: Shard, timeout_s: float) -> Future[str]:
        """What the owner says it does for a shard."""
        return self._link.describe(pb.DescribeRequest(shard=shard.index), timeout_s)

    # ---- moving, in a thread of a pool

    def _run(self, move: Callable[[list[Any]], None], parts: list[Any]) -> None:
        """Move parts together; if that fails, move each alone, so that the error of one does not fail the others. When
        the owner or the link to it stalls, that is no part's own error."""
        going = [part for part in parts if not part.ended and part.gather.start()]
        if not going:
            return
        try:
            move(going)
        except Exception as error:  # whatever it is, the caller's future raises it
            alone = len(going) > 1 and not isinstance(error, StallError)
            for part in going:
                if alone:
                    self._run(move, [part])
                elif not part.ended:
                    part.end(error)

    def _request(self, parts: Sequence[Download]) -> pb.FetchRequest:
        return pb.FetchRequest(
            **self._link.caller.signature,
            shards=[index for part in parts for index in indices(part.shards)],
            version=parts[0].version,
            kind=parts[0].what,
        )

    def _download(self, parts: list[Download]) -> None:
        """Fetch published shards; each part ends when its bytes are there."""

        def describe(timeout_s: float) -> Future[str]:
            part = next((part for part in parts if not part.ended), parts[-1])
            filled, count = part.filled, len(part.shards)
            said = self._describe(part.shards[min(filled, count - 1)], timeout_s)
            return then(said, lambda text: f"{filled}/{count} shards are here, {text}")

        def stream(channel: AnyChannel, moving: Future[None], progress: Progress) -> None:
            left = [part for part in parts if not part.ended]
            if not left:  # all bytes were here when the link broke
                return
            move = self._move(channel, sum(part.size for part in left), 0.0, moving, progress.moved)
            sizes = [size for part in left for size in part.sizes]
            records = {index for part in left if part.kept is not None for index in indices(part.shards)}
            with download(move, self._request(left), sizes, records) as take:
                for part in left:
                    part.fill(take)
                    numel = sum(shard.numel for shard in part.shards)
                    codec = RAW if part.kept is None else codec_of(part.kept)
                    size = part.received
                    count_bytes(self._recorder, "fetch", channel.transport, numel, part.dtype, codec=codec, size=size)
                    part.end(None)

        self._repeat("fetch", self._name(parts[0].awaited), describe, stream)

    def _move(
        self,
        channel: AnyChannel,
        size_bytes: int,
        timeout_s: float = 0.0,
        moving: Future[None] | None = None,
        moved: Callable[[], None] = lambda: None,
    ) -> Move:
        """How ``size_bytes`` travel. ``timeout_s``: seconds to add to those that they may take."""
        return Move(
            channel=channel,
            deadline_s=timeout_s + _bulk_deadline_s(size_bytes),
            moving=Future() if moving is None else moving,
            moved=moved,
        )

    def _repeat(
        self,
        direction: str,
        what: str,
        describe: Describe,
        stream: Callable[[AnyChannel, Future[None], Progress], None],
    ) -> None:
        """Run a stream, and repeat all of it after the link was down, or if bytes are damaged. Raises StallError when
        no chunk passes and the owner makes no progress; other errors at once. ``stream`` ends its call when the
        future that it is given is done."""
        progress, moving = Progress(), Future[None]()
        self._watch.watch(moving, what, describe, lambda: progress.chunks)
        broken, damaged = None, 0
        shut_at, pauses = math.inf, backoff()  # since when no connection for tensors can be opened
        try:
            while True:
                channel = self._link.wait_open(broken, moving)
                progress.begin()
                try:
                    return stream(channel, moving, progress)
                except NoStreamError as error:  # the owner has no room now, or a network lets calls through alone
                    shut_at = min(shut_at, time.monotonic())
                    if time.monotonic() - shut_at > _SHUT_S or moving.done() or self._closing.wait(next(pauses)):
                        raise
                    self._again(direction, error)
                except BrokenLinkError as error:
                    if moving.done():
                        raise
                    broken, shut_at = channel, math.inf
                    self._link.broke(channel, error)
                    self._again(direction, error)
                except TransferError as error:
                    damaged += 1
                    closing = self._closing.wait(RETRY_PAUSE_S)
                    if damaged == ATTEMPTS or closing:
                        raise
                    self._again(direction, error)
        except RayZeroError:
            if moving.done():
                moving.result()  # it stalled: that says more than a call that was ended
            raise
        finally:
            settle(moving, None)

    def _again(self, direction: str, error: TransferError) -> None:
        """A stream is to be repeated. Raises why the owner is ending the run, if it is."""
        ended = self._board.ended(self._link.owner)
        if ended is not None:
            raise ended from error  # it says more than a lost connection
        log.info("%s repeats a %s after: %s", self._link.caller.name, direction, error)
        self._recorder.add(TRANSFER_RETRIES, direction=direction, transport="grpc")


def _shared_out(num_owners: int) -> tuple[int, int]:
    threads = min(8, max(2, num_owners))
    return threads, max(1, threads // num_owners)


def most_transfers(num_owners: int) -> int:
    """The most transfers between a rank and one owner at a time: fetches, and in other threads pushes, stages, and
    loads, after which come fetches of what the rank multiplies."""
    threads, streams = _shared_out(num_owners)
    return streams + min(threads, 3 * streams)


def indices(shards: Sequence[Shard]) -> list[int]:
    """Of shards, for messages."""
    return [shard.index for shard in shards]


def _bulk_deadline_s(size_bytes: int) -> float:
    return QUICK_S + size_bytes / _SLOWEST_BYTES_PER_S
