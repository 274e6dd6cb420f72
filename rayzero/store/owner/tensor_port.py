"""An owner's connections for tensors: who may open one, and the calls whose bytes are on it.

A call that was let in (``OpenTensorStream``) gets a ticket for one connection and, over TLS, the keys of its
bytes. A few threads move the bytes without the interpreter's lock. A silent peer holds none of them: the event loop
waits for it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

from rayzero.concurrency.threads import use_torch_threads
from rayzero.errors import HandshakeError, StoreError
from rayzero.security.addresses import is_loopback
from rayzero.security.refusals import Refusals
from rayzero.store.owner.calls.allowance import BODY_S, SlowBodyError, TooManyCallsError, WrongSenderError
from rayzero.store.wire.payload import Assembly, Bytes
from rayzero.store.wire.tensor_stream import (
    TICKET_BYTES,
    WELCOME,
    InTurn,
    Receiving,
    Sent,
    StreamEndedError,
    StreamKeys,
    StreamWork,
    TensorStream,
    moving_threads,
    new_stream_keys,
)
from rayzero.telemetry.recorder import Recorder

CONNECTIONS = 64  # of one client, expected and open; it uses one for each transfer under way
ENTERING = 256  # clients that have not shown their ticket yet; then the oldest one is cut
_BACKLOG = 1024  # clients that are not accepted yet
TICKET_S = 10.0  # in which a client must show its ticket, and for which it is good
_LOOK_S = 5.0  # between two looks whether a connection with bytes that nobody has asked for has ended
_PAUSE_S = 0.1  # after a connection could not be accepted: the process may be out of files

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A connection that a client may open."""

    number: int
    client: str  # "rank 3", "optimizer 1"
    port: int
    ticket: bytes = field(repr=False)
    keys: StreamKeys | None = field(repr=False)  # this end's


class _OnlyLookedError(StreamEndedError):
    """A client has come and gone without a word, as a host does that tries whether it can reach this one."""


def _nothing() -> None:
    return


async def in_thread(pool: ThreadPoolExecutor, work: Callable[[], T], stop: Callable[[], object]) -> T:
    """Run ``work``, which moves bytes. Cancelling this calls ``stop``, which has the work end soon, and waits until the
    thread has let go of the memory."""
    moving = asyncio.get_running_loop().run_in_executor(pool, work)
    try:
        return await asyncio.shield(moving)
    except asyncio.CancelledError:
        stop()
        while not moving.done():
            with suppress(asyncio.CancelledError):  # once more: a newer link, and then the end of this one
                await asyncio.wait([moving])
        moving.exception()  # that it ended is what was wanted
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDestination:
    """Where a shard's bytes go."""

    shard: int
    size_bytes: int
    out: Bytes | None  # None: nowhere
    landed: Callable[[], object] = _nothing  # what to do then
    is_record: bool = False  # see ``Assembly``


