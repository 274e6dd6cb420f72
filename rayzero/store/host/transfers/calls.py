"""One call that moves tensors: it says what travels, and the bytes travel on a connection beside it.

See [Note: beside gRPC] in store/wire/tensor_stream.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from rayzero.errors import TransferError
from rayzero.quantities import count
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.links.channel import Channel
from rayzero.store.host.links.line_channel import LineChannel
from rayzero.store.host.links.owner_link import AnyChannel
from rayzero.store.host.transfers.parts import Sending
from rayzero.store.shm.lines import room_for
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.tensor_stream import Receiving, Sent, StreamEndedError

_PARCEL_BYTES = 16 << 20  # of shards that come together over a line

Take = Callable[[Assembly], None]  # adds the next bytes to a shard's


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """How a call's bytes move, and who sees it."""

    channel: AnyChannel
    deadline_s: float
    moving: Future[None]  # once it is done, the call ends
    moved: Callable[[], None]  # called for every chunk


def upload(move: Move, method: str, parts: Iterator[Sending]) -> None:
    """Send parts, of which each is made when its turn comes; blocks until the owner has them. Raises as
    ``Channel.answer`` and ``Channel.beside`` do."""
    if isinstance(move.channel, LineChannel):
        for together in _neighbours(parts):
            _upload_in_memory(move, move.channel, method, together)
    else:
        _upload_beside(move, move.channel, method, parts)


def _neighbours(parts: Iterator[Sending]) -> Iterator[list[Sending]]:
    """Those that travel together: up to ``_PARCEL_BYTES``, and one at least. All parts at once, and a parcel for
    them, may be more than fits."""
    together: list[Sending] = []
    size = 0
    for part in parts:
        if together and size + part.size > _PARCEL_BYTES:
            yield together
            together, size = [], 0
        together.append(part)
        size += part.size
    if together:
        yield together


def _upload_in_memory(move: Move, channel: LineChannel, method: str, parts: list[Sending]) -> None:
    sizes = [part.codec.most_bytes(shard.numel, part.values.dtype) for part in parts for shard in part.shards]
    with closing(channel.parcel(room_for(sizes))) as parcel:
        for part in parts:
            for shard, content in part.contents():
                parcel.put(shard.index, byte_view(content).data)
                move.moved()
        call = channel.start_with(method, [part.request for part in parts], move.deadline_s, parcel)
        move.moving.add_done_callback(lambda _: call.cancel())
        channel.answer(call)


def _upload_beside(move: Move, channel: Channel, method: str, parts: Iterator[Sending]) -> None:
    requests: SimpleQueue[Any] = SimpleQueue()  # each before its bytes; None: there are no more
    announced = 0
    with channel.beside() as beside:
        call = channel.start(method, iter(requests.get, None), move.deadline_s, beside)
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
            why = channel.why_ended(call, ended)
            raise why from why.__cause__
        except BaseException:
            call.cancel()  # else the owner would keep memory for bytes that do not come
            raise
        finally:
            requests.put(None)
        took = channel.answer(call).announced
        if took != announced:  # a message was lost as a whole; its bytes are still on the connection
            raise TransferError(f"{channel.peer} took {took} of {count(announced, 'unit')} of a {method}")


@contextmanager
def download(
    move: Move, request: pb.FetchRequest, sizes: Sequence[int], records: Collection[int] = ()
) -> Iterator[Take]:
    """A context in which a Fetch's bytes can be taken; blocks. ``sizes``: of each shard, at most. ``records``: the
    shards that come as records. Raises as ``Channel.answer`` and ``Channel.beside`` do."""
    if isinstance(move.channel, LineChannel):
        with _download_in_memory(move, move.channel, request, sizes, records) as take:
            yield take
    else:
        with _download_beside(move, move.channel, request) as take:
            yield take


@contextmanager
def _download_in_memory(
    move: Move, channel: LineChannel, request: pb.FetchRequest, sizes: Sequence[int], records: Collection[int]
) -> Iterator[Take]:
    """A call after the other, with one parcel: it is small, and its pages are there."""
    groups = _grouped(sizes)
    room = max(room_for([sizes[at] for at in group]) for group in groups)
    left, here = deque(groups), deque[int]()
    with closing(channel.parcel(room)) as parcel:

        def fetch() -> None:
            group = left.popleft()
            shards = [request.shards[at] for at in group]
            asked = pb.FetchRequest(rank=request.rank, version=request.version, kind=request.kind, shards=shards)
            space = pb.LineRoom(sizes=[sizes[at] for at in group], records=[each for each in shards if each in records])
            parcel.rewind()
            call = channel.start_with("Fetch", [asked, space], move.deadline_s, parcel)
            move.moving.add_done_callback(lambda _: call.cancel())
            channel.answer(call)
            here.extend(shards)

        def take(assembly: Assembly) -> None:
            if not here:
                fetch()
            shard = here.popleft()
            content = parcel.take(shard)
            assembly.room_for(shard, 0, len(content))[:] = content
            assembly.add(len(content))
            move.moved()

        yield take


def _grouped(sizes: Sequence[int]) -> list[range]:
    """Neighbours that travel together: up to ``_PARCEL_BYTES``, and one at least."""
    groups, begin, together = [], 0, 0
    for at, size in enumerate(sizes):
        if together and together + size > _PARCEL_BYTES:
            groups.append(range(begin, at))
            begin, together = at, 0
        together += size
    return [*groups, range(begin, len(sizes))]


@contextmanager
def _download_beside(move: Move, channel: Channel, request: pb.FetchRequest) -> Iterator[Take]:
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
