"""Calls to an owner that move tensors: their bytes are in the messages or, of large ones, on a connection beside them.

See [Note: beside gRPC] in store/wire/tensor_stream.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from rayzero.errors import TransferError
from rayzero.layout.model_layout import Shard
from rayzero.security.credentials import names_shown
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.tensor_port import OwnerStream, ShardDestination, TensorPort
from rayzero.store.wire.payload import Assembly, byte_view, decode_header
from rayzero.store.wire.rpc import stream_of
from rayzero.store.wire.seal import unseal


def open_connection(port: TensorPort, client: str, host: str, context: Any) -> pb.OpenTensorStreamResponse:
    """Let the client of a call (``context``: grpc.aio's) open a connection for tensors, with keys if the call came over
    TLS. ``client``: "rank 3" or "optimizer 1", which the door has checked. ``host``: of this owner, as the client has
    it. Raises StoreError if the client has too many."""
    protected = names_shown(context.auth_context()) is not None
    expected = port.expect(client, host, protected=protected)
    answer = pb.OpenTensorStreamResponse(number=expected.number, port=expected.port, ticket=expected.ticket)
    if expected.keys is not None:
        answer.client_key, answer.owner_key = expected.keys.receiving, expected.keys.sending
    return answer


@asynccontextmanager
async def connection_of(port: TensorPort, client: str, context: Any) -> AsyncIterator[OwnerStream | None]:
    """A context in which a client's call has the connection that it names; None: its bytes are in its messages. Raises
    TransferError if the connection has ended, HandshakeError if it is another client's."""
    found = port.of(stream_of(context.invocation_metadata() or ()), client)
    if found is None:
        yield None
        return
    async with found.transfer() as stream:
        yield stream


class UploadStream:
    """A client's stream: sections, each a header and its chunks, of which the first is in the header's message.

    [Note: cold code] What runs between two messages finds that their bytes have pushed it out of the processor's
    caches, and takes about three times as long as alone. So nothing stands between a shard and gRPC's messages that is
    not needed, and no message is kept once it is copied: its memory is the next one's.

    Of a call with a connection for tensors, messages have headers only, and the chunks come there."""

    def __init__(
        self,
        requests: AsyncIterator[bytes],
        message: type[Any],
        stream: OwnerStream | None,
        compute: Callable[[Callable[[], object]], Awaitable[object]],
    ) -> None:
        """``message``: what has the headers. ``stream``: the connection; None: there is none. ``compute``: runs what
        takes too long for the event loop."""
        self._requests, self._message, self._stream, self._compute = requests, message, stream, compute
        self._opening: bytes | None = None  # the first message of a section, until its chunk is taken

    @property
    def is_beside(self) -> bool:
        """Whether chunks come over a connection: a thread receives several shards in a row."""
        return self._stream is not None

    async def sections(self) -> AsyncIterator[Any]:
        """The headers, one after the other. The caller receives all chunks that one announces before it asks for the
        next. Raises TransferError if something else comes."""
        opening: bytes | None = await anext(self._requests, b"")
        while opening is not None:
            header = decode_header(opening)
            if header is None:
                raise TransferError(f"{self._message.__name__}: the stream has chunks where a header must come")
            self._opening, opening = opening, None
            yield unseal(header, self._message.Header)
            opening = await anext(self._requests, None)

    async def values(self, shard: Shard, dtype: torch.dtype) -> Tensor:
        """Receive a shard's values into new memory: 1D. Raises as ``receive``."""
        values = torch.empty(shard.numel, dtype=dtype, device="cpu")
        await self.receive(ShardDestination(shard=shard.index, size_bytes=values.nbytes, out=byte_view(values)))
        return values

    async def receive(self, *landings: ShardDestination) -> None:
        """Read shards, in this order, and do with each what is to be done then. Raises TransferError if other bytes
        come."""
        if self._stream is not None:
            await self._stream.receive(landings)
            return
        for each in landings:
            await self._assemble(Assembly(each.shard, each.size_bytes, each.out))
            if each.computes:
                await self._compute(each.landed)
            else:  # it takes less than the way to another thread and back
                each.landed()

    async def _assemble(self, assembly: Assembly) -> None:
        if self._opening is not None and not assembly.complete:
            assembly.take(self._opening)
            self._opening = None
        while not assembly.complete:
            assembly.take(await anext(self._requests, None))
