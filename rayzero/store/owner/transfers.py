"""Calls to an owner that move tensors: which of them have their bytes on a connection beside their messages.

See [Note: beside gRPC] in store/wire/tensor_stream.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rayzero.security.credentials import names_shown
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.tensor_port import OwnerStream, TensorPort
from rayzero.store.wire.rpc import stream_of


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
