"""One call that moves tensors: it says what travels, and the bytes travel on a connection beside it.

See [Note: beside gRPC] in store/wire/tensor_stream.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from rayzero.errors import TransferError
from rayzero.quantities import count
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.channel import Channel
from rayzero.store.host.transfers.parts import Sending
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.tensor_stream import Receiving, Sent, StreamEndedError

Take = Callable[[Assembly], None]  # adds the next bytes to a shard's


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """How a call's bytes move, and who sees it."""

    channel: Channel
    deadline_s: float
    moving: Future[None]  # once it is done, the call ends
    moved: Callable[[], None]  # called for every chunk


def upload(move: Move, method: str, parts: Iterator[Sending]) -> None:
    """Send parts, of which each is made when its turn comes; blocks until the owner has them. Raises as
    ``Channel.answer`` and ``Channel.beside`` do."""
    requests: SimpleQueue[Any] = SimpleQueue()  # each before its bytes; None: there are no more
    announced = 0
    with move.channel.beside() as beside:
        call = move.channel.start(method, iter(requests.get, None), move.deadline_s, beside)
        move.moving.add_done_callback(lambda _: call.cancel())  # which ends the connection
        try:
            for part in parts:
                requests.put(part.request)
                announced += 1
                for shard, content in part.contents():
                    memory = byte_view(content).data
                    beside.stream.pass_all(Sent(beside.stream, shard.index, memory, move.moved))
        except StreamEndedError as ended:
            requests.put(None)
            why = move.channel.why_ended(call, ended)
            raise why from why.__cause__
        except BaseException:
            call.cancel()  # else the owner would keep memory for bytes that do not come
            raise
        finally:
            requests.put(None)
        took = move.channel.answer(call).announced
        if took != announced:  # a message was lost as a whole; its bytes are still on the connection
            raise TransferError(f"{move.channel.peer} took {took} of {count(announced, 'unit')} of a {method}")


@contextmanager
def download(move: Move, request: pb.FetchRequest) -> Iterator[Take]:
    """A context in which a Fetch's bytes can be taken; blocks. Raises as ``Channel.answer`` and ``Channel.beside``
    do."""
    channel = move.channel
    with channel.beside() as beside:
        call = channel.start("Fetch", request, move.deadline_s, beside)
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
        channel.answer(call)
