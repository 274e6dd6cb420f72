"""Calls to an owner that move tensors, whose bytes are on a connection beside them.

See [Note: beside gRPC] in store/wire/tensor_stream.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import StoreError, TransferError
from rayzero.layout.model_layout import Shard
from rayzero.security.credentials import names_shown
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.tensor_port import OwnerStream, ShardDestination, TensorPort
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
