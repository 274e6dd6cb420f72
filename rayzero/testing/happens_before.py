"""Checks that accesses of several streams to the same memory are ordered, whatever order they happened in.

Every stream, and the host, has a vector clock: what it comes after (Lamport 1978; Fidge 1988). Two accesses to the same
bytes of which one writes must be ordered by a chain of events and waits, as in FastTrack (Flanagan and Freund 2009) and
torch's own ``torch.cuda._sanitizer``. Who forgets a wait is found also when the copies ran in the right order by luck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

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


class HappensBefore:
    """Knows which stream comes after what, and who has read and written which bytes; not what is computed."""

    def __init__(self) -> None:
        self._clocks: dict[str, dict[str, int]] = defaultdict(dict)
        self._accesses: dict[int, list[_Access]] = {}  # by address of a storage
        self._storages: dict[int, StorageWeakRef] = {}  # the storage that the accesses are of

    def record(self, stream: str) -> Stamp:
        """A point of a stream's work: everything that it has done or waited for. What it does next is a new epoch."""
        stamp = dict(self._clocks[stream])
        stamp[stream] = self._epoch(stream)
        self._clocks[stream][stream] = stamp[stream]
        return stamp

    def order(self, stream: str, stamp: Stamp) -> None:
        """What the stream does next comes after ``stamp``."""
        clock = self._clocks[stream]
        for other, epoch in stamp.items():
            clock[other] = max(clock.get(other, 0), epoch)

    def access(self, stream: str, tensor: Tensor, *, writes: bool, what: str) -> None:
        """``stream`` reads or writes the bytes of ``tensor``. Raises RaceError if an access of another stream is not
        ordered before it. ``what``: for the message."""
        if not tensor.numel():
            return
        start, stop = _span(tensor)
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        known = self._storages.get(address)
        # whoever freed a storage has answered for that; this is another one there
        if known is None or known.expired():  # type: ignore[no-untyped-call]
            self._storages[address] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._accesses[address] = []
        mine = _Access(start, stop, stream, self._epoch(stream), writes, what)
        kept = []
        for before in self._accesses[address]:
            overlaps = before.start < stop and start < before.stop
            if overlaps and (writes or before.writes) and not self._is_before(before, stream):
                raise RaceError(
                    f"{mine.what} on stream {stream!r} is not ordered after {before.what} on stream {before.stream!r}: "
                    f"both use bytes {max(start, before.start)} to {min(stop, before.stop)} of one storage"
                )
            if not (writes and start <= before.start and before.stop <= stop):
                kept.append(before)
        self._accesses[address] = [*(each for each in kept if not _same(each, mine)), mine]

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


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.itemsize
    return int(start), int(start + (last + 1) * tensor.itemsize)
