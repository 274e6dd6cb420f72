"""A client's connections for tensors to one owner, beside one channel to it."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from rayzero.security.addresses import host_of
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.tensor_stream import WELCOME, StreamEndedError, StreamKeys, TensorStream

_OPEN_S = 5.0  # in which a connection is made; and in which the owner takes its ticket
_REASON_S = 5.0  # how long an owner may take to say why it has ended a connection
LET_THROUGH = (
    "if a firewall is between the hosts, open every port of the optimizer actors' hosts to them: owners take free ones"
)
"""What to do about a port for tensors that cannot be reached, for messages."""


class UnreachedPortError(StreamEndedError):
    """The network lets no connection through to an owner's port for tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the owner answers to OpenTensorStream."""

    number: int
    port: int
    ticket: bytes
    keys: StreamKeys | None  # None: without TLS

    @classmethod
    def of(cls, answer: pb.OpenTensorStreamResponse, *, protected: bool) -> Opening:
        """``protected``: the answer came over TLS."""
        keys = StreamKeys(sending=answer.client_key, receiving=answer.owner_key) if protected else None
        return cls(number=answer.number, port=answer.port, ticket=answer.ticket, keys=keys)


def end_with(call: Any, stream: TensorStream) -> None:
    """Have a connection end if the call, grpc's future, fails: the thread that moves bytes gets StreamEndedError."""
    call.add_done_callback(lambda done: None if done.code() is grpc.StatusCode.OK else stream.abort())


def failure_of(call: Any) -> Exception | None:
    """Why a call failed whose connection has ended: an RpcError, or FutureCancelledError. None: its owner says nothing
    soon, so the connection has broken; the call ends."""
    try:
        call.result(timeout=_REASON_S)
    except grpc.FutureTimeoutError:
        call.cancel()
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        return error
    return None


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

    def take(self) -> TensorStream:
        """One that is the caller's until it gives it back or drops it. Raises StreamEndedError after ``close``,
        UnreachedPortError if none can be opened."""
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
            return TensorStream(connection, opening.keys, opening.number)
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

    def give_back(self, used: TensorStream) -> None:
        """Another transfer may have it."""
        with self._lock:
            self._taken.discard(used)
            if not self._closed:
                self._idle.append(used)
                return
        used.close()

    def drop(self, used: TensorStream) -> None:
        """End it: nobody knows how far it is."""
        with self._lock:
            self._taken.discard(used)
        used.abort()
        used.close()
