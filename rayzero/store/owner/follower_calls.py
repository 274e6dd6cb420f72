"""Answers followers: processes that read what an owner publishes and take no part in the run.

[Note: nobody waits for a follower] An owner overwrites a shard in place. So what a follower gets is copied first,
beside the updates: a copy during which the shard changed is thrown away, and made between two of the updater's tasks if
that happens again. A follower that is slow, or stopped, keeps at most one batch of copies in the owner's memory, and a
place among those that are served; it is cut as every slow peer is."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from rayzero.errors import EpochOverError, UnsupportedError
from rayzero.owner.publisher import PublishedCopy
from rayzero.protocol.messages import canonical_json
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.long_polls import result_of
from rayzero.store.owner.calls.refused import TooManyCallsError
from rayzero.store.owner.served_model import ServedModel
from rayzero.store.owner.tensor_port import OwnerStream
from rayzero.store.owner.upload_stream import connection_of, open_connection
from rayzero.store.wire.payload import byte_view
from rayzero.store.wire.rpc import link_of
from rayzero.telemetry.names import FOLLOW_BYTES, FOLLOW_SECONDS, FOLLOWER_LAG, FOLLOWERS

MOST = 64  # followers of a model at a time
_AT_ONCE = 4  # of them that are given shards
_TOGETHER_BYTES = 32 << 20  # of copies that travel together, or one shard

Context = Any  # grpc.aio.ServicerContext of this call


class FollowerCalls:
    """FollowerService. Lives on the event loop.

    Knows who follows and what each has; not what becomes of that. Nothing here changes what the run has."""

    def __init__(self, model: ServedModel) -> None:
        self._model, self._instance = model, secrets.randbits(63)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._taken: dict[str, int] = {}  # by follower: the oldest version that it has of a shard here; -1: none
        self._heard: dict[int, tuple[int, float]] = {}  # by shard: its version, and since when: seconds, the loop's
        self._newest = -1  # of those

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
        stream = model.published.open(name)
        stream.hears_totals = False
        self._taken[name] = -1
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
                told = [pb.NoticesResponse.Published(**each._asdict()) for each in published]
                await context.write(pb.NoticesResponse(published=told, followed=first))
                first = None
                if error is not None:
                    raise error
        finally:
            model.published.close(stream)
            del self._taken[name]
            self._measure()

    def _measure(self) -> None:
        recorder, taken = self._model.service.recorder, self._taken.values()
        recorder.set(FOLLOWERS, len(taken))
        recorder.set(FOLLOWER_LAG, self._newest - min(taken, default=self._newest))

    async def get_shards(self, request: pb.GetShardsRequest, context: Context) -> None:
        """Send shards as they are published now, those that the follower does not have. Raises EpochOverError if it
        has asked a predecessor of this owner."""
        model, name = self._model, _name(context)
        if request.instance != self._instance:
            raise EpochOverError(f"optimizer {model.service.owner} is another one than {name} has met")
        versions: list[int] = []
        async with self._turns, connection_of(model.tensors, name, context) as stream:
            batch: list[tuple[int, PublishedCopy]] = []
            size_bytes = 0
            for wanted in request.wanted:
                known = (wanted.content, wanted.writes) if wanted.HasField("content") else None
                copied = await result_of(await model.compute(model.service.copy, wanted.shard, known))
                batch.append((wanted.shard, copied))
                versions.append(copied.version)
                size_bytes += _size(copied)
                if size_bytes >= _TOGETHER_BYTES:
                    await self._send(batch, stream, context)
                    batch, size_bytes = [], 0
            await self._send(batch, stream, context)
        if name in self._taken:
            self._taken[name] = min(versions, default=self._newest)

    async def _send(self, batch: list[tuple[int, PublishedCopy]], stream: OwnerStream, context: Context) -> None:
        parts = [
            pb.GetShardsResponse.Part(
                shard=shard,
                version=copied.version,
                content=copied.content[0],
                writes=copied.content[1],
                size_bytes=_size(copied),
            )
            for shard, copied in batch
        ]
        await context.write(pb.GetShardsResponse(parts=parts))
        going = [(shard, copied.version, copied.values) for shard, copied in batch if copied.values is not None]
        await stream.send((shard, byte_view(values).data) for shard, _, values in going)
        recorder, now = self._model.service.recorder, asyncio.get_running_loop().time()
        for shard, version, values in going:
            recorder.add(FOLLOW_BYTES, values.nbytes, form="whole")
            heard, since = self._heard.get(shard, (-1, now))
            if heard == version:
                recorder.observe(FOLLOW_SECONDS, now - since)

    async def open_tensor_stream(
        self, request: pb.OpenTensorStreamRequest, context: Context
    ) -> pb.OpenTensorStreamResponse:
        """Let a follower open a connection for tensors."""
        return open_connection(self._model.tensors, _name(context), request.host, context)


def _size(copied: PublishedCopy) -> int:
    return 0 if copied.values is None else copied.values.nbytes


def _name(context: Context) -> str:
    """Which follower calls."""
    link = link_of(context.invocation_metadata() or ())
    assert link is not None, "no call gets here that does not say which follower it is of"
    return link.caller
