"""Checks that accesses of several streams to the same memory are ordered, whatever order they happened in.

Every stream, and the host, has a vector clock: what it comes after (Lamport 1978; Fidge 1988). Two accesses to the same
bytes of which one writes must be ordered by a chain of events and waits, as in FastTrack (Flanagan and Freund 2009) and
torch's own ``torch.cuda._sanitizer``. Who forgets a wait is found also when the copies ran in the right order by luck.

CUDA's caching allocator hands freed memory out again behind the stream that it was allocated on, which may be at once.
So whoever frees memory that another stream uses must have ordered its own stream after that, or the other one must be
recorded with the memory (``record_stream``).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Stamp = Mapping[str, int]  # by stream: how many of its epochs are over


class RaceError(AssertionError):
    """Two accesses to the same bytes, of which one writes, are not ordered."""


@dataclass(frozen=True, slots=True)
class _Access:
    start: int  # bytes from the storage's begin
    stop: int
    stream: str
    epoch: int
    writes: bool
    what: str


@dataclass(eq=False, slots=True)
class _Memory:
    """One storage, and what is known about it."""

    storage: StorageWeakRef
    nbytes: int
    stream: str | None = None  # the allocator hands it out again behind this stream; None: nobody knows
    held_for: set[str] = field(default_factory=set)  # and only after what these have done by the time it is freed
    accesses: list[_Access] = field(default_factory=list)

    @property
    def freed(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class HappensBefore:
    """Knows which stream comes after what, who has read and written which bytes, and behind which stream the allocator
    hands memory out again; not what is computed.

    ``host``: the stream that is the host. What it has waited for is over, for everybody."""

    def __init__(self, host: str = "host") -> None:
        self._host = host
        self._clocks: dict[str, dict[str, int]] = defaultdict(dict)
        self._memories: dict[int, _Memory] = {}  # by address of a storage
        self._addresses: list[int] = []  # of these, sorted
        self._freed_early: str | None = None

    def record(self, stream: str) -> Stamp:
        """A point of a stream's work: everything that it has done or waited for. What it does next is a new epoch."""
        stamp = dict(self._clocks[stream])
        stamp[stream] = self._epoch(stream)
        self._clocks[stream][stream] = stamp[stream]
        return stamp

    def order(self, stream: str, stamp: Stamp) -> None:
        """What the stream does next comes after ``stamp``."""
        clock = self._clocks[stream]
        if any(clock.get(other, 0) < epoch for other, epoch in stamp.items() if other != self._host):
            self._note_freed()  # which must be right as things stand before it
        for other, epoch in stamp.items():
            clock[other] = max(clock.get(other, 0), epoch)

    def comes_after(self, stream: str, stamp: Stamp) -> bool:
        """Whether what the stream does next comes after ``stamp``."""
        clock = self._clocks[stream]
        return all(clock.get(other, 0) >= epoch for other, epoch in stamp.items() if other != stream)

    def allocate(self, stream: str, tensor: Tensor) -> None:
        """The memory of ``tensor`` is new, and the stream's."""
        self._memory_of(tensor).stream = stream

    def allocated(self) -> int:
        """Bytes of the memory that streams have allocated and nobody has freed, whole storages."""
        return sum(each.nbytes for each in self._memories.values() if each.stream is not None and not each.freed)

    def hold(self, stream: str, tensor: Tensor) -> None:
        """Once freed, the memory of ``tensor`` is handed out again only after what the stream has done by then
        (``record_stream``)."""
        self._memory_of(tensor).held_for.add(stream)

    def access(self, stream: str, tensor: Tensor, *, writes: bool, what: str) -> None:
        """``stream`` reads or writes the bytes of ``tensor``. Raises RaceError if an access of another stream is not
        ordered before it. ``what``: for the message."""
        if not tensor.numel():
            return
        memory = self._memory_of(tensor)
        start, stop = _span(tensor, self._base(tensor.untyped_storage().data_ptr()))
        mine = _Access(start, stop, stream, self._epoch(stream), writes, what)
        kept = []
        for before in memory.accesses:
            overlaps = before.start < stop and start < before.stop
            if overlaps and (writes or before.writes) and not self._is_before(before, stream):
                raise RaceError(
                    f"{mine.what} on stream {stream!r} is not ordered after {before.what} on stream {before.stream!r}: "
                    f"both use bytes {max(start, before.start)} to {min(stop, before.stop)} of one storage"
                )
            if not (writes and start <= before.start and before.stop <= stop):
                kept.append(before)
        memory.accesses = [*(each for each in kept if not _same(each, mine)), mine]

    def check_freed(self) -> None:
        """Raises RaceError if memory was freed that its stream may be handed again too early."""
        self._note_freed()
        found, self._freed_early = self._freed_early, None
        if found is not None:
            raise RaceError(found)

    def _note_freed(self) -> None:
        """Forget what was freed since the last call, and note whether that was too early. Streams have waited for
        nothing since."""
        for address in [address for address, memory in self._memories.items() if memory.freed]:
            memory = self._forget(address)
            if memory.stream is None:
                continue
            enough = {memory.stream, self._host, *memory.held_for}
            for access in memory.accesses:
                if not any(self._is_before(access, stream) for stream in enough):
                    self._freed_early = (
                        f"memory of stream {memory.stream!r} was freed, which is not ordered after {access.what} on "
                        f"stream {access.stream!r}, and nothing holds it for that one"
                    )

    def _forget(self, address: int) -> _Memory:
        self._addresses.remove(address)
        return self._memories.pop(address)

    def _base(self, address: int) -> int:
        """Where the storage begins that has the byte at ``address``: it may be a part of another one."""
        at = bisect_right(self._addresses, address) - 1
        base = self._addresses[at] if at >= 0 else address
        known = self._memories.get(base)
        return base if known is not None and not known.freed and address < base + known.nbytes else address

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        address = self._base(storage.data_ptr())
        known = self._memories.get(address)
        if known is not None and known.freed:
            self._note_freed()
            known = None
        if known is None:
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            known = self._memories[address] = _Memory(reference, storage.nbytes())
            insort(self._addresses, address)
        return known

    def _epoch(self, stream: str) -> int:
        return self._clocks[stream].get(stream, 0) + 1

    def _is_before(self, access: _Access, stream: str) -> bool:
        return access.stream == stream or self._clocks[stream].get(access.stream, 0) >= access.epoch


def _same(ours: _Access, theirs: _Access) -> bool:
    """Whether two accesses are alike but for their time; the later one then says all."""
    return (ours.start, ours.stop, ours.stream, ours.writes) == (
        theirs.start,
        theirs.stop,
        theirs.stream,
        theirs.writes,
    )


def _span(tensor: Tensor, base: int) -> tuple[int, int]:
    """The first byte of a tensor, counted from the address ``base``, and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.untyped_storage().data_ptr() - base + tensor.storage_offset() * tensor.itemsize
    return int(start), int(start + (last + 1) * tensor.itemsize)
