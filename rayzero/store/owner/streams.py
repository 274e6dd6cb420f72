"""The ways on which shards' bytes come to an optimizer actor and leave it: a connection, or memory of this host."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rayzero.errors import TransferError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.calls.allowance import BODY_S, SlowBodyError
from rayzero.store.shm.lines import Parcel
from rayzero.store.wire.payload import Assembly, Bytes
from rayzero.store.wire.tensor_stream import (
    InTurn,
    Receiving,
    Sent,
    StreamEndedError,
    StreamWork,
    TensorStream,
    message_on,
)

_LOOK_S = 5.0  # between two looks whether a client has ended whose bytes are not taken yet
_LAST_WORD_S = 5.0  # in which a client must have heard why its transfer fails
_FEW_BYTES = 1 << 15  # which are moved on the event loop: the way to a thread would take longer
_DROPPED_BYTES = 1 << 20  # that are read at a time and not wanted

T = TypeVar("T")

log = logging.getLogger(__name__)


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


Answer = Callable[["OwnerStream", bytes | TransferError], Awaitable[pb.TransferAnswer]]
"""Answers a question, or says why it cannot be read. Raises StreamEndedError alone."""


class OwnerStream:
    """One connection, at an optimizer actor: at the owner's end or, in a pipe, at its client's. Lives on the event
    loop: messages and a few bytes of shards are moved there, more bytes in ``pool``."""

    def __init__(self, stream: TensorStream, client: str, pool: ThreadPoolExecutor) -> None:
        """``client``: at the other end, or whose transfer it is. Freed by: ``serve``, or ``close``."""
        self.client = client
        self._stream, self._pool = stream, pool
        self._answering: asyncio.Task[pb.TransferAnswer] | None = None
        self._moves = self._is_busy = self._stops = False

    # ---- bytes

    async def receive(self, landings: Iterable[ShardDestination]) -> None:
        """Read shards, in this order. Raises TransferError if other bytes come, or none."""
        landings = list(landings)
        works = [
            (
                Receiving(self._stream, Assembly(each.shard, each.size_bytes, each.out, is_record=each.is_record)),
                each.landed,
            )
            for each in landings
        ]
        few = sum(each.size_bytes for each in landings) <= _FEW_BYTES
        await self._move(InTurn(works), to_write=False, here=few)

    async def send(self, shards: Iterable[tuple[int, memoryview]]) -> None:
        """Write shards' bytes, in this order. Raises TransferError if nobody takes them."""
        shards = list(shards)
        works = [(Sent(self._stream, shard, content), _nothing) for shard, content in shards]
        few = sum(len(content) for _, content in shards) <= _FEW_BYTES
        await self._move(InTurn(works), to_write=True, here=few)

    async def message(self, *, at_any_time: bool = False) -> bytes:
        """Read a message. ``at_any_time``: it may be long until it comes."""
        coming = Receiving(self._stream)
        await self._move(coming, to_write=False, here=True, at_any_time=at_any_time)
        return coming.message

    async def say(self, content: bytes) -> None:
        """Write a message."""
        await self._move(message_on(self._stream, content), to_write=True, here=True)

    async def _move(self, work: StreamWork, *, to_write: bool, here: bool = False, at_any_time: bool = False) -> None:
        """``here``: on the event loop. Raises SlowBodyError if no chunk passes in time."""
        self._unwatch()
        self._moves = True
        try:
            await self._move_all(work, to_write, here, math.inf if at_any_time else BODY_S)
        finally:
            self._moves = False
            self._watch()

    async def _move_all(self, work: StreamWork, to_write: bool, here: bool, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        passed, until = work.chunks, loop.time() + within_s
        comes = to_write or here or self._stream.has_bytes  # else a thread would wait for what is only announced
        while not (comes and await self._advance(work, here)):
            comes = True
            if work.chunks > passed:
                passed, until = work.chunks, loop.time() + within_s
            verb = "taken" if to_write else "sent"
            slow = SlowBodyError(f"{self.client} has {verb} no whole chunk within {within_s:g} s")
            if loop.time() >= until:
                raise slow
            try:
                async with asyncio.timeout_at(None if until == math.inf else until):
                    await _ready(self._stream.connection, to_write=to_write)
            except TimeoutError:
                raise slow from None

    async def _advance(self, work: StreamWork, here: bool) -> bool:
        """Cancelling this waits until a thread, which is soon, has let go of the memory: a repeat of the push gets it
        next."""
        if not here:
            return await in_thread(self._pool, work.advance, _nothing)
        self._stream.waits = False
        try:
            return work.advance()
        finally:
            self._stream.waits = True

    # ---- transfers, at the owner's end

    async def serve(self, answer: Answer) -> None:
        """Answer one transfer after the other until the connection ends; then close it."""
        try:
            while not self._stops:
                await _ready(self._stream.connection)
                self._is_busy = True
                await self._serve_one(answer)
                self._is_busy = False
        except TransferError as ended:  # with a last word, if that could be said
            log.debug("%s: %s", self.client, ended)
        finally:
            self.close()

    async def _serve_one(self, answer: Answer) -> None:
        question: bytes | TransferError
        try:
            question = await self.message()
        except StreamEndedError:
            raise
        except TransferError as error:  # it was damaged on the way, or is no message
            question = error
        said = await self._answer(answer(self, question))
        await self.say(said.SerializeToString())
        self._stream.forget_scratch()
        if said.HasField("failure"):  # nobody knows how far the connection is
            await self._have_read()
            raise StreamEndedError("a transfer failed")

    async def _answer(self, answering: Awaitable[pb.TransferAnswer]) -> pb.TransferAnswer:
        """The answer, unless the client ends before."""
        task = self._answering = asyncio.ensure_future(answering)
        self._watch()
        try:
            await asyncio.wait([task])
        finally:
            self._answering = None
            self._unwatch()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            raise StreamEndedError("the client has ended")
        return task.result()

    async def _have_read(self) -> None:
        """Let the client read the last message, while it sends: what it sends is dropped, because a connection that is
        closed with bytes in it is reset."""
        dropped = memoryview(bytearray(_DROPPED_BYTES))
        self._stream.end_writing()
        self._stream.waits = False
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORD_S):
                while True:
                    if not self._stream.read(dropped):
                        await _ready(self._stream.connection)

    def _watch(self) -> None:
        """Notice when the client of a transfer ends that moves no bytes now."""
        if self._answering is not None and not self._moves:
            asyncio.get_running_loop().add_reader(self._stream.connection, self._spoken_to)

    def _unwatch(self) -> None:
        asyncio.get_running_loop().remove_reader(self._stream.connection)

    def _spoken_to(self) -> None:
        self._unwatch()
        if self._answering is None:
            return
        if self._stream.has_ended:
            self._answering.cancel()
        else:  # bytes that are not taken yet
            asyncio.get_running_loop().call_later(_LOOK_S, self._watch)

    def stop(self) -> None:
        """Take no more transfers; ``serve`` ends once the present one has."""
        self._stops = True
        if not self._is_busy:
            self._stream.abort()

    def close(self) -> None:
        """End the connection, which moves no bytes. Idempotent."""
        self._unwatch()
        self._stream.abort()
        self._stream.close()


