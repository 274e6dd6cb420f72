"""Calls to an owner that move tensors, whose bytes are on a connection beside them.

See [Note: beside gRPC] in store/wire/tensor_stream.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayzero.codecs import RAW, Codec, codec_for
from rayzero.errors import StoreError, TransferError
from rayzero.layout.model_layout import Shard, UnitLayout, dtype_name
from rayzero.protocol.messages import Contribution
from rayzero.security.credentials import names_shown
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import WrongSenderError
from rayzero.store.owner.calls.long_polls import result_of
from rayzero.store.owner.served_model import ServedModel
from rayzero.store.owner.tensor_port import OwnerStream, ShardDestination, TensorPort
from rayzero.store.wire import translate
from rayzero.store.wire.payload import byte_view
from rayzero.store.wire.rpc import stream_of


def open_connection(port: TensorPort, client: str, host: str, context: Any) -> pb.OpenTensorStreamResponse:
    """Let the client of a call (``context``: grpc.aio's) open a connection for tensors, with keys if the call came over
    TLS. ``client``: "rank 3" or "optimizer 1", which was checked. ``host``: of this owner, as the client has
    it. Raises StoreError if the client has too many."""
    protected = names_shown(context.auth_context()) is not None
    expected = port.expect(client, host, protected=protected)
    answer = pb.OpenTensorStreamResponse(number=expected.number, port=expected.port, ticket=expected.ticket)
    if expected.keys is not None:
        answer.client_key, answer.owner_key = expected.keys.receiving, expected.keys.sending
    return answer


@asynccontextmanager
async def connection_of(port: TensorPort, client: str, context: Any) -> AsyncIterator[OwnerStream]:
    """A context in which a client's call has the connection that it names. Raises StoreError if it names none,
    TransferError if the connection has ended, HandshakeError if it is another client's."""
    parcel = getattr(context, "parcel_stream", None)  # of a call over a line (store/owner/entrances/lobby.py)
    if parcel is not None:
        yield parcel
        return
    number = stream_of(context.invocation_metadata() or ())
    if number is None:
        raise StoreError(f"a call of {client} that moves tensors names no connection for them")
    async with port.of(number, client).transfer() as stream:
        yield stream


class UploadStream:
    """A client's stream: messages that say what comes, and the bytes of each on the connection."""

    def __init__(self, requests: AsyncIterator[Any], stream: OwnerStream) -> None:
        self._requests, self._stream = requests, stream
        self.came = 0  # messages

    async def announced(self) -> AsyncIterator[Any]:
        """The messages, one after the other. The caller receives all bytes that one announces before it asks for the
        next. Raises TransferError if one was damaged on the way."""
        async for request in self._requests:
            if isinstance(request, TransferError):
                raise request
            self.came += 1
            yield request

    async def values(self, shard: Shard, dtype: torch.dtype) -> Tensor:
        """Receive a shard's values into new memory: 1D. Raises as ``receive``."""
        values = torch.empty(shard.numel, dtype=dtype, device="cpu")
        await self.receive(ShardDestination(shard=shard.index, size_bytes=values.nbytes, out=byte_view(values)))
        return values

    async def receive(self, *landings: ShardDestination) -> None:
        """Read shards, in this order, and do with each what is to be done then, in one thread. Raises TransferError if
        other bytes come."""
        await self._stream.receive(landings)


_CODECS: dict[int, str] = {pb.WIRE_FORMAT_UNSPECIFIED: "none", pb.WIRE_FORMAT_BF16: "bf16", pb.WIRE_FORMAT_INT8: "int8"}


async def receive_push(model: ServedModel, request: pb.PushRequest, upload: UploadStream, sender: int | None) -> None:
    """Receive the shards that one message of a push announces; this may wait for the rank's earlier pushes. A thread is
    sent for once for all shards that have memory: the way there takes as long as a tenth of a shard. ``sender``: a
    rank; None: an owner, which sends sums of its host's ranks. Raises WrongSenderError for gradients that are not the
    sender's to send, StoreError for those that the model does not take, TransferError for bytes that are not theirs."""
    contribution = translate.contribution_from_pb(request.contribution)
    _require_sender(contribution, sender)
    landings: list[ShardDestination] = []

    async def receive() -> None:
        await upload.receive(*landings)
        landings.clear()

    for index in request.shards:
        codec = _wire_codec(request.format, model.shard(index, contribution.unit)[1])
        reserved = model.service.reserve_when_free(contribution, index)
        if landings and not reserved.done():  # it may wait for memory that those before it have
            await receive()
        landings.append(_landing(model, contribution, index, codec, await result_of(reserved)))
        if codec is not RAW:
            await receive()
    if landings:
        await receive()


def _require_sender(push: Contribution, sender: int | None) -> None:
    """Raise WrongSenderError unless a rank pushes its own gradients, and an owner a sum. The ranks of a sum have named
    each other with their Attach."""
    if (sender is None) != bool(push.summands) or sender not in (None, push.rank):
        ranks = [each.rank for each in push.summands] or [push.rank]
        by = "an owner" if sender is None else f"rank {sender}"
        raise WrongSenderError(f"Push of {', '.join(f'rank {rank}' for rank in ranks)} was sent by {by}")


def _landing(
    model: ServedModel, contribution: Contribution, index: int, codec: Codec, memory: Tensor | None
) -> ShardDestination:
    """Where a shard's gradients go. ``memory``: what is reserved for them; None: they are a repeat."""
    shard, unit = model.shard(index)
    size = codec.most_bytes(shard.numel, model.push_dtype(contribution, unit))
    if memory is None:
        return ShardDestination(shard=index, size_bytes=size, out=None)
    landed = partial(model.service.landed, contribution, index)
    if codec is RAW:
        return ShardDestination(shard=index, size_bytes=size, out=byte_view(memory), landed=landed)
    encoded = torch.empty(size, dtype=torch.uint8, device="cpu")

    def decode() -> None:
        values = torch.empty(shard.numel, dtype=unit.dtype, device="cpu")
        codec.decode(encoded, values)
        landed(values)

    return ShardDestination(shard=index, size_bytes=size, out=byte_view(encoded), landed=decode)


def _wire_codec(wire_format: int, unit: UnitLayout) -> Codec:
    """How a unit's gradients come. Raises StoreError if the unit cannot have ``wire_format``."""
    name = _CODECS.get(wire_format)
    codec = None if name is None else codec_for(name, unit.dtype)
    if codec is not None and codec.name == name:
        return codec
    raise StoreError(f"gradients of {unit.name!r} ({dtype_name(unit.dtype)}) cannot come in wire format {wire_format}")
