"""An owner's connections for tensors: who may open one, and the transfers over it.

A call that was let in (``OpenTensorStream``) gets a ticket for one connection, whose transfers are made with the call's
metadata, and, over TLS, its keys. A few threads move the bytes without the interpreter's lock. A silent peer holds none
of them: the event loop waits for it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import HandshakeError, StoreError, TransferError
from rayzero.security.clients import Refusals, is_loopback
from rayzero.security.credentials import names_shown
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import TooManyCallsError
from rayzero.store.owner.streams import OwnerStream
from rayzero.store.wire.rpc import Metadata
from rayzero.store.wire.tensor_stream import (
    TICKET_BYTES,
    WELCOME,
    StreamEndedError,
    StreamKeys,
    TensorStream,
    moving_threads,
    new_stream_keys,
)
from rayzero.telemetry.recorder import Recorder

CONNECTIONS = 64  # of one client, expected and open; it uses one for each transfer under way
ENTERING = 256  # clients that have not shown their ticket yet; then the oldest one is cut
_BACKLOG = 1024  # clients that are not accepted yet
TICKET_S = 10.0  # in which a client must show its ticket, and for which it is good
_GRACE_S = 2.0  # for transfers under way when the port stops
_PAUSE_S = 0.1  # after a connection could not be accepted: the process may be out of files

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A connection that a client may open."""

    client: str  # "rank 3", "optimizer 1"
    service: str  # whose transfers it makes
    metadata: Metadata  # of each of them
    port: int
    ticket: bytes = field(repr=False)
    keys: StreamKeys | None = field(repr=False)  # this end's


class _OnlyLookedError(StreamEndedError):
    """A client has come and gone without a word, as a host does that tries whether it can reach this one."""