class ParcelStream:
    """The bytes of one call, in memory that its caller has made. What ``OwnerStream`` is over TCP."""

    def __init__(self, parcel: Parcel, pool: ThreadPoolExecutor) -> None:
        self.parcel, self._pool = parcel, pool
        self._ends = False  # the call was cancelled

    def _stop(self) -> None:
        self._ends = True

    async def receive(self, landings: Iterable[ShardDestination]) -> None:
        """Copy shards, in this order. Raises TransferError if they are others."""
        await in_thread(self._pool, partial(self._take, list(landings)), self._stop)

    def _take(self, landings: Sequence[ShardDestination]) -> None:
        for landing in landings:
            if self._ends:
                return
            content = self.parcel.take(landing.shard)
            if len(content) != landing.size_bytes:
                raise TransferError(
                    f"{len(content):,} bytes came of shard {landing.shard}, which has {landing.size_bytes:,}"
                )
            if landing.out is not None:
                landing.out.data[:] = content
            landing.landed()

    async def send(self, shards: Iterable[tuple[int, memoryview]]) -> None:
        """Copy shards into the caller's memory, in this order. Raises TransferError if it has no room for them."""
        await in_thread(self._pool, partial(self._put, list(shards)), self._stop)

    def _put(self, shards: Sequence[tuple[int, memoryview]]) -> None:
        for shard, content in shards:
            if self._ends:
                return
            self.parcel.put(shard, content)


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
