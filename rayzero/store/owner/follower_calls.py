"""Answers followers: processes that read what an owner publishes and take no part in the run.

[Note: nobody waits for a follower] An owner overwrites a shard in place. So what a follower gets is copied first,
beside the updates: a copy during which the shard changed is thrown away, and made between two of the updater's tasks if
that happens again. A follower that is slow, or stopped, keeps at most one batch of copies in the owner's memory, and a
place among those that are served; it is cut as every slow peer is."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rayzero.codecs.changes import Change, Form
from rayzero.errors import EpochOverError, UnsupportedError
from rayzero.memory.planner import SERVED_AT_ONCE, SERVED_BYTES
from rayzero.protocol.messages import canonical_json
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import TooManyCallsError
from rayzero.store.owner.calls.long_calls import result_of
from rayzero.store.owner.served_model import PublishStream, ServedModel
from rayzero.store.wire import translate
from rayzero.store.wire.payload import byte_view
from rayzero.store.wire.rpc import FOLLOWER_SERVICE, link_of
from rayzero.telemetry.names import FOLLOW_BYTES, FOLLOW_SECONDS, FOLLOWER_LAG, FOLLOWERS

MOST = 64  # followers of a model at a time
_NOTED_S = 1.0  # the longest that the changes of a published version are waited for

Context = Any  # of this call: grpc.aio.ServicerContext, or TransferContext
_Going = tuple[pb.GetShardsResponse.Part, memoryview | None]  # and its bytes


class FollowerCalls:
    """FollowerService. Lives on the event loop.

    Knows who follows and what each has; not what becomes of that. Nothing here changes what the run has."""

    def __init__(self, model: ServedModel) -> None:
        self._model, self._instance = model, secrets.randbits(63)
        self._turns = asyncio.Semaphore(SERVED_AT_ONCE)
        self._taken: dict[str, int] = {}  # by follower: the oldest version that it has of a shard here; -1: none
        self._streams: dict[str, PublishStream] = {}  # by follower: its newest
        self._heard: dict[int, tuple[int, float]] = {}  # by shard: its version, and since when: seconds, the loop's
        self._newest = -1  # of those
        self._news = asyncio.Event()  # set, and replaced, when changes are noted
        self._listens = False

    async def notices(self, request: pb.NoticesRequest, context: Context) -> None:
        """Tell a follower what there is, once a rank has attached, and what is published until it ends. Raises
        UnsupportedError if followers cannot read this model, TooManyCallsError if there are too many."""
        model, name = self._model, _name(context)
        await result_of(model.begun)
        spec = model.spec
        assert spec is not None
        if spec.offload_fraction < 1:
            raise UnsupportedError("followers need offload_fraction=1: a device keeps a part of this run's optimizer")
        if len(self._taken) >= MOST:
            raise TooManyCallsError(f"optimizer {model.service.owner} has {MOST} followers, the most at a time")
        if not self._listens:
            self._listens, loop = True, asyncio.get_running_loop()
            model.service.changes.listen(partial(self._tell, loop))
        stream = model.published.open(name)
        stream.hears_totals = False
        self._taken[name], self._streams[name] = -1, stream
        ownership = model.service.ownership
        first: pb.Followed | None = pb.Followed(
            layout=canonical_json(spec.layout.to_json()).encode(),
            lineage=spec.lineage,
            epoch=0 if ownership is None else ownership.epoch,
            shards=model.service.shards,
            instance=self._instance,
        )
        try:
            while True:
                published, error = await stream.next()
                now = asyncio.get_running_loop().time()
                for each in published:
                    if self._heard.get(each.shard, (-1, now))[0] < each.version:
                        self._heard[each.shard] = each.version, now
                        self._newest = max(self._newest, each.version)
                self._measure()
                told = map(translate.published_to_pb, published)
                await context.write(pb.NoticesResponse(published=told, followed=first))
                first = None
                if error is not None:
                    raise error
        finally:
            model.published.close(stream)
            if self._streams[name] is stream:  # else a newer one, which ended this
                del self._taken[name], self._streams[name]
            self._measure()

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(self._noted)

    def _noted(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _measure(self) -> None:
        recorder, taken = self._model.service.recorder, self._taken.values()
        recorder.set(FOLLOWERS, len(taken))
        recorder.set(FOLLOWER_LAG, self._newest - min(taken, default=self._newest))

    async def get_shards(self, request: pb.GetShardsRequest, context: Context) -> None:
        """Send what is new in shards for a follower, up to the version that it asks for: changes or, where these are
        not known or more, the shard as it is published by then. Raises EpochOverError if the follower has met a
        predecessor of this owner."""
        model, name = self._model, _name(context)
        if request.instance != self._instance:
            raise EpochOverError(f"optimizer {model.service.owner} is another one than {name} has met")
        model.service.changes.follow()  # first: changes of what is copied next are noted
        versions: list[int] = []
        async with self._turns:
            batch: list[_Going] = []
            for wanted in request.wanted:
                going = await self._changes(wanted, request.version)
                batch += [await self._whole(wanted)] if going is None else going
                versions.append(batch[-1][0].version)
                if sum(part.size_bytes for part, _ in batch) >= SERVED_BYTES:
                    await self._send(batch, context)
                    batch = []
            await self._send(batch, context)
        if name in self._taken:
            self._taken[name] = min(versions, default=self._newest)

    async def _changes(self, wanted: pb.GetShardsRequest.Wanted, version: int) -> list[_Going] | None:
        """What leads from the version that a follower has to ``version``, or as near as is known; None: the shard is to
        come whole."""
        service, has = self._model.service, wanted.version
        if not wanted.HasField("version"):
            return None
        since = partial(service.changes.since, wanted.shard, has, wanted.checksum)
        news, found = self._news, await self._model.compute(since)
        with suppress(TimeoutError):
            async with asyncio.timeout(_NOTED_S):
                while found is not None and _newest(found, has) < version:  # it is published, and noted in a moment
                    await news.wait()
                    news, found = self._news, await self._model.compute(since)
        if found is None:
            return None
        kept = [each for each in found if each.after <= version and each.form is not Form.NOTHING]
        if sum(len(each.payload) for each in kept) > service.shard(wanted.shard).params.nbytes:
            return None
        part = partial(pb.GetShardsResponse.Part, shard=wanted.shard, writes=wanted.writes)
        going: list[_Going] = []
        for each in kept:
            positions, size = each.form is Form.POSITIONS, len(each.payload)
            change = part(
                version=each.after, content=each.after, size_bytes=size, positions=positions, checksum=each.checksum
            )
            going.append((change, memoryview(each.payload)))
        reached = max(has, min(version, _newest(found, has)))
        return [*going, (part(version=reached, content=kept[-1].after if kept else wanted.content), None)]

    async def _whole(self, wanted: pb.GetShardsRequest.Wanted) -> _Going:
        known = (wanted.content, wanted.writes) if wanted.HasField("content") else None
        copied = await result_of(await self._model.compute(self._model.service.copy, wanted.shard, known))
        content, writes = copied.content
        values = None if copied.values is None else byte_view(copied.values).data
        part = pb.GetShardsResponse.Part(
            shard=wanted.shard,
            version=copied.version,
            content=content,
            writes=writes,
            size_bytes=0 if values is None else values.nbytes,
        )
        return part, values

    async def _send(self, batch: list[_Going], context: Context) -> None:
        await context.write(pb.GetShardsResponse(parts=[part for part, _ in batch]))
        await context.stream.send((part.shard, content) for part, content in batch if content is not None)
        recorder, now = self._model.service.recorder, asyncio.get_running_loop().time()
        for part, content in batch:
            if content is None:
                continue
            recorder.add(FOLLOW_BYTES, content.nbytes, form="changes" if part.HasField("checksum") else "whole")
            heard, since = self._heard.get(part.shard, (-1, now))
            if heard == part.version:
                recorder.observe(FOLLOW_SECONDS, now - since)

    async def open_tensor_stream(
        self, request: pb.OpenTensorStreamRequest, context: Context
    ) -> pb.OpenTensorStreamResponse:
        """Let a follower open a connection for tensors."""
        return self._model.tensors.expect(_name(context), FOLLOWER_SERVICE, request.host, context)


def _newest(found: Sequence[Change], has: int) -> int:
    return found[-1].after if found else has


def _name(context: Context) -> str:
    """Which follower calls."""
    link = link_of(context.invocation_metadata() or ())
    assert link is not None, "no call gets here that does not say which follower it is of"
    return link.caller