class TensorPort:
    """Listens beside an owner's server. Lives on the event loop.

    Knows clients by name, and connections; not models, units or shards."""

    def __init__(
        self,
        recorder: Recorder,
        answer: Callable[[Expected, OwnerStream, bytes | TransferError], Awaitable[pb.TransferAnswer]],
    ) -> None:
        """``answer``: to a client's question; as ``Answer``."""
        self._refusals, self._answer = Refusals("tensors", recorder), answer
        self._listeners: dict[str, socket.socket] = {}  # by host
        self._accepting: list[asyncio.Task[None]] = []
        self._entering: dict[asyncio.Task[None], str] = {}  # clients' addresses, the oldest first
        self._expected: dict[bytes, Expected] = {}  # by ticket
        self._streams: dict[asyncio.Task[None], OwnerStream] = {}
        self._of_client = Counter[str]()  # expected and open
        self._pool = ThreadPoolExecutor(
            moving_threads(os.cpu_count() or 1),
            "rayzero-owner-tensors",
            initializer=use_torch_threads,
            initargs=(1,),
        )

    def listen(self, host: str) -> None:
        """Accept connections to ``host`` too, at any free port. Raises OSError if that is impossible."""
        if host in self._listeners:
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        self._listeners[host] = listener
        self._accepting.append(asyncio.get_running_loop().create_task(self._accept(listener)))

    def expect(self, client: str, service: str, host: str, context: Any) -> pb.OpenTensorStreamResponse:
        """Let a client open one connection for transfers of a service. ``client``: "rank 3" or "optimizer 1", which was
        checked. ``host``: of this owner, as the client has it. ``context``: grpc.aio's, of its call; if that came over
        TLS, chunks are encrypted. Raises StoreError if the client has too many."""
        if self._of_client[client] >= CONNECTIONS:
            raise TooManyCallsError(f"{client} has {CONNECTIONS} connections for tensors here, the most for one client")
        expected = Expected(
            client=client,
            service=service,
            metadata=tuple(context.invocation_metadata() or ()),
            port=self.port_at(host),
            ticket=secrets.token_bytes(TICKET_BYTES),
            keys=None if names_shown(context.auth_context()) is None else new_stream_keys(),
        )
        self._expected[expected.ticket] = expected
        self._of_client[client] += 1
        asyncio.get_running_loop().call_later(TICKET_S, self._forget, expected.ticket)
        answer = pb.OpenTensorStreamResponse(port=expected.port, ticket=expected.ticket)
        if expected.keys is not None:
            answer.client_key, answer.owner_key = expected.keys.receiving, expected.keys.sending
        return answer

    def port_at(self, host: str) -> int:
        """Where clients connect that know this owner as ``host``. Raises StoreError if nobody listens any more."""
        others = sorted(self._listeners, key=is_loopback)  # a name of this host, perhaps: what others reach, first
        listener = self._listeners.get(host) or next((self._listeners[other] for other in others), None)
        if listener is None:
            raise StoreError("this owner is stopping")
        port: int = listener.getsockname()[1]
        return port

    def _forget(self, ticket: bytes) -> None:
        """A ticket is not good any more, if nobody has shown it."""
        expected = self._expected.pop(ticket, None)
        if expected is not None:
            self._free(expected.client)

    def _free(self, client: str) -> None:
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]

    async def stop(self) -> None:
        """Accept nobody any more, and end all connections. Idempotent."""
        listeners, self._listeners = self._listeners, {}
        tasks = [*self._accepting, *self._entering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in listeners.values():
            listener.close()
        self._expected.clear()
        serving = list(self._streams)
        for stream in self._streams.values():
            stream.stop()
        if serving:
            await asyncio.wait(serving, timeout=_GRACE_S)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def close(self) -> None:
        """Wait until the threads have ended, of connections that ``stop()`` has ended. Not on the event loop, which
        their transfers end on."""
        self._pool.shutdown(wait=True)

    # ---- clients

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connection for tensors could not be accepted: %s", error)
                await asyncio.sleep(_PAUSE_S)
                continue
            while len(self._entering) >= ENTERING:
                self._cut_oldest()
            peer = f"{address[0]}:{address[1]}"
            task = loop.create_task(self._enter(connection, peer))
            self._entering[task] = peer
            task.add_done_callback(lambda done: self._entering.pop(done, None))
            await asyncio.sleep(0)  # a client that is there already is accepted without a turn of the loop

    def _cut_oldest(self) -> None:
        """Who has not shown a ticket for longest is least likely to have one."""
        task, peer = next(iter(self._entering.items()))
        self._refusals.note("limit", peer, f"{ENTERING} others have not shown a ticket yet")
        del self._entering[task]
        task.cancel()

    async def _enter(self, connection: socket.socket, peer: str) -> None:
        """Take a client in that shows a ticket."""
        try:
            async with asyncio.timeout(TICKET_S):
                ticket = await _read(connection, TICKET_BYTES)
            expected = self._expected.get(ticket)
            if expected is None:
                raise HandshakeError("its ticket is not one of this owner's")
            connection.send(WELCOME)
            del self._expected[ticket]
        except (OSError, HandshakeError, StreamEndedError) as error:  # OSError: also after TICKET_S
            if not isinstance(error, _OnlyLookedError):
                self._refusals.note(_reason(error), peer, str(error) or "it shows no ticket")
            connection.close()
        except BaseException:
            connection.close()
            raise
        else:
            self._serve(expected, OwnerStream(TensorStream(connection, expected.keys), expected.client, self._pool))

    def _serve(self, expected: Expected, stream: OwnerStream) -> None:
        answer = partial(self._answer, expected)
        task = asyncio.get_running_loop().create_task(stream.serve(answer))
        self._streams[task] = stream
        task.add_done_callback(partial(self._drop, expected))

    def _drop(self, expected: Expected, task: asyncio.Task[None]) -> None:
        """A connection has ended."""
        del self._streams[task]
        self._free(expected.client)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "slow"
    return "ticket" if isinstance(error, HandshakeError) else "nonsense"


async def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly that many bytes. Raises StreamEndedError if the client ends."""
    found = bytearray()
    while len(found) < size:
        more = await asyncio.get_running_loop().sock_recv(connection, size - len(found))
        if not more:
            raise StreamEndedError("it has shown no ticket") if found else _OnlyLookedError("it has said nothing")
        found += more
    return bytes(found)
