"""Moves bytes to and from an owner: what they wait for, what travels together, what is sent again.

- A fetch waits for publish notices and holds neither a thread nor a call.
- A push waits for the rank's earlier pushes of the unit, and holds neither a thread nor a call.
- When the link breaks, a stream is repeated whole once it is open again: owners drop what they already have.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayzero.codecs import RAW, Codec, codec_for
from rayzero.codecs.record import codec_of, read_record, used_bytes
from rayzero.concurrency.backoff import backoff
from rayzero.concurrency.futures import DONE, Gather, fail, settle, then, when_all
from rayzero.errors import RayZeroError, StallError, StoreClosedError, TransferError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import COMPUTE, PRODUCT, STORED, Contribution
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import BrokenLinkError, NoStreamError
from rayzero.store.host.owner_link import AnyChannel, LinkDownError, OwnerLink
from rayzero.store.host.transfer_calls import (
    Batches,
    Download,
    Move,
    Sending,
    TransferThreads,
    bulk_deadline_s,
    download,
    holes_of,
    upload,
)
from rayzero.store.host.waits import Describe, PublishBoard, PushOrder, StallWatch
from rayzero.store.traffic import count_bytes
from rayzero.store.wire import translate
from rayzero.store.wire.tensor_stream import Progress
from rayzero.telemetry.names import TRANSFER_RETRIES
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

_ATTEMPTS = 3  # at a stream whose bytes are damaged
_RETRY_PAUSE_S = 0.1
_COPIERS = 2  # threads that copy one fetch
_SHUT_S = 30.0  # how long an owner that answers calls may let no connection for tensors in


def _indices(shards: Sequence[Shard]) -> list[int]:
    return [shard.index for shard in shards]


_FORMATS = {"none": pb.WIRE_FORMAT_UNSPECIFIED, "bf16": pb.WIRE_FORMAT_BF16, "int8": pb.WIRE_FORMAT_INT8}  # by codec


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedUnit:
    """What a rank has pushed of a unit, for one owner."""

    unit: UnitLayout
    shards: list[Shard]  # the owner's
    contribution: Contribution
    values: Tensor  # what is pushed: 1D, unit.numel elements, the dtype it is kept in


class WireTransfers:
    """``Transfers`` (store/rank/connection.py) to an owner in another process: over gRPC, but for what is published and
    mapped in this one (``read_in``).

    Knows the owner's link, what is published and whose turn it is; not other owners, or steps."""

    def __init__(
        self,
        link: OwnerLink,
        threads: TransferThreads,
        *,
        board: PublishBoard,
        order: PushOrder,
        watch: StallWatch,
        lead_says: Describe | None,
        compression: str,
        recorder: Recorder,
    ) -> None:
        """``threads``: shared by all owners. ``board``: says what is published, or that the owner is ending the run.
        ``lead_says``: asks the lead whom the step waits for; None: only owners are asked. ``compression``: of
        gradients, as in ``ZeroConfig.wire_compression``."""
        self.owner, self.transport = link.owner, "grpc"
        self._link, self._board, self._watch, self._threads = link, board, watch, threads
        self._closing, self._recorder = threads.closing, recorder
        self._order, self._lead_says, self._compression = order, lead_says, compression
        self._pushes, self._loads, self._stages = (
            Batches[Sending](threads.pushes, partial(self._run, partial(self._upload, way)), at_once=threads.streams)
            for way in ("Push", "Load", "Stage")
        )
        move = partial(self._run, self._download)
        self._fetches = Batches[Download](threads.fetches, move, at_once=threads.streams)
        self._products = Batches[Download](threads.pushes, move)  # nothing is pushed then
        self._staged: Sending | None = None  # the values of the last write, until it is made
        self._mapped: Callable[[int], Tensor] | None = None  # by number, a shard's published parameters
        self._counted = ""  # as what bytes that are copied from there are counted

    def read_in(self, mapped: Callable[[int], Tensor], *, copied: bool) -> None:
        """Read what is published in memory that is mapped here: the owner's own, or its host's copy (``copied``).
        ``mapped``: of a shard, by number: 1D, the unit's dtype, or a record (codecs/record.py)."""
        self._mapped, self._counted = mapped, "host" if copied else "shm"
        self.transport = "grpc" if copied else "shm"

    # ---- verbs

    def load(self, gather: Gather, unit: int, shards: list[Shard], values: Tensor) -> None:
        """See ``Transfers.load``."""
        request = pb.LoadRequest.Unit(unit=unit, shards=_indices(shards))
        part = Sending(gather=gather, shards=shards, values=values, codec=RAW, request=request)
        self._when(DONE, part, lambda: self._loads.add(part))

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
        request = pb.StageRequest.Unit(unit=unit, shards=_indices(shards), version=version, kind=kind)
        part = Sending(gather=gather, shards=shards, values=values, codec=RAW, request=request)
        if kind != PRODUCT:
            self._staged = part
        made.add_done_callback(lambda _: self._forget_staged(part))
        self._when(DONE, part, lambda: self._stages.add(part))

    def _forget_staged(self, part: Sending) -> None:
        if self._staged is part:
            self._staged = None

    def stage_again(self, channel: AnyChannel, timeout_s: float) -> None:
        """Send the values of a write that is not made yet to the owner's successor; see ``push_again``."""
        part = self._staged
        if part is not None:
            self._send_now(channel, "Stage", lambda: iter([part]), part.size, timeout_s)

    def _send_now(
        self,
        channel: AnyChannel,
        method: str,
        parts: Callable[[], Iterator[Sending]],
        size_bytes: int,
        timeout_s: float,
    ) -> None:
        """Send parts over one channel, also again if their bytes are damaged. ``parts``: makes each when
        its turn comes. ``size_bytes``: of all, at most. The channel's user sees it break."""
        sent: list[tuple[int, torch.dtype, Codec]] = []  # of each shard

        def noted(left: Iterator[Sending]) -> Iterator[Sending]:
            for part in left:
                yield part
                sent.extend((shard.numel, part.values.dtype, part.codec) for shard in part.shards)

        move = Move(channel=channel, deadline_s=timeout_s + bulk_deadline_s(size_bytes))
        for left in reversed(range(_ATTEMPTS)):
            sent.clear()
            try:
                upload(move, method, noted(parts()))
                break
            except TransferError as error:
                if isinstance(error, BrokenLinkError) or not left or self._closing.wait(_RETRY_PAUSE_S):
                    raise
                self._again(method.lower(), error)
        for numel, dtype, codec in sent:
            count_bytes(self._recorder, method.lower(), channel.transport, numel, dtype, codec=codec)

    def push(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], contribution: Contribution, grads: Tensor
    ) -> None:
        """Send gradients when it is their turn; see ``GradientSender.push``."""
        part = self._push_of(gather, unit, shards, contribution, grads)
        if contribution.summands:  # the sums of a unit are sent one after the other
            self._when(DONE, part, lambda: self._pushes.add(part))
            return
        part.on_end = partial(self._order.end, self._link.owner, contribution)
        turn = self._order.turn(self._link.owner, contribution)
        self._when(turn, part, lambda: self._pushes.add(part))

    def _push_of(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], contribution: Contribution, grads: Tensor
    ) -> Sending:
        codec = RAW if contribution.sum_of or contribution.summands else codec_for(self._compression, unit.dtype)
        request = pb.PushRequest.Unit(
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
        self, channel: AnyChannel, pushes: Callable[[], Iterator[PushedUnit]], size_bytes: int, timeout_s: float
    ) -> None:
        """Send what this rank has pushed to an owner that may lack it, over a channel to it; blocks.

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
        if kind == PRODUCT:  # it is there before the version is published
            self._when(DONE, part, lambda: self._products.add(part))
            return

        def ask() -> None:
            self._when(self.published(awaited, shards, version), part, lambda: self._fetches.add(part))

        if kind == COMPUTE and self._mapped is not None:
            self._copy_when_published(gather, unit, shards, version, out, ask)
        else:
            ask()

    def published(self, awaited: str, shards: Sequence[Shard], version: int) -> Future[None]:
        """See ``Transfers.published``."""
        published = self._board.when(self._link.owner, _indices(shards), version)
        return self._watch.watch(published, self._name(awaited), partial(self._describe_step, shards[-1]))

    def fetch_kept(
        self,
        gather: Gather,
        unit: UnitLayout,
        shards: list[Shard],
        version: int,
        place: Callable[[Shard], Tensor],
        since: int | None = None,
    ) -> None:
        """Fetch published parameters as the owner keeps them. ``place``: where a shard goes: 1D, its values in the
        unit's dtype, or its record (codecs/record.py). ``since``: the version that all of them have there, so that what
        has changed may come in their place; None: they come whole."""
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
            since=since,
        )
        self._when(DONE, part, lambda: self._fetches.add(part))

    # ---- copying what is mapped here

    def _copy_when_published(
        self, gather: Gather, unit: UnitLayout, shards: list[Shard], version: int, out: Tensor, ask: Callable[[], None]
    ) -> None:
        """``ask``: has the owner send the bytes, or say why there are none."""

        def begin(ready: Future[None]) -> None:
            error = ready.exception()
            if error is not None:
                gather.end(error)
            elif not self._board.are_at(_indices(shards), version):
                ask()  # the version is gone, or the owner is ending the run: only the owner knows which
            elif gather.start():
                self._copy_soon(gather, unit, shards, out)

        self.published(f"{unit.name} v{version}", shards, version).add_done_callback(begin)

    def _copy_soon(self, gather: Gather, unit: UnitLayout, shards: list[Shard], out: Tensor) -> None:
        """Copy, or decode, in several threads at once: on some machines one core does not reach the memory's speed."""
        pieces = [shards[i::_COPIERS] for i in range(_COPIERS) if shards[i::_COPIERS]]
        left = Gather(len(pieces))
        left.future.add_done_callback(lambda done: gather.end(done.exception()))
        for piece in pieces:
            try:
                self._threads.fetches.submit(left.run, partial(self._copy, unit, piece, out))
            except RuntimeError:  # the pool is shut down
                left.end(StoreClosedError("the store was closed"))

    def _copy(self, unit: UnitLayout, shards: list[Shard], out: Tensor) -> None:
        assert self._mapped is not None
        size = 0
        for shard in shards:
            kept, values = self._mapped(shard.index), out[shard.start : shard.stop]
            if unit.is_coded:
                read_record(kept, unit, shard, values)
                size += used_bytes(kept)
            else:
                values.copy_(kept)
                size += kept.nbytes
        numel = sum(shard.numel for shard in shards)
        count_bytes(self._recorder, "fetch", self._counted, numel, out.dtype, size=size, codec=codec_of(unit))

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

    def _describe_step(self, shard: Shard, timeout_s: float) -> Future[str]:
        """What the owner does for a shard, and whom the lead waits for: the owner may be idle because a rank is."""
        if self._lead_says is None:
            return self._describe(shard, timeout_s)
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
            shards=[index for part in parts for index in _indices(part.shards)],
            version=parts[0].version,
            kind=parts[0].what,
            since=parts[0].since,
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
            deadline_s = bulk_deadline_s(sum(part.size for part in left))
            move = Move(channel=channel, deadline_s=deadline_s, moving=moving, progress=progress)
            sizes = [size for part in left for size in part.sizes]
            records = {index for part in left if part.kept is not None for index in _indices(part.shards)}
            try:
                with download(move, self._request(left), sizes, records) as take:
                    for part in left:
                        part.fill(take)
                        self._count_fetched(part, channel.transport)
                        part.end(None)
            except TransferError:
                for part in left:
                    part.since = None  # what is in its place is something else, perhaps
                raise

        self._repeat("fetch", self._name(parts[0].awaited), describe, stream)

    def _count_fetched(self, part: Download, transport: str) -> None:
        numel, codec = sum(shard.numel for shard in part.shards), RAW if part.kept is None else codec_of(part.kept)
        count_bytes(self._recorder, "fetch", transport, numel, part.dtype, codec=codec, size=part.received)

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
        log.info("%s repeats a %s after: %s", self._link.caller.name, direction, error)
        self._recorder.add(TRANSFER_RETRIES, direction=direction, transport="grpc")

    def _upload(self, method: str, parts: list[Sending]) -> None:
        size = sum(part.size for part in parts)
        what = f"optimizer {self._link.owner} to take the {size:,} bytes of a {method}"

        transport = "grpc"

        def stream(channel: AnyChannel, moving: Future[None], progress: Progress) -> None:
            nonlocal transport
            transport = channel.transport
            move = Move(channel=channel, deadline_s=bulk_deadline_s(size), moving=moving, progress=progress)
            upload(move, method, parts)

        self._repeat(method.lower(), what, partial(self._describe, parts[0].shards[0]), stream)
        for part in parts:
            for shard in part.shards:
                count_bytes(self._recorder, method.lower(), transport, shard.numel, part.values.dtype, codec=part.codec)
            part.end(None)