class OwnerStream:
    """One connection, at an optimizer actor. Lives on the event loop; its bytes are moved in ``pool``."""

    def __init__(
        self, stream: TensorStream, client: str, pool: ThreadPoolExecutor, ended: Callable[[], object] = _nothing
    ) -> None:
        """``client``: whose bytes are on it. ``ended``: called once the connection has ended."""
        self.client = client
        self._stream, self._pool, self._ended = stream, pool, ended
        self._turn = asyncio.Lock()
        self._closed = False
        self._watch()

    @asynccontextmanager
    async def transfer(self) -> AsyncIterator[OwnerStream]:
        """A context for the bytes of one call. If it ends with an error, so does the connection: nobody knows how far
        it is."""
        async with self._turn:
            if self._closed:
                raise StreamEndedError("the connection for tensors of this call has ended")
            self._unwatch()
            try:
                yield self
            except BaseException:
                self._end()
                raise
            self._stream.forget_scratch()
            self._watch()

    async def receive(self, landings: Iterable[ShardDestination]) -> None:
        """Read shards, in this order. Raises TransferError if other bytes come, or none."""
        works = [
            (
                Receiving(self._stream, Assembly(each.shard, each.size_bytes, each.out, is_record=each.is_record)),
                each.landed,
            )
            for each in landings
        ]
        await self._move(InTurn(works), to_write=False)

    async def send(self, shards: Iterable[tuple[int, memoryview]]) -> None:
        """Write shards' bytes, in this order. Raises TransferError if nobody takes them."""
        works = [(Sent(self._stream, shard, content), _nothing) for shard, content in shards]
        await self._move(InTurn(works), to_write=True)

    async def _move(self, work: StreamWork, *, to_write: bool) -> None:
        loop = asyncio.get_running_loop()
        passed, until = work.chunks, loop.time() + BODY_S
        comes = to_write or self._stream.has_bytes  # else a thread would wait for what the call has only announced
        while not (comes and await self._advance(work)):
            comes = True
            if work.chunks > passed:
                passed, until = work.chunks, loop.time() + BODY_S
            verb = "taken" if to_write else "sent"
            slow = SlowBodyError(f"{self.client} has {verb} no whole chunk within {BODY_S:g} s")
            if loop.time() >= until:
                raise slow
            try:
                async with asyncio.timeout_at(until):
                    await _ready(self._stream.connection, to_write=to_write)
            except TimeoutError:
                raise slow from None

    async def _advance(self, work: StreamWork) -> bool:
        """Move bytes in a thread. Cancelling this ends the connection, and waits until the thread has let go of the
        memory, which a repeat of the push gets next."""
        return await in_thread(self._pool, work.advance, self._stream.abort)

    def _watch(self) -> None:
        """Notice when the peer ends a connection that nobody uses."""
        asyncio.get_running_loop().add_reader(self._stream.connection, self._spoken_to)

    def _unwatch(self) -> None:
        asyncio.get_running_loop().remove_reader(self._stream.connection)

    def _spoken_to(self) -> None:
        """It has ended, or bytes are here whose call is still on its way: look again, in case it never comes."""
        self._unwatch()
        if self._stream.has_ended:
            self._end()
        else:
            asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        if not self._closed and not self._turn.locked():
            self._watch()

    def close(self) -> None:
        """End the connection; a call that uses it ends by that. Idempotent."""
        if self._turn.locked():
            self._stream.abort()
        else:
            self._end()

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            self._unwatch()
            self._stream.abort()
            self._stream.close()
            self._ended()


class TensorPort:
    """Listens beside an owner's server. Lives on the event loop.

    Knows clients by name, and connections; not models, units or shards."""

    def __init__(self, recorder: Recorder) -> None:
        self._refusals = Refusals("tensors", recorder)
        self._listeners: dict[str, socket.socket] = {}  # by host
        self._accepting: list[asyncio.Task[None]] = []
        self._entering: dict[asyncio.Task[None], str] = {}  # clients' addresses, the oldest first
        self._numbers = count(1)
        self._expected: dict[bytes, Expected] = {}  # by ticket
        self._streams: dict[int, OwnerStream] = {}
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

    def expect(self, client: str, host: str, *, protected: bool) -> Expected:
        """Let a client open one connection. ``host``: of this owner, as the client has it. ``protected``: it asks over
        TLS, so chunks are encrypted. Raises StoreError if the client has too many."""
        if self._of_client[client] >= CONNECTIONS:
            raise TooManyCallsError(f"{client} has {CONNECTIONS} connections for tensors here, the most for one client")
        expected = Expected(
            number=next(self._numbers),
            client=client,
            port=self.port_at(host),
            ticket=secrets.token_bytes(TICKET_BYTES),
            keys=new_stream_keys() if protected else None,
        )
        self._expected[expected.ticket] = expected
        self._of_client[client] += 1
        asyncio.get_running_loop().call_later(TICKET_S, self._forget, expected.ticket)
        return expected

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

    def of(self, number: int, client: str) -> OwnerStream:
        """The connection that a client's call names. Raises TransferError if it has ended, WrongSenderError if it is
        another client's."""
        found = self._streams.get(number)
        if found is None:
            raise StreamEndedError(f"connection {number} for tensors has ended")
        if found.client != client:
            raise WrongSenderError(f"connection {number} for tensors is {found.client}'s, not that of {client}")
        return found

    async def stop(self) -> None:
        """Accept nobody any more, and end all connections. Idempotent."""
        listeners, self._listeners = self._listeners, {}
        tasks = [*self._accepting, *self._entering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in listeners.values():
            listener.close()
        for stream in list(self._streams.values()):
            stream.close()
        self._expected.clear()

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
            self._keep(expected, TensorStream(connection, expected.keys))

    def _keep(self, expected: Expected, stream: TensorStream) -> None:
        ended = partial(self._drop, expected)
        self._streams[expected.number] = OwnerStream(stream, expected.client, self._pool, ended)

    def _drop(self, expected: Expected) -> None:
        """A connection has ended. Idempotent."""
        if self._streams.pop(expected.number, None) is not None:
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


async def _ready(connection: socket.socket, *, to_write: bool = False) -> None:
    """Wait until the connection has bytes to read or room to write, or has ended."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)
    add(connection, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        remove(connection)
