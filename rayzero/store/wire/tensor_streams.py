"""A client's connections for tensors to one owner, beside one channel to it, and its transfers over them."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from rayzero.errors import TransferError
from rayzero.security.clients import host_of
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.payload import Assembly
from rayzero.store.wire.tensor_stream import (
    WELCOME,
    MessageCameError,
    Progress,
    Receiving,
    Sent,
    StreamEndedError,
    StreamKeys,
    StreamWork,
    TensorStream,
    message_on,
)
from rayzero.store.wire.translate import from_failure

_OPEN_S = 5.0  # in which a connection is made; and in which the owner takes its ticket
LATE_S = 1.0  # after a call's deadline: it fails sooner, unless this process was stopped
LET_THROUGH = (
    "if a firewall is between the hosts, open every port of the optimizer actors' hosts to them: owners take free ones"
)
"""What to do about a port for tensors that cannot be reached, for messages."""


class UnreachedPortError(StreamEndedError):
    """The network lets no connection through to an owner's port for tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the owner answers to OpenTensorStream."""

    port: int
    ticket: bytes
    keys: StreamKeys | None  # None: without TLS

    @classmethod
    def of(cls, answer: pb.OpenTensorStreamResponse, *, protected: bool) -> Opening:
        """``protected``: the answer came over TLS."""
        keys = StreamKeys(sending=answer.client_key, receiving=answer.owner_key) if protected else None
        return cls(port=answer.port, ticket=answer.ticket, keys=keys)


class OverdueError(Exception):
    """A transfer has no answer in time. ``stood_still``: this process was stopped meanwhile, so that says nothing of
    the owner."""

    def __init__(self, *, stood_still: bool) -> None:
        super().__init__("no answer in time")
        self.stood_still = stood_still


def asked(method: str, request: bytes, timeout_s: float) -> bytes:
    """What begins a transfer."""
    return pb.TransferQuestion(method=method, request=request, timeout_s=timeout_s).SerializeToString()


def read_answer(content: bytes) -> pb.TransferAnswer:
    """An answer. Raises the owner's error, if it is one, or TransferError."""
    try:
        answer = pb.TransferAnswer.FromString(content)
    except DecodeError as error:
        raise TransferError(f"an answer cannot be read: {error}") from error
    if answer.HasField("failure"):
        raise from_failure(answer.failure)
    return answer


class Transfer:
    """One transfer over a connection, at its client's end. One thread makes it; any may end it.

    Each verb blocks. Raises the owner's error, StreamEndedError if the connection ends, or OverdueError."""

    def __init__(self, stream: TensorStream, method: str, request: bytes, timeout_s: float) -> None:
        self._stream, self._until = stream, time.monotonic() + timeout_s
        self._lock, self._is_aborted = threading.Lock(), False
        self.has_ended = False  # with the last answer
        self._pass(message_on(stream, asked(method, request, timeout_s)))

    def send(self, shard: int, content: memoryview, progress: Progress | None = None) -> None:
        """Send a shard's bytes, which nobody changes until then."""
        self._pass(Sent(self._stream, shard, content, progress))

    def receive(self, assembly: Assembly, progress: Progress | None = None) -> None:
        """Have a shard's bytes filled in."""
        self._pass(Receiving(self._stream, assembly, progress))

    def receiving(self, assembly: Assembly) -> Receiving:
        """The same, for ``advance``."""
        return Receiving(self._stream, assembly)

    def answers(self) -> Iterator[bytes]:
        """The responses, of which the last one ends the transfer. If bytes come after a response, receive them before
        the next one."""
        more = True
        while more:
            coming = Receiving(self._stream)
            self._pass(coming)
            answer = read_answer(coming.message)
            more = answer.more
            with self._lock:
                if self._is_aborted:  # it was here before: the connection is of no use to another transfer
                    raise StreamEndedError("nothing comes any more")
                self.has_ended = not more
            yield answer.response

    def answer(self) -> bytes:
        """The only response."""
        (response,) = self.answers()
        return response

    def _pass(self, work: StreamWork) -> None:
        while not self.advance(work):
            pass

    def advance(self, work: StreamWork) -> bool:
        """Move bytes for a moment; True: all have passed."""
        try:
            if isinstance(work, Sent) and self._stream.has_bytes:
                self._raise_failure()
            through = work.advance()
        except MessageCameError as came:
            read_answer(came.content)
            raise
        except StreamEndedError:
            if isinstance(work, Sent):
                self._raise_failure()
            raise
        if not through:
            self._require_time()
        return through

    def _raise_failure(self) -> None:
        """The owner takes no more bytes: raise what it says, or StreamEndedError."""
        said = Receiving(self._stream)
        while not said.advance():
            self._require_time()
        read_answer(said.message)
        raise TransferError("an answer came before all bytes were sent")

    def _require_time(self) -> None:
        if self._is_aborted:
            raise StreamEndedError("nothing comes any more")
        late_s = time.monotonic() - self._until
        if late_s > 0:
            raise OverdueError(stood_still=late_s > LATE_S)

    def abort(self) -> None:
        """End it, and the connection, unless it has ended. Any thread may call it."""
        with self._lock:
            if not self.has_ended:
                self._is_aborted = True
                self._stream.abort()


