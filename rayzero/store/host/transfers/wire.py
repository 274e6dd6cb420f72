"""Moves bytes to and from an owner over TCP: what they wait for, what travels together, what is sent again.

- A fetch waits for publish notices and holds neither a thread nor a call.
- A push waits for the rank's earlier pushes of the unit, and holds neither a thread nor a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from rayzero.codecs import RAW, Codec, codec_for
from rayzero.concurrency.futures import DONE, Gather, fail, settle, when_all
from rayzero.errors import TransferError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.protocol.messages import COMPUTE, PRODUCT, STORED, Contribution
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.channel import BrokenLinkError
from rayzero.store.host.links.owner_link import AnyChannel, LinkDownError, OwnerLink
from rayzero.store.host.publish_board import PublishBoard
from rayzero.store.host.push_order import PushOrder
from rayzero.store.host.stall import Describe, StallWatch
from rayzero.store.host.transfers.batches import Batches
from rayzero.store.host.transfers.calls import upload
from rayzero.store.host.transfers.fetches import (
    ATTEMPTS,
    RETRY_PAUSE_S,
    Progress,
    TransferThreads,
    WireFetches,
    indices,
)
from rayzero.store.host.transfers.parts import Download, Sending, holes_of
from rayzero.store.traffic import count_bytes
from rayzero.store.wire import translate
from rayzero.telemetry.recorder import Recorder

_FORMATS = {"none": pb.WIRE_FORMAT_UNSPECIFIED, "bf16": pb.WIRE_FORMAT_BF16, "int8": pb.WIRE_FORMAT_INT8}  # by codec


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedUnit:
    """What a rank has pushed of a unit, for one owner."""

    unit: UnitLayout
    shards: list[Shard]  # the owner's
    contribution: Contribution
    values: Tensor  # what is pushed: 1D, unit.numel elements, the dtype it is kept in


class WireTransfers(WireFetches):
    """``Transfers`` (store/rank/connection.py) over gRPC.

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
        """``threads``: shared by all owners. ``lead_says``: asks the lead whom the step waits for; None: only owners
        are asked. ``compression``: of gradients, as in ``ZeroConfig.wire_compression``."""
        super().__init__(link, threads, board=board, watch=watch, recorder=recorder)
        self._order, self._lead_says, self._compression = order, lead_says, compression
        self._pushes, self._loads, self._stages = (
            Batches[Sending](threads.pushes, partial(self._run, partial(self._upload, way)), at_once=threads.streams)
            for way in ("Push", "Load", "Stage")
        )
        self._products = Batches[Download](threads.pushes, partial(self._run, self._download))  # nothing is pushed then
        self._staged: Sending | None = None  # the values of the last write, until it is made

    # ---- verbs

    def load(self, gather: Gather, unit: int, shards: list[Shard], values: Tensor) -> None:
        """See ``Transfers.load``."""
        request = pb.LoadRequest(unit=unit, shards=indices(shards))
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
        request = pb.StageRequest(unit=unit, shards=indices(shards), version=version, kind=kind)
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
        """Send parts in one stream over one channel, also again if their bytes are damaged. ``parts``: makes each when
        its turn comes. ``size_bytes``: of all, at most. The channel's user sees it break."""
        sent: list[tuple[int, torch.dtype, Codec]] = []  # of each shard

        def noted(left: Iterator[Sending]) -> Iterator[Sending]:
            for part in left:
                yield part
                sent.extend((shard.numel, part.values.dtype, part.codec) for shard in part.shards)

        move = self._move(channel, size_bytes, timeout_s)
        for left in reversed(range(ATTEMPTS)):
            sent.clear()
            going = parts()
            first = next(going, None)
            if first is None:  # by now, none needs to go; an empty stream would be refused
                return
            try:
                upload(move, method, noted(chain([first], going)))
                break
            except TransferError as error:
                if isinstance(error, BrokenLinkError) or not left or self._closing.wait(RETRY_PAUSE_S):
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
        request = pb.PushRequest(
            contribution=translate.contribution_to_pb(contribution),
            shards=indices(shards),
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
        if kind == PRODUCT:  # it is there before the version is published
            self._when(DONE, part, lambda: self._products.add(part))
            return
        published = self.published(awaited, shards, version)
        self._when(published, part, lambda: self._fetches.add(part))

    def published(self, awaited: str, shards: Sequence[Shard], version: int) -> Future[None]:
        """See ``Transfers.published``."""
        published = self._board.when(self._link.owner, indices(shards), version)
        return self._watch.watch(published, self._name(awaited), partial(self._describe_step, shards[-1]))

    def content(self, shards: Sequence[Shard], version: int) -> int | None:
        """See ``Transfers.content``."""
        return self._board.content(indices(shards), version)

    # ---- waiting

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

    def _upload(self, method: str, parts: list[Sending]) -> None:
        size = sum(part.size for part in parts)
        what = f"optimizer {self._link.owner} to take the {size:,} bytes of a {method}"

        transport = "grpc"

        def stream(channel: AnyChannel, moving: Future[None], progress: Progress) -> None:
            nonlocal transport
            transport = channel.transport
            upload(self._move(channel, size, 0.0, moving, progress.moved), method, iter(parts))

        self._repeat(method.lower(), what, partial(self._describe, parts[0].shards[0]), stream)
        for part in parts:
            for shard in part.shards:
                count_bytes(self._recorder, method.lower(), transport, shard.numel, part.values.dtype, codec=part.codec)
            part.end(None)
