"""Transfers to and from one owner, over a connection or a line: small ones go together, because each waits for an
answer. And the threads that make them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rayzero.codecs import Codec
from rayzero.codecs.changes import apply_record, room_for_record
from rayzero.codecs.record import kept_bytes, read_record
from rayzero.concurrency.futures import Gather
from rayzero.concurrency.threads import use_torch_threads
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.host.channel import QUICK_S, Channel
from rayzero.store.host.line_channel import LineChannel
from rayzero.store.host.owner_link import AnyChannel
from rayzero.store.shm.lines import room_for
from rayzero.store.wire.payload import Assembly, byte_view
from rayzero.store.wire.tensor_stream import Progress

BATCH_BYTES = 8 << 20  # the most that travels together
BATCH_PARTS = 1024  # the same: their requests are one message


class Part(Protocol):
    """A transfer that may travel with others."""

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        ...

    @property
    def kind(self) -> Hashable:
        """Parts of one kind may travel together."""
        ...


P = TypeVar("P", bound=Part)


class Batches(Generic[P]):
    """A queue of parts for one owner. When a thread is free, it takes all waiting parts that may travel together.

    So the first part of a burst goes at once, and the others go when a batch has ended: no part waits for a timer. An
    owner that hangs holds only the threads of its own batches, not those that other owners need. Knows sizes and kinds;
    not what a part is."""

    def __init__(self, pool: Executor, move: Callable[[list[P]], None], *, at_once: int = 1) -> None:
        """``move`` is called in ``pool`` with 1 or more parts of one kind; it must not raise. ``at_once``: the most
        batches under way."""
        self._pool, self._move, self._at_once = pool, move, at_once
        self._lock = threading.Lock()
        self._queue: deque[P] = deque()
        self._under_way = 0  # batches submitted or moving

    def add(self, part: P) -> None:
        """Queue ``part`` for the next batch. Raises RuntimeError if it needs a thread and the pool is shut down."""
        with self._lock:
            if self._under_way < self._at_once:
                self._pool.submit(self._run)
                self._under_way += 1
            self._queue.append(part)

    def _run(self) -> None:
        """Move one batch, then queue up behind other owners' batches."""
        while True:
            with self._lock:
                batch = self._take()
            if batch:  # else another thread took all
                self._move(batch)
            with self._lock:
                if not self._queue:
                    self._under_way -= 1
                    return
                try:
                    self._pool.submit(self._run)
                    return
                except RuntimeError:  # shut down: parts that were added before still go, in this thread
                    continue

    def _take(self) -> list[P]:
        batch: list[P] = []
        room = BATCH_BYTES
        while self._queue and len(batch) < BATCH_PARTS:
            part = self._queue[0]
            if batch and (part.kind != batch[0].kind or part.size > room):
                break
            batch.append(self._queue.popleft())
            room -= part.size
        return batch


class TransferThreads:
    """The threads that move the bytes of one caller to and from all of its owners. So a push never queues behind
    fetches, or behind the pushes to an owner that hangs."""

    def __init__(self, num_owners: int, who: str, streams: int | None = None) -> None:
        """``who``: "rank 3". ``streams``: of each method, to one owner at once, at most; None: as many as there are
        threads for it."""
        threads, shared = _shared_out(num_owners)
        self.streams = shared if streams is None else streams
        self.closing = threading.Event()  # set when the caller closes: nothing is repeated any more
        self.fetches, self.pushes = (
            ThreadPoolExecutor(
                threads, f"rayzero-{who.replace(' ', '')}-{way}", initializer=use_torch_threads, initargs=(1,)
            )
            for way in ("fetch", "push")
        )  # freed by: close()

    def close(self) -> None:
        """End the threads, once the links are closed. Idempotent."""
        for pool in (self.fetches, self.pushes):
            pool.shutdown(wait=True)


