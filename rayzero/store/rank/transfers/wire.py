"""Moves bytes between a rank and an owner over TCP: what they wait for, what travels together, what is sent again.

- A fetch waits for publish notices and holds neither a thread nor a call.
- A push waits for the rank's earlier pushes of the unit, and holds neither a thread nor a call.
- When the link breaks, a stream is repeated whole once it is open again: owners drop what they already have.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rayzero.codecs import RAW, Codec, codec_for
from rayzero.codecs.record import codec_of
from rayzero.concurrency.backoff import backoff
from rayzero.concurrency.futures import fail, settle, then, when_all
from rayzero.concurrency.gather import Gather
from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import RayZeroError, StallError, StoreClosedError, TransferError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import COMPUTE, STORED, Contribution
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rank.links.channel import QUICK_S, BrokenLinkError, Channel, NoStreamError
from rayzero.store.rank.links.owner_link import LinkDownError, OwnerLink
from rayzero.store.rank.publish_board import PublishBoard
from rayzero.store.rank.push_order import PushOrder
from rayzero.store.rank.stall import Describe, StallWatch
from rayzero.store.rank.transfers.batches import Batches
from rayzero.store.rank.transfers.calls import Move, download, upload
from rayzero.store.rank.transfers.parts import Download, Sending, holes_of
from rayzero.store.traffic import count_bytes
from rayzero.store.wire import translate
from rayzero.telemetry.names import TRANSFER_RETRIES
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

_ATTEMPTS = 3  # at a stream whose bytes are damaged
_RETRY_PAUSE_S = 0.1
_FORMATS = {"none": pb.WIRE_FORMAT_UNSPECIFIED, "bf16": pb.WIRE_FORMAT_BF16, "int8": pb.WIRE_FORMAT_INT8}  # by codec
_SHUT_S = 30.0  # how long an owner that answers calls may let no connection for tensors in
_SLOWEST_BYTES_PER_S = 10e6  # a stream slower than this is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedUnit:
    """What a rank has pushed of a unit, for one owner."""

    unit: UnitLayout
    shards: list[Shard]  # the owner's
    contribution: Contribution
    values: Tensor  # what is pushed: 1D, unit.numel elements, the dtype it is kept in


class _Progress:
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


class WireTransfers:
    """``Transfers`` (store/rank/connection.py) over gRPC.

    Knows the owner's link, what is published and whose turn it is; not other owners, or steps."""

    def __init__(
        self,
        link: OwnerLink,
        *,
        fetches: ThreadPoolExecutor,
        pushes: ThreadPoolExecutor,
        board: PublishBoard,
        order: PushOrder,
        watch: StallWatch,
        closing: threading.Event,
        lead_says: Describe,
        compression: str,
        recorder: Recorder,
        streams: int = 1,
    ) -> None:
        """``fetches``, ``pushes``: the threads that move bytes, shared by all owners. ``closing``: set when the store
        closes. ``lead_says``: asks the lead whom the step waits for. ``compression``: of gradients, as in
        ``ZeroConfig.wire_compression``. ``streams``: the most streams of one method at once."""
        self.owner, self.transport = link.owner, "grpc"
        self._link, self._board, self._order, self._watch = link, board, order, watch
        self._closing, self._lead_says = closing, lead_says
        self._compression, self._recorder = compression, recorder
        self._fetches: Batches[Download] = Batches(fetches, partial(self._run, self._download), at_once=streams)
        self._pushes: Batches[Sending] = Batches(
            pushes, partial(self._run, partial(self._upload, "Push")), at_once=streams
        )
        self._loads: Batches[Sending] = Batches(
            pushes, partial(self._run, partial(self._upload, "Load")), at_once=streams
        )
        self._stages: Batches[Sending] = Batches(
            pushes, partial(self._run, partial(self._upload, "Stage")), at_once=streams
        )
        self._staged: Sending | None = None  # the values of the last write, until it is made

    # ---- verbs

    def load(self, gather: Gather, unit: int, shards: list[Shard], values: Tensor) -> None:
        """See ``Transfers.load``."""
        request = pb.LoadRequest(unit=unit, shards=_indices(shards))
        part = Sending(gather=gather, shards=shards, values=values, codec=RAW, request=request)
        self._when(_DONE, part, lambda: self._loads.add(part))

    def stage(
        self,
        gather: Gather,
        unit: int,
        shards: list[Shard],
        version: int,
        kind: str,
        values: Tensor,
        made: Future[None],
    ) -> None:
        """See ``Transfers.stage``."""
        request = pb.StageRequest(unit=unit, shards=_indices(shards), version=version, kind=kind)
        part = Sending(gather=gather, shards=shards, values=values, codec=RAW, request=request)
        self._staged = part
        made.add_done_callback(lambda _: self._forget_staged(part))
        self._when(_DONE, part, lambda: self._stages.add(part))

    def _forget_staged(self, part: Sending) -> None:
        if self._staged is part:
            self._staged = None

    def stage_again(self, channel: Channel, timeout_s: float) -> None:
        """Send the values of a write that is not made yet to the owner's successor; see ``push_again``."""
        part = self._staged
        if part is not None:
            self._send_now(channel, "Stage", lambda: iter([part]), part.size, timeout_s)

    def _send_now(
        self, channel: Channel, method: str, parts: Callable[[], Iterator[Sending]], size_bytes: int, timeout_s: float
    ) -> None:
        """Send parts in one stream over one channel, also again if their bytes are damaged. ``parts``: makes each when
        its turn comes. ``size_bytes``: of all, at most. Whoever has the channel sees it break."""
        sent: list[tuple[int, torch.dtype, Codec]] = []  # of each shard

        def noted(left: Iterator[Sending]) -> Iterator[Sending]:
            for part in left:
                yield part
                sent.extend((shard.numel, part.values.dtype, part.codec) for shard in part.shards)

        move = self._move(channel, size_bytes, timeout_s)
        for left in reversed(range(_ATTEMPTS)):
            sent.clear()
            going = parts()
            first = next(going, None)
            if first is None:  # by now, none needs to go; an empty stream would be refused
                return
            try:
                upload(move, method, noted(chain([first], going)))
                break
            except TransferError as error:
                if isinstance(error, BrokenLinkError) or not left or self._closing.wait(_RETRY_PAUSE_S):
                    raise
                self._again(method.lower(), error)
        for numel, dtype, codec in sent:
            count_bytes(self._recorder, method.lower(), "grpc", numel, dtype, codec=codec)

    def _move(
        self,
        channel: Channel,
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

    def push(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], contribution: Contribution, grads: Tensor
    ) -> None:
        """Send gradients when it is their turn; see ``GradientSender.push``."""
        part = self._push_of(gather, unit, shards, contribution, grads)
        if contribution.summands:  # the sums of a unit are sent one after the other
            self._when(_DONE, part, lambda: self._pushes.add(part))
            return
        part.on_end = partial(self._order.end, self._link.owner, contribution)
        turn = self._order.turn(self._link.owner, contribution)
        self._when(turn, part, lambda: self._pushes.add(part))

    def _push_of(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], contribution: Contribution, grads: Tensor
    ) -> Sending:
        codec = RAW if contribution.sum_of or contribution.summands else codec_for(self._compression, unit.dtype)
        request = pb.PushRequest(
            contribution=translate.contribution_to_pb(contribution),
            shards=_indices(shards),
            format=_FORMATS[codec.name],
        )
        return Sending(
            gather=gather,
            shards=shards,
            values=grads,
            codec=codec,
            holes=holes_of(unit, contribution.presence) if codec.mixes else (),
            request=request,
        )

    def push_again(
        self, channel: Channel, pushes: Callable[[], Iterator[PushedUnit]], size_bytes: int, timeout_s: float
    ) -> None:
        """Send what this rank has pushed to an owner that may lack it, in one stream over a channel to it; blocks.

        pushes: makes each unit's when its turn comes.
        size_bytes: of all of them, at most. timeout_s: seconds to add to those that the bytes may take.

        Raises as ``Channel.answer`` does."""
        self._send_now(channel, "Push", lambda: map(self._again_of, pushes()), size_bytes, timeout_s)

    def _again_of(self, again: PushedUnit) -> Sending:
        return self._push_of(Gather(1), again.unit, again.shards, again.contribution, again.values)

    def fetch(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], version: int, kind: str, out: Tensor
    ) -> None:
        """See ``Transfers.fetch``."""
        awaited = f"{unit.name} v{version}"
        kept = unit if kind == COMPUTE and unit.is_coded else None
        what = kind if kept is None else STORED
        part = Download(
            gather=gather,
            awaited=awaited,
            shards=shards,
            version=version,
            what=what,
            dtype=out.dtype,
            place=lambda shard: out[shard.start : shard.stop],
            kept=kept,
        )
        published = self.published(awaited, shards, version)
        self._when(published, part, lambda: self._fetches.add(part))

    def fetch_kept(
        self,
        gather: Gather,
        unit: UnitLayout,
        shards: list[Shard],
        version: int,
        place: Callable[[Shard], Tensor],
        moved: Callable[[], None],
    ) -> None:
        """Fetch published parameters as the owner keeps them. ``place``: where a shard goes: 1D, its values in the
        unit's dtype, or its record (codecs/record.py). ``moved`` is called for every chunk, in any thread."""
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
            moved=moved,
        )
        self._when(_DONE, part, lambda: self._fetches.add(part))

    def published(self, awaited: str, shards: Sequence[Shard], version: int) -> Future[None]:
        """See ``Transfers.published``."""
        published = self._board.when(self._link.owner, _indices(shards), version)
        return self._watch.watch(published, self._name(awaited), partial(self._describe_step, shards[-1]))

    def content(self, shards: Sequence[Shard], version: int) -> int | None:
        """See ``Transfers.content``."""
        return self._board.content(_indices(shards), version)

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
                part.gather.end(StoreClosedError(f"rank {self._link.rank} used its store after close()"))

        ready.add_done_callback(begin)

    def _name(self, awaited: str) -> str:
        return f"{awaited} from optimizer {self._link.owner}"

    def _describe_step(self, shard: Shard, timeout_s: float) -> Future[str]:
        """What the owner does for a shard, and whom the lead waits for: the owner may be idle because a rank is."""
        lead_says = self._lead_says(timeout_s)
        both: Future[str] = Future()

        def lead_answered(said: str, done: Future[str]) -> None:
            error = done.exception()
            if isinstance(error, LinkDownError):  # no news, however often that link breaks and comes back
                fail(both, LinkDownError(f"{said}; the lead: {error}"))
            else:
                settle(both, f"{said}; the lead: {error or done.result()}")

        def answered(said: str) -> None:
            lead_says.add_done_callback(partial(lead_answered, said))

        when_all([self._describe(shard, timeout_s)], lambda said: answered(*said), partial(fail, both))
        return both

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
            rank=self._link.rank,
            shards=[index for part in parts for index in _indices(part.shards)],
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

        def stream(channel: Channel, moving: Future[None], progress: _Progress) -> None:
            left = [part for part in parts if not part.ended]
            if not left:  # all bytes were here when the link broke
                return
            move = self._move(channel, sum(part.size for part in left), 0.0, moving, progress.moved)
            with download(move, self._request(left)) as take:
                for part in left:
                    part.fill(take)
                    numel = sum(shard.numel for shard in part.shards)
                    codec = RAW if part.kept is None else codec_of(part.kept)
                    size = part.received
                    count_bytes(self._recorder, "fetch", "grpc", numel, part.dtype, codec=codec, size=size)
                    part.end(None)

        self._repeat("fetch", self._name(parts[0].awaited), describe, stream)

    def _upload(self, method: str, parts: list[Sending]) -> None:
        size = sum(part.size for part in parts)
        what = f"optimizer {self._link.owner} to take the {size:,} bytes of a {method}"

        def stream(channel: Channel, moving: Future[None], progress: _Progress) -> None:
            upload(self._move(channel, size, 0.0, moving, progress.moved), method, iter(parts))

        self._repeat(method.lower(), what, partial(self._describe, parts[0].shards[0]), stream)
        for part in parts:
            for shard in part.shards:
                count_bytes(self._recorder, method.lower(), "grpc", shard.numel, part.values.dtype, codec=part.codec)
            part.end(None)

    def _repeat(
        self,
        direction: str,
        what: str,
        describe: Describe,
        stream: Callable[[Channel, Future[None], _Progress], None],
    ) -> None:
        """Run a stream, and repeat all of it after the link was down, or if bytes are damaged. Raises StallError when
        no chunk passes and the owner makes no progress; other errors at once. ``stream`` ends its call when the
        future that it is given is done."""
        progress, moving = _Progress(), Future[None]()
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
                    closing = self._closing.wait(_RETRY_PAUSE_S)
                    if damaged == _ATTEMPTS or closing:
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
        log.info("rank %d repeats a %s after: %s", self._link.rank, direction, error)
        self._recorder.add(TRANSFER_RETRIES, direction=direction, transport="grpc")


def transfer_threads(num_owners: int, rank: int, direction: str) -> tuple[ThreadPoolExecutor, int]:
    """The threads that move one rank's bytes in one direction, and how many of them one owner may hold. So a push never
    queues behind fetches, or behind the pushes to an owner that hangs."""
    threads, streams = _shared_out(num_owners)
    name = f"rayzero-rank{rank}-{direction}"
    return ThreadPoolExecutor(threads, name, initializer=use_torch_threads, initargs=(1,)), streams


def _shared_out(num_owners: int) -> tuple[int, int]:
    threads = min(8, max(2, num_owners))
    return threads, max(1, threads // num_owners)


def most_transfers(num_owners: int) -> int:
    """The most transfers between a rank and one owner at a time: fetches, and the other way pushes, loads and stages,
    which share the threads of their direction."""
    threads, streams = _shared_out(num_owners)
    return streams + min(threads, 3 * streams)


def _indices(shards: Sequence[Shard]) -> list[int]:
    return [shard.index for shard in shards]


def _bulk_deadline_s(size_bytes: int) -> float:
    return QUICK_S + size_bytes / _SLOWEST_BYTES_PER_S


_DONE: Future[None] = Future()
_DONE.set_result(None)
