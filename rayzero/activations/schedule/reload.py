"""Brings groups back ahead of their backward, and each tensor at the latest when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from torch import Tensor

from rayzero.activations.ledger import Ledger
from rayzero.activations.schedule.chunk_order import ChunkKey, ChunkOrder
from rayzero.activations.schedule.group import Chunk, Group
from rayzero.activations.tensors.entry import Entry, EntryPlace, Saved, alive, in_place, shown
from rayzero.activations.tensors.shelf import Shelf
from rayzero.errors import RayZeroError
from rayzero.lanes import Lane


class Reload:
    """Decides which groups come back when a group's backward begins, and finds each tensor that is read.

    Knows the order of chunks and of groups (as in the last backward of the same part, else the reverse of this
    forward); not why something left, or how bytes move. A group's backward begins with its first read in a graph task.
    Called under the offload's lock."""

    def __init__(self, shelf: Shelf, lane: Lane, order: ChunkOrder, ledger: Ledger, prefetch: int) -> None:
        """``lane``: its clock times the waits. ``prefetch``: how many groups come back ahead."""
        self._shelf, self._lane, self._order, self._ledger = shelf, lane, order, ledger
        self._prefetch = prefetch
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._learned: dict[int, tuple[int, tuple[int, ...]]] = {}  # stage -> number of groups, backward order

    def chunk_began(self, chunk: Chunk) -> None:
        """A chunk's forward begins."""
        self._chunks[chunk.key] = chunk

    def chunk_gone(self, chunk: Chunk) -> None:
        """Nothing of a chunk is left: remember the order in which it was read."""
        self._chunks.pop(chunk.key, None)
        if chunk.begun:
            self._learned[chunk.key.stage] = (len(chunk.groups), tuple(chunk.begun))

    @property
    def num_chunks(self) -> int:
        """How many chunks are not gone."""
        return len(self._chunks)

    def live_chunks(self) -> list[Chunk]:
        """The chunks that are not gone, oldest first."""
        return list(self._chunks.values())

    def backward_began(self, group: Group) -> None:
        """Bring this group back, and the groups that follow it."""
        self._order.backward_began(group.chunk.key)
        if group.index not in group.chunk.begun:
            group.chunk.begun.append(group.index)
        self._bring_back(group, ahead=False)
        for upcoming in islice(self._upcoming(group), self._prefetch):
            self._bring_back(upcoming, ahead=True)

    def _upcoming(self, group: Group) -> Iterator[Group]:
        """The groups that have bytes to bring back, in the order in which their backward should follow ``group``'s."""
        chunk, after = group.chunk, group.index
        yield from self._after(chunk, after)
        following = self._order.expected_after(chunk.key)
        if following is not None and following in self._chunks:
            yield from self._after(self._chunks[following], None)

    def _after(self, chunk: Chunk, index: int | None) -> Iterator[Group]:
        order = self._backward_order(chunk)
        place = order.index(index) + 1 if index is not None and index in order else 0
        if index is not None and index not in order:
            order = [other for other in range(len(chunk.groups) - 1, -1, -1) if other < index]
        for upcoming in order[place:]:
            group = chunk.groups[upcoming]
            if any(entry.place not in (EntryPlace.KEPT, EntryPlace.FREED) for entry in group.entries):
                yield group

    def _backward_order(self, chunk: Chunk) -> Sequence[int]:
        count, learned = self._learned.get(chunk.key.stage, (-1, ()))
        return learned if count == len(chunk.groups) else range(len(chunk.groups) - 1, -1, -1)

    def _bring_back(self, group: Group, *, ahead: bool) -> None:
        nbytes = sum(entry.piece.nbytes for entry in reversed(group.entries) if self._shelf.fetch(entry, ahead=ahead))
        if nbytes:
            self._ledger.add(group.name, returned_bytes=nbytes)

    # ---- one tensor

    def read(self, saved: Saved[Group]) -> Tensor:
        """The saved tensor, in its shape and dtype, wherever its bytes are. Waits for them if they are not back yet.
        Raises RayZeroError if its graph was freed or a copy has failed."""
        if saved.tensor is not None:
            self._ledger.add(saved.group.name, on_device=1)
            return saved.tensor
        entry = saved.entry
        if entry is None:
            raise RayZeroError(f"a saved tensor ({saved}) was read after it was freed")
        there = _still_there(entry, saved)
        if there is not None:
            self._lane.used(there)  # what was gathered for its way out is memory of the stream that gathered it
            self._ledger.add(saved.group.name, on_device=1)
            return there
        self._await(entry, saved.group)
        return self._shelf.read(entry, saved)

    def _await(self, entry: Entry, group: Group) -> None:
        """Order the backward after the entry's return, and count how long that takes."""
        if self._shelf.fetch(entry, ahead=False):
            self._ledger.add(group.name, returned_bytes=entry.piece.nbytes)
        if not entry.ahead:
            self._ledger.add(group.name, misses=1)
        start = None if self._lane.capturing() else self._lane.now()  # a captured wait has no duration
        self._shelf.wait(entry)
        if start is not None:
            self._ledger.waited(group.name, self._lane, start, self._lane.now(), ahead=entry.ahead)


def _still_there(entry: Entry, saved: Saved[Group]) -> Tensor | None:
    """The tensor in device memory that was never freed, if there is such memory."""
    data = entry.resident.bytes if entry.resident is not None else None
    if data is not None:
        if entry.piece.gathered is not None and entry.departure is not None:
            entry.departure.settle()  # another stream may have gathered the bytes; if the copy failed, they are there
        return shown(data, entry.piece, saved)
    storage = alive(entry) if entry.back is None else None
    return in_place(storage, saved) if storage is not None else None
