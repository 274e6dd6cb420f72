"""A bare gRPC byte stream on loopback, to measure the store's streams against: no headers, checksums or protobuf.

Both of its processes keep the buffers of messages, as optimizer actors do: it must be as fast as gRPC can be."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import torch

from rayzero.bench.figures import timed
from rayzero.bench.turns import Player, Seat, Turn
from rayzero.memory.malloc import keep_message_buffers
from rayzero.security.authority import Authority
from rayzero.security.credentials import OWNER, Credentials
from rayzero.store.wire.rpc import add_port, open_channel

_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class _Up(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in its stubs only
    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Receive and count bytes, in a thread."""
        return grpc.stream_unary_rpc_method_handler(_receive)


class _Down(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Send ready bytes, in the event loop."""
        return grpc.unary_stream_rpc_method_handler(_send)


def _receive(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    return str(sum(map(len, messages))).encode()


async def _send(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    size, count = map(int, request.split())
    message = bytes(size)
    for _ in range(count):
        await context.write(message)


def _serve(pipe: Connection, shown: Credentials | None) -> None:
    keep_message_buffers()
    asyncio.run(_serve_both(pipe, shown))


async def _serve_both(pipe: Connection, shown: Credentials | None) -> None:
    """Serve each direction with the faster kind of server: threads receive what comes up, an event loop sends down."""
    up = grpc.server(ThreadPoolExecutor(1), handlers=[_Up()], options=_UNLIMITED)
    down = grpc.aio.server(handlers=[_Down()], options=_UNLIMITED)
    ports = add_port(up, "127.0.0.1:0", shown), add_port(down, "127.0.0.1:0", shown)
    up.start()
    await down.start()
    pipe.send(ports)
    await down.wait_for_termination()


class RawPlayer:
    """A client of bare stream servers that run in another process."""

    def __init__(
        self, size_bytes: int, chunks: tuple[int, ...], ports: tuple[int, int], shown: Credentials | None
    ) -> None:
        up, down = (open_channel(f"127.0.0.1:{port}", shown) for port in ports)
        self._up = up.stream_unary("/raw/Up", bytes, bytes)
        self._down = down.unary_stream("/raw/Down", bytes, bytes)
        self._out = torch.zeros(size_bytes, dtype=torch.uint8)
        self._size, self._chunks = size_bytes, chunks

    def play(self, turn: Turn) -> dict[str, Any]:
        """Returns the seconds of each way to move the bytes, by its name and chunk size."""
        seconds = {}
        for chunk in self._chunks:
            mib = f"{chunk / (1 << 20):g} MiB"
            for name, move in (("down", self._drop), ("down into a tensor", self._keep), ("up", self._send)):
                move(chunk)
                seconds[f"{name}, {mib}"] = [timed(partial(move, chunk)) for _ in range(turn.steps)]
        return {"seconds": seconds}

    def _stream(self, chunk: int) -> Iterable[bytes]:
        messages: Iterable[bytes] = self._down(b"%d %d" % (chunk, self._size // chunk))
        return messages

    def _drop(self, chunk: int) -> None:
        for _ in self._stream(chunk):
            pass

    def _keep(self, chunk: int) -> None:
        out = self._out.numpy().data
        for i, message in enumerate(self._stream(chunk)):
            out[i * chunk : (i + 1) * chunk] = message

    def _send(self, chunk: int) -> None:
        message = bytes(chunk)
        self._up(message for _ in range(self._size // chunk))


def build_raw(size_bytes: int, chunks: tuple[int, ...], tls: bool, seat: Seat) -> Player:
    """Build a client, and start its server, which ends with it. ``tls``: between them is mutual TLS."""
    shown = Authority("bench", on_loopback=True).issue("both", [OWNER]) if tls else None
    torch.set_num_threads(seat.threads)
    keep_message_buffers()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    spawn.Process(target=_serve, args=(theirs, shown), daemon=True, name="bare-stream").start()
    return RawPlayer(size_bytes, chunks, ours.recv(), shown)
