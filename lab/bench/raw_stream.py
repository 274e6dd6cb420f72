"""Bare byte streams on loopback, to measure the store's against: gRPC's without headers, checksums or protobuf, and a
TCP socket's.

Both of its processes keep the buffers of messages, as optimizer actors do: it must be as fast as gRPC can be."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch
from torch import Tensor

from lab.bench.figures import Cost
from lab.bench.turns import Player, Seat, Turn
from rayzero.security.authority import Authority
from rayzero.security.credentials import OWNER, Identity
from rayzero.store.wire.rpc import add_port, open_channel

_UP, _UP_KEPT, _DOWN = "/raw/Up", "/raw/UpIntoTensor", "/raw/Down"
_TO_CLIENT, _TO_SERVER = b"D", b"U"
_PIECE = 1 << 20
_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class _Up(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs only
    def __init__(self, size_bytes: int) -> None:
        self._out = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Receive bytes, in a thread."""
        return grpc.stream_unary_rpc_method_handler(self._keep if details.method == _UP_KEPT else _drop)

    def _keep(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        return _fill(self._out, messages)


class _Down(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Send ready bytes, in the event loop."""
        return grpc.unary_stream_rpc_method_handler(_send)


def _drop(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    return str(sum(map(len, messages))).encode()


def _fill(tensor: Tensor, messages: Iterable[bytes]) -> bytes:
    """Copy messages into a tensor, one after the other; returns how many bytes came."""
    out, at = tensor.numpy().data, 0
    for message in messages:
        out[at : at + len(message)] = message
        at += len(message)
    return str(at).encode()


async def _send(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    size, count = map(int, request.split())
    message = bytes(size)
    for _ in range(count):
        await context.write(message)


def _serve_socket(listener: socket.socket, size_bytes: int) -> None:
    """Move bytes out of a tensor, or into one, for one client; a byte says which, and one ends what came up."""
    tensor = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu").numpy().data
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while direction := connection.recv(1):
        if direction == _TO_CLIENT:
            connection.sendall(tensor)
        else:
            _receive(connection, tensor)
            connection.sendall(direction)


def _receive(connection: socket.socket, out: memoryview) -> None:
    at = 0
    while at < len(out):
        at += connection.recv_into(out[at : at + _PIECE], 0, socket.MSG_WAITALL)


def _serve(pipe: Connection, size_bytes: int, shown: Identity | None) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_socket, args=(listener, size_bytes), daemon=True).start()
    asyncio.run(_serve_both(pipe, size_bytes, shown, listener.getsockname()[1]))


async def _serve_both(pipe: Connection, size_bytes: int, shown: Identity | None, port: int) -> None:
    """Serve each direction with the faster kind of server: threads receive what comes up, an event loop sends down.
    ``port``: of the socket that others serve."""
    up = grpc.server(ThreadPoolExecutor(1), handlers=[_Up(size_bytes)], options=_UNLIMITED)
    down = grpc.aio.server(handlers=[_Down()], options=_UNLIMITED)
    ports = add_port(up, "127.0.0.1:0", shown), add_port(down, "127.0.0.1:0", shown)
    up.start()
    await down.start()
    pipe.send((*ports, port))
    await down.wait_for_termination()


class RawPlayer:
    """A client of bare stream servers that run in another process."""

    def __init__(
        self, size_bytes: int, chunks: tuple[int, ...], pid: int, ports: tuple[int, int, int], shown: Identity | None
    ) -> None:
        """``pid``: of the servers' process. ``ports``: what takes bytes up, what sends them down, and the socket."""
        up, down = (open_channel(f"127.0.0.1:{port}", shown) for port in ports[:2])
        self._socket = None if shown else socket.create_connection(("127.0.0.1", ports[2]))
        self._up, self._up_kept = (up.stream_unary(path, bytes, bytes) for path in (_UP, _UP_KEPT))
        self._down = down.unary_stream(_DOWN, bytes, bytes)
        self._out = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")
        self._size, self._chunks, self._pid = size_bytes, chunks, pid

    def play(self, turn: Turn) -> dict[str, Any]:
        """Returns the cost of each way to move the bytes, by its name and chunk size."""
        costs = {}
        for chunk in self._chunks:
            mib = f"{chunk / (1 << 20):g} MiB"
            for name, move in (
                ("down", self._drop),
                ("down into a tensor", self._keep),
                ("up", partial(self._send, self._up)),
                ("up into a tensor", partial(self._send, self._up_kept)),
            ):
                move(chunk)
                costs[f"{name}, {mib}"] = [Cost.of(partial(move, chunk), [self._pid]) for _ in range(turn.steps)]
        if self._socket is not None:
            for name, direction in (("down", _TO_CLIENT), ("up", _TO_SERVER)):
                move_all = partial(self._over_socket, self._socket, direction)
                move_all()
                key = f"{name} into a tensor, a socket"
                costs[key] = [Cost.of(move_all, [self._pid]) for _ in range(turn.steps)]
        return {"costs": costs}

    def _over_socket(self, connection: socket.socket, direction: bytes) -> None:
        connection.sendall(direction)
        if direction == _TO_CLIENT:
            _receive(connection, self._out.numpy().data)
        else:
            connection.sendall(self._out.numpy().data)
            connection.recv(1)

    def _stream(self, chunk: int) -> Iterable[bytes]:
        messages: Iterable[bytes] = self._down(b"%d %d" % (chunk, self._size // chunk))
        return messages

    def _drop(self, chunk: int) -> None:
        for _ in self._stream(chunk):
            pass

    def _keep(self, chunk: int) -> None:
        _fill(self._out, self._stream(chunk))

    def _send(self, call: Any, chunk: int) -> None:
        message = bytes(chunk)
        call(message for _ in range(self._size // chunk))


def build_raw(size_bytes: int, chunks: tuple[int, ...], tls: bool, seat: Seat) -> Player:
    """Build a client, and start its server, which ends with it. ``tls``: between them is mutual TLS."""
    shown = Identity(Authority("bench", on_loopback=True).issue("both", [OWNER])) if tls else None
    torch.set_num_threads(seat.threads)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(theirs, size_bytes, shown), daemon=True, name="bare-stream")
    server.start()
    assert server.pid is not None
    return RawPlayer(size_bytes, chunks, server.pid, ours.recv(), shown)