def connect(address: str, port: int) -> socket.socket:
    """Begin a connection to an owner's port for tensors, at an IP address; does not wait for it. Raises OSError."""
    connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        connection.setblocking(False)
        _require(connection.connect_ex((address, port)))
    except BaseException:
        connection.close()
        raise
    return connection


def _require(error: int) -> None:
    if error not in (0, errno.EINPROGRESS):
        raise OSError(error, os.strerror(error))


def _wait_made(connection: socket.socket) -> None:
    """Wait until a connection that has begun is there. Raises OSError if it fails."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    if not poll.poll(_OPEN_S * 1000):
        raise TimeoutError("timed out")
    _require(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    connection.settimeout(_OPEN_S)


def _end(connection: socket.socket) -> None:
    """A thread that waits for it, or for its bytes, gets an error."""
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


class TensorStreams:
    """Connections to one owner, each of which carries one transfer at a time; opened when there is none to spare.

    Knows the owner's host; not what travels, or whether the owner is alive."""

    def __init__(self, address: str, ask: Callable[[str], Opening]) -> None:
        """``address``: the owner's, with a port. ``ask``: has the owner expect a connection to the host that it is
        given."""
        self._host = host_of(address)
        self._ask = ask
        self._lock = threading.Lock()
        self._idle: list[TensorStream] = []
        self._taken: set[TensorStream] = set()
        self._opening: set[socket.socket] = set()
        self._closed = False

    def close(self) -> None:
        """End them all, also those that are not open yet: transfers fail with StreamEndedError. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            taken = list(self._taken)
            for connection in self._opening:
                _end(connection)
        for each in taken:
            each.abort()
        for each in idle:
            each.close()

    @contextmanager
    def transfer(self, method: str, request: bytes, timeout_s: float) -> Iterator[Transfer]:
        """A context for one transfer over a connection that no other one has. ``timeout_s``: until its last answer.
        Raises UnreachedPortError if no connection can be opened, StreamEndedError after ``close``; as ``Transfer``."""
        stream = self.take()
        made = None
        try:
            made = Transfer(stream, method, request, timeout_s)
            yield made
        finally:
            if made is not None and made.has_ended:
                self._give_back(stream)
            else:
                self._drop(stream)

    def take(self) -> TensorStream:
        """One that is the caller's. Freed by: the caller. Raises StreamEndedError after ``close``, UnreachedPortError
        if none can be opened."""
        while True:
            with self._lock:
                self._require_open()
                if not self._idle:
                    break
                found = self._idle.pop()
                if found.is_quiet:
                    self._taken.add(found)
                    return found
            found.close()  # the owner, or something between, has ended it
        opening = self._ask(self._host)
        opened = self._connect(opening)
        with self._lock:
            if not self._closed:
                self._taken.add(opened)
                return opened
        opened.close()
        raise StreamEndedError("the link was closed")

    def _require_open(self) -> None:
        if self._closed:
            raise StreamEndedError("the link was closed")

    def _connect(self, opening: Opening) -> TensorStream:
        try:
            return self._reach(opening)
        except OSError as error:
            with self._lock:
                self._require_open()
            why = error.strerror or str(error)
            where = f"{self._host}, port {opening.port}"
            raise UnreachedPortError(f"cannot open a connection for tensors to {where}: {why}") from error

    def _reach(self, opening: Opening) -> TensorStream:
        """Raises OSError: that of the last address, if the host has several."""
        failed = OSError("the host has no address")
        for *_, address in socket.getaddrinfo(self._host, opening.port, type=socket.SOCK_STREAM):
            try:
                return self._enter(str(address[0]), opening)
            except OSError as error:
                failed = error
        raise failed

    def _enter(self, address: str, opening: Opening) -> TensorStream:
        connection = connect(address, opening.port)
        try:
            with self._ended_by_close(connection):
                _wait_made(connection)
                connection.sendall(opening.ticket)
                if connection.recv(1) != WELCOME:
                    raise ConnectionError("the owner ended it")
            return TensorStream(connection, opening.keys)
        except BaseException:
            connection.close()
            raise

    @contextmanager
    def _ended_by_close(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._opening.add(connection)
            if self._closed:
                _end(connection)
        try:
            yield
        finally:
            with self._lock:
                self._opening.discard(connection)

    def _give_back(self, used: TensorStream) -> None:
        """Another transfer may have it."""
        with self._lock:
            self._taken.discard(used)
            if not self._closed:
                self._idle.append(used)
                return
        used.close()

    def _drop(self, used: TensorStream) -> None:
        """End it: nobody knows how far it is."""
        with self._lock:
            self._taken.discard(used)
        used.abort()
        used.close()
