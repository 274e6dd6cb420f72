"""Makes calls of this host's ranks to owners on other hosts, over one gRPC channel to each, which is the door's, too.

[Note: a pipe] A rank whose gradients leave its host in sums opens no connection: its line to an owner on another host
ends at an optimizer actor of its own host, which makes each call there with the rank's own metadata. So the owner sees
each rank, its life and its link, and what it does about deaths, repeats and late calls stays the same. A pipe breaks
with the rank's line, with the channel, and with a message that was damaged on the way; then the rank opens another
line, as it would open another channel. If no optimizer actor of its host serves for a quarter of ``stall_timeout``,
well within its lease, the rank opens a channel of its own; so do ranks whose host has no room for a copy, to which a
line does not say what is published. Bytes pass between the rank's parcel and a connection that is opened for one
transfer. Nothing here waits for a rank, and a slow owner holds no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import numpy as np
import torch

from rayzero.codecs.record import used_bytes
from rayzero.concurrency.backoff import backoff
from rayzero.errors import StoreError, TransferError
from rayzero.quantities import count
from rayzero.security.clients import host_of
from rayzero.security.credentials import Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.streams import OwnerStream, ShardDestination, in_thread
from rayzero.store.shm.lines import Parcel, room_for
from rayzero.store.wire.grpc_channel import shared_channels
from rayzero.store.wire.payload import Bytes
from rayzero.store.wire.rpc import (
    STORE_SERVICE,
    TOKEN_KEY,
    break_of,
    caller_of,
    from_status,
    gave_no_answer,
    is_broken_link,
    methods,
    transfers,
)
from rayzero.store.wire.tensor_stream import MessageCameError, StreamEndedError
from rayzero.store.wire.tensor_streams import (
    LET_THROUGH,
    Opening,
    TensorStreams,
    UnreachedPortError,
    asked,
    read_answer,
)

_QUICK_S = 30.0  # deadline of a call that lets a connection be opened
_SHUT_S = 20.0  # how long an owner that answers calls may let no connection for tensors in; its caller waits longer
_WHY_CHARS = 500  # of why a pipe broke
_CALLS, _TRANSFERS = methods(STORE_SERVICE), transfers(STORE_SERVICE)


class PipeBrokenError(Exception):
    """A call or its answer did not get through: its caller repeats it over another line."""


class Pipe:
    """The calls of one line to one owner on another host: what ``ModelCalls`` is for an owner of this host.

    Knows messages and bytes; not what is called."""

    def __init__(self, opening: pb.LineOpening, token: str, shown: Identity | None, pool: ThreadPoolExecutor) -> None:
        """``shown``: to owners at addresses that it protects; None: no TLS. ``pool``: moves bytes, for 0.1 s at a time.
        Freed by: close()."""
        self._far = shared_channels().take(opening.to, shown)
        self._peer, self._met, self._pool = opening.peer, opening.met, pool
        self._metadata = ((TOKEN_KEY, token), *opening.metadata.items())

    def close(self) -> None:
        """Its line is over."""
        shared_channels().leave(self._far)

    async def answer(self, service: str, method: str, request: Any, context: Any) -> Any:
        """Make a call; see ``ModelCalls.answer``. Raises the owner's error, or PipeBrokenError."""
        try:
            if method == "Notices":
                return await self._follow(request, context)
            if context.stream is None:
                return await self._call(method, request, context.time_remaining())
            async with self._connection() as stream:
                return await self._transfer(stream, method, request, context)
        except grpc.RpcError as error:
            if is_broken_link(error, met=self._met):
                raise self._broken(break_of(error)) from error
            if gave_no_answer(error):
                await asyncio.get_running_loop().create_future()  # its caller's own deadline ends this
            raise from_status(error, self._peer) from error

    def _broken(self, why: str) -> PipeBrokenError:
        shared_channels().forget(self._far)
        return PipeBrokenError(why[:_WHY_CHARS])

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        return await self._far.call(_CALLS[method], request, timeout_s, self._metadata)

    async def _follow(self, request: pb.NoticesRequest, context: Any) -> None:
        """Pass on what the owner says unasked, until it says no more."""
        async for notice in self._far.follow(_CALLS["Notices"], request, self._metadata):
            self._met = True
            await context.write(notice)
        raise StoreError(f"{self._peer} stopped")

    # ---- bytes

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[OwnerStream]:
        """A context with a connection for one transfer. Those over a pipe are few and large, so none is kept open for
        the next one."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _SHUT_S
        for pause in backoff():
            try:
                opened = await self._open_connection()
                break
            except UnreachedPortError as unreached:  # the owner has no room now, or a network lets calls through alone
                if loop.time() + pause > until:
                    raise StoreError(f"{self._peer}: {unreached}; {LET_THROUGH}") from unreached.__cause__
            await asyncio.sleep(pause)
        stream = OwnerStream(opened, self._peer, self._pool)
        try:
            yield stream
        except StreamEndedError as ended:
            raise self._broken(str(ended)) from ended
        finally:
            stream.close()

    async def _open_connection(self) -> Any:
        caller = caller_of(self._metadata)
        wanted = pb.OpenTensorStreamRequest(rank=None if caller is None else caller[0], host=host_of(self._far.address))
        answer = await self._call("OpenTensorStream", wanted, _QUICK_S)
        opening = Opening.of(answer, protected=self._far.is_protected)
        streams = TensorStreams(self._far.address, lambda host: opening)
        return await in_thread(self._pool, streams.take, streams.close)

    async def _transfer(self, stream: OwnerStream, method: str, request: Any, context: Any) -> Any:
        """Make a transfer, whose bytes are in its caller's parcel. Raises the owner's error, or StreamEndedError."""
        parcel: Parcel = context.stream.parcel
        await stream.say(asked(method, request.SerializeToString(), context.time_remaining()))
        try:
            if method == "Fetch":
                await stream.receive(_landings(request, context.room, parcel))
            else:
                await stream.send([(shard, parcel.take(shard)) for unit in request.units for shard in unit.shards])
        except MessageCameError as came:
            read_answer(came.content)
            raise
        except StreamEndedError:
            if method != "Fetch":  # the owner says why, perhaps
                read_answer(await stream.message())
            raise
        answer = read_answer(await stream.message(at_any_time=True))
        return _TRANSFERS[method].response.FromString(answer.response)


def _landings(request: pb.FetchRequest, room: pb.LineRoom, parcel: Parcel) -> Iterator[ShardDestination]:
    """Where the shards of a Fetch go: into the caller's memory. Raises TransferError if that has no room for them."""
    if len(room.sizes) != len(request.shards):
        wanted = count(len(request.shards), "shard")
        raise TransferError(f"a Fetch of {wanted} has room for {len(room.sizes)}")
    records = set(room.records)
    if records and room_for(room.sizes) > parcel.size_bytes:
        raise TransferError(f"records of {sum(room.sizes):,} bytes do not fit a parcel of {parcel.size_bytes:,}")
    for shard, size in zip(request.shards, room.sizes, strict=True):
        if records:  # the next piece begins where a record ends
            out, is_record = np.empty(size, np.uint8), shard in records
            put = partial(_put, parcel, shard, out, is_record)
            yield ShardDestination(shard=shard, size_bytes=size, out=out, landed=put, is_record=is_record)
        else:
            yield ShardDestination(shard=shard, size_bytes=size, out=np.frombuffer(parcel.room(shard, size), np.uint8))


def _put(parcel: Parcel, shard: int, out: Bytes, is_record: bool) -> None:
    parcel.put(shard, out.data[: used_bytes(torch.from_numpy(out)) if is_record else len(out)])