def _shared_out(num_owners: int) -> tuple[int, int]:
    threads = min(8, max(2, num_owners))
    return threads, max(1, threads // num_owners)


def most_transfers(num_owners: int) -> int:
    """The most transfers between a rank and one owner at a time: fetches, and in other threads pushes, stages, and
    loads, after which come fetches of what the rank multiplies."""
    threads, streams = _shared_out(num_owners)
    return streams + min(threads, 3 * streams)


Range = tuple[int, int]  # start, stop


@dataclass(eq=False, slots=True, kw_only=True)
class Download:
    """One unit's shards of one owner, on their way into memory."""

    gather: Gather
    awaited: str  # "layers.7 v42", for messages
    shards: list[Shard]
    version: int
    what: str  # the tensor kind
    dtype: torch.dtype  # of the values
    place: Callable[[Shard], Tensor]  # where a shard goes: its values, or, of records that stay encoded, its record
    kept: UnitLayout | None  # the unit, if records of it come: it is kept encoded
    decode: bool = True  # records that come
    since: int | None = None  # the version that is in its place: what has changed since is enough
    filled: int = 0  # shards
    received: int = 0  # bytes
    ended: bool = False

    @property
    def size(self) -> int:
        """Bytes on the wire, at most."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """The same of each shard."""
        if self.kept is not None:
            return [kept_bytes(self.kept, shard) for shard in self.shards]
        return [shard.numel * self.dtype.itemsize for shard in self.shards]

    @property
    def kind(self) -> Hashable:
        """See ``Part``."""
        return self.version, self.what, self.since

    def fill(self, take: Callable[[Assembly], None]) -> None:
        """Have all shards filled, or decode them, from the first one on. ``take``: fills in a shard's bytes."""
        self.filled = self.received = 0
        for shard in self.shards:
            memory = self.place(shard)
            if self.since is None or not self._change(take, shard, memory, self.since):
                self._whole(take, shard, memory)
            self.filled += 1

    def _whole(self, take: Callable[[Assembly], None], shard: Shard, memory: Tensor) -> None:
        if self.kept is None or not self.decode:
            self._receive(take, shard, memory)
            return
        record = torch.empty(kept_bytes(self.kept, shard), dtype=torch.uint8, device="cpu")
        self._receive(take, shard, record)
        read_record(record, self.kept, shard, memory)

    def _change(self, take: Callable[[Assembly], None], shard: Shard, memory: Tensor, since: int) -> bool:
        """Have what a shard has changed filled into its memory. False: the shard follows whole."""
        record = room_for_record(memory)
        self._receive(take, shard, record, is_record=True)
        return apply_record(record, since, self.version, memory)

    def _receive(
        self, take: Callable[[Assembly], None], shard: Shard, memory: Tensor, *, is_record: bool = False
    ) -> None:
        assembly = Assembly(shard.index, memory.nbytes, byte_view(memory), is_record=is_record or self.kept is not None)
        take(assembly)
        self.received += assembly.filled

    def end(self, error: Exception | None) -> None:
        """It has moved, or never will."""
        self.ended = True
        self.gather.end(error)


def holes_of(unit: UnitLayout, presence: bytes) -> list[Range]:
    """The ranges of a unit's flat vector that hold no gradient: padding, and slots without one."""
    holes, end = [], 0
    for i, slot in enumerate(unit.slots):
        if presence[i // 8] >> i % 8 & 1:
            holes.append((end, slot.start))
            end = slot.start + slot.numel
    return [(start, stop) for start, stop in [*holes, (end, unit.numel)] if start < stop]


@dataclass(eq=False, slots=True, kw_only=True)
class Sending:
    """One unit's shards of ``values``, on their way to one owner."""

    gather: Gather
    shards: list[Shard]
    values: Tensor  # the whole unit
    codec: Codec  # on the wire
    holes: Sequence[Range] = ()  # of the unit: what has no values, where that would change how others are encoded
    request: Any  # the part about this unit in the request of its method
    on_end: Callable[[Exception | None], None] = field(default=lambda _: None)
    ended: bool = False

    @property
    def size(self) -> int:
        """Bytes on the wire, at most."""
        return sum(self.codec.most_bytes(shard.numel, self.values.dtype) for shard in self.shards)

    @property
    def kind(self) -> Hashable:
        """See ``Part``."""
        return None

    def contents(self) -> Iterator[tuple[Shard, Tensor]]:
        """What travels of each shard: 1D, its own memory unless it is compressed."""
        for shard in self.shards:
            yield shard, self.codec.encode(self._values_of(shard))

    def _values_of(self, shard: Shard) -> Tensor:
        values = self.values[shard.start : shard.stop]
        inside = [(start, stop) for start, stop in self.holes if start < shard.stop and stop > shard.start]
        if inside:
            values = values.clone()
            for start, stop in inside:
                values[max(0, start - shard.start) : stop - shard.start] = 0.0
        return values

    def end(self, error: Exception | None) -> None:
        """It has moved, or never will."""
        self.ended = True
        self.on_end(error)
        self.gather.end(error)


_SLOWEST_BYTES_PER_S = 10e6  # a stream slower than this is given up
_TOGETHER_BYTES = 16 << 20  # that one transfer of a long row, or over a line, has at most, unless one part has more

Take = Callable[[Assembly], None]  # fills in a shard's bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """How a transfer's bytes move, and who sees it."""

    channel: AnyChannel
    deadline_s: float
    moving: Future[None] = field(default_factory=Future)  # once it is done, the transfer ends
    progress: Progress = field(default_factory=Progress)


def bulk_deadline_s(size_bytes: int) -> float:
    """How long so many bytes may travel, in seconds."""
    return QUICK_S + size_bytes / _SLOWEST_BYTES_PER_S


_REQUESTS = {"Push": pb.PushRequest, "Load": pb.LoadRequest, "Stage": pb.StageRequest}


def upload(move: Move, method: str, parts: Iterable[Sending]) -> None:
    """Send parts, of which each is made when its turn comes; blocks until the owner has them. Raises as
    ``Channel.answer`` and ``Channel.transfer`` do."""
    for together in _neighbours(parts):
        request = _REQUESTS[method](units=[part.request for part in together])
        if isinstance(move.channel, LineChannel):
            _upload_in_memory(move, move.channel, method, request, together)
        else:
            _upload_over_network(move, move.channel, method, request, together)


def _neighbours(parts: Iterable[Sending]) -> Iterator[list[Sending]]:
    """Those that travel together: up to ``_TOGETHER_BYTES``, and one at least. All parts at once, and a parcel for
    them, may be more than fits."""
    together: list[Sending] = []
    size = 0
    for part in parts:
        if together and (size + part.size > _TOGETHER_BYTES or len(together) == BATCH_PARTS):
            yield together
            together, size = [], 0
        together.append(part)
        size += part.size
    if together:
        yield together


def _upload_in_memory(move: Move, channel: LineChannel, method: str, request: Any, parts: list[Sending]) -> None:
    sizes = [part.codec.most_bytes(shard.numel, part.values.dtype) for part in parts for shard in part.shards]
    with closing(channel.parcel(room_for(sizes))) as parcel:
        for part in parts:
            for shard, content in part.contents():
                parcel.put(shard.index, byte_view(content).data)
                move.progress.moved()
        call = channel.transfer(method, request, move.deadline_s, parcel)
        move.moving.add_done_callback(lambda _: call.cancel())
        channel.answer(call)


def _upload_over_network(move: Move, channel: Channel, method: str, request: Any, parts: list[Sending]) -> None:
    with channel.transfer(method, request, move.deadline_s) as transfer:
        move.moving.add_done_callback(lambda _: transfer.abort())
        for part in parts:
            for shard, content in part.contents():
                transfer.send(shard.index, byte_view(content).data, move.progress)
        transfer.answer()


@contextmanager
def download(
    move: Move, request: pb.FetchRequest, sizes: Sequence[int], records: Collection[int] = ()
) -> Iterator[Take]:
    """A context in which a Fetch's bytes can be taken; blocks. ``sizes``: of each shard, at most. ``records``: the
    shards that come as records. Raises as ``Channel.answer`` and ``Channel.transfer`` do."""
    if isinstance(move.channel, LineChannel):
        with _download_in_memory(move, move.channel, request, sizes, records) as take:
            yield take
        return
    with move.channel.transfer("Fetch", request, move.deadline_s) as transfer:
        move.moving.add_done_callback(lambda _: transfer.abort())
        yield lambda assembly: transfer.receive(assembly, move.progress)
        transfer.answer()


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
            call = channel.transfer("Fetch", asked, move.deadline_s, parcel, space)
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
            move.progress.moved()

        yield take


def _grouped(sizes: Sequence[int]) -> list[range]:
    """Neighbours that travel together: up to ``_TOGETHER_BYTES``, and one at least."""
    groups, begin, together = [], 0, 0
    for at, size in enumerate(sizes):
        if together and together + size > _TOGETHER_BYTES:
            groups.append(range(begin, at))
            begin, together = at, 0
        together += size
    return [*groups, range(begin, len(sizes))]
