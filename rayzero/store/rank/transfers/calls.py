"""One call that moves tensors: their bytes are in its messages or, of a large one, on a connection beside it.

See [Note: beside gRPC] in store/wire/tensor_stream.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from rayzero.errors import TransferError
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rank.links.channel import Channel, Upload
from rayzero.store.rank.transfers.parts import Sending
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.tensor_stream import Receiving, Sent, StreamEndedError

Take = Callable[[Assembly], None]  # adds the next bytes to a shard's


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """How a call's bytes move, and who sees it."""

    channel: Channel
    deadline_s: float
    beside: bool  # on a connection of their own
    moving: Future[None]  # once it is done, the call ends
    moved: Callable[[], None]  # called for every chunk


def upload(move: Move, method: str, parts: Iterator[Sending]) -> None:
    """Send parts, of which each is made when its turn comes; blocks until the owner has them. Raises as
    ``Channel.answer`` and ``Channel.beside`` do."""
    if move.beside:
        _upload_beside(move, method, parts)
    else:
        _upload_in_messages(move, method, parts)


def _upload_in_messages(move: Move, method: str, parts: Iterator[Sending]) -> None:
    def messages() -> Iterator[bytes]:
        for part in parts:
            for message in part.messages():
                move.moved()
                yield message

    sent = Upload(messages())
    call = move.channel.start(method, sent, move.deadline_s)
    move.moving.add_done_callback(lambda _: call.cancel())
    try:
        move.channel.answer(call)
    finally:
        sent.stop()


def _upload_beside(move: Move, method: str, parts: Iterator[Sending]) -> None:
    headers: SimpleQueue[bytes | None] = SimpleQueue()  # each before its bytes
    with move.channel.beside() as beside:
        call = move.channel.start(method, iter(headers.get, None), move.deadline_s, beside)
        move.moving.add_done_callback(lambda _: call.cancel())  # which ends the connection
        try:
            for part in parts:
                headers.put(part.header)
                for shard, content in part.contents():
                    memory = byte_view(content).data
                    beside.stream.pass_all(Sent(beside.stream, shard.index, memory, move.moved))
        except StreamEndedError as ended:
            headers.put(None)
            why = move.channel.why_ended(call, ended)
            raise why from why.__cause__
        finally:
            headers.put(None)
        move.channel.answer(call)


@contextmanager
def download(move: Move, request: pb.FetchRequest) -> Iterator[Take]:
    """A context in which a Fetch's bytes can be taken; blocks. Raises as ``Channel.messages`` and ``Channel.beside``
    do, and TransferError if there are more bytes than were taken."""
    way = _beside(move, request) if move.beside else _in_messages(move, request)
    with way as take:
        yield take


@contextmanager
def _in_messages(move: Move, request: pb.FetchRequest) -> Iterator[Take]:
    channel = move.channel
    call = channel.stream("Fetch", request, move.deadline_s)
    move.moving.add_done_callback(lambda _: call.cancel())
    messages = channel.messages(call)

    def take(assembly: Assembly) -> None:
        assembly.take(next(messages, None))
        move.moved()

    try:
        yield take
        if next(messages, None) is not None:
            raise TransferError("the owner sent more than the shards asked for")
    finally:
        call.cancel()  # no effect if it has ended


@contextmanager
def _beside(move: Move, request: pb.FetchRequest) -> Iterator[Take]:
    channel = move.channel
    with channel.beside() as beside:
        call = channel.stream("Fetch", request, move.deadline_s, beside)
        move.moving.add_done_callback(lambda _: call.cancel())  # which ends the connection

        def take(assembly: Assembly) -> None:
            receiving = Receiving(beside.stream, assembly)
            while not receiving.take_chunk():
                if move.moving.done():  # the call may have ended long ago, with all bytes on their way
                    raise StreamEndedError("nothing comes any more")
            move.moved()

        try:
            yield take
        except StreamEndedError as ended:
            why = channel.why_ended(call, ended)
            raise why from why.__cause__
        except BaseException:
            call.cancel()
            raise
        for _ in channel.messages(call):
            raise TransferError("the owner sent messages where its bytes are on a connection")
