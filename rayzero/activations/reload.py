"""Brings groups back ahead of their backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from rayzero.activations.chunk_order import ChunkKey, ChunkOrder
from rayzero.activations.entry import Place, Shelf
from rayzero.activations.group import Chunk, Group
from rayzero.activations.ledger import GroupTotals, Ledger


class Reload:
    """Decides which groups come back when one group's backward begins.

    Knows the order of groups (the last backward of the same part, else the reverse of this forward) and of chunks;
    not how bytes move. A backward's beginning is the first read of the group in a graph task."""

    def __init__(self, shelf: Shelf, order: ChunkOrder, ledger: Ledger, prefetch: int) -> None:
        self._shelf, self._order, self._ledger, self._prefetch = shelf, order, ledger, prefetch
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._learned: dict[int, tuple[int, tuple[int, ...]]] = {}  # stage -> number of groups, backward order

    def chunk_began(self, chunk: Chunk) -> None:
        """Its forward runs."""
        self._chunks[chunk.key] = chunk

    def chunk_gone(self, chunk: Chunk) -> None:
        """Nothing of it is left: remember in what order it was read."""
        self._chunks.pop(chunk.key, None)
        if chunk.begun:
            self._learned[chunk.key.stage] = (len(chunk.groups), tuple(chunk.begun))

    @property
    def num_chunks(self) -> int:
        """Chunks that are not gone."""
        return len(self._chunks)

    def live_chunks(self) -> list[Chunk]:
        """Those chunks, oldest first."""
        return list(self._chunks.values())

    def backward_began(self, group: Group) -> None:
        """Bring this group back, and the next ones behind it."""
        self._order.backward_began(group.chunk.key)
        if group.index not in group.chunk.begun:
            group.chunk.begun.append(group.index)
        self._bring_back(group, ahead=False)
        for upcoming in islice(self._upcoming(group), self._prefetch):
            self._bring_back(upcoming, ahead=True)

    def _upcoming(self, group: Group) -> Iterator[Group]:
        """Groups with bytes that left, in the order their backward should run after ``group``'s."""
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
            if any(entry.place not in (Place.KEPT, Place.FREED) for entry in group.entries):
                yield group

    def _backward_order(self, chunk: Chunk) -> Sequence[int]:
        count, learned = self._learned.get(chunk.key.stage, (-1, ()))
        return learned if count == len(chunk.groups) else range(len(chunk.groups) - 1, -1, -1)

    def _bring_back(self, group: Group, *, ahead: bool) -> None:
        nbytes = sum(entry.piece.nbytes for entry in reversed(group.entries) if self._shelf.fetch(entry, ahead=ahead))
        if nbytes:
            self._ledger.count(group.name, lambda totals: _returned(totals, nbytes))


def _returned(totals: GroupTotals, nbytes: int) -> None:
    totals.returned_bytes += nbytes
