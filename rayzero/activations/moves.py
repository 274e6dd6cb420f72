"""A chunk begins with each forward, and is dropped once nothing of it is left (``Chunks``). What of a group leaves and
what stays, decided once the group is committed (``Unload``); and when it comes back: ahead of its backward, each tensor
at the latest when it is read (``Reload``).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from rayzero.activations.cost import Choice, CostBook
from rayzero.activations.entry import (
    Entries,
    Entry,
    EntryPlace,
    ProtectedStorages,
    Saved,
    StoragePiece,
    alive,
    in_place,
    plan_pieces,
    shown,
    view_bytes,
)
from rayzero.activations.group import Chunk, ChunkKey, ChunkOrder, ChunkQuota, Group, OffloadPolicy
from rayzero.activations.ledger import Ledger
from rayzero.activations.shelf import Shelf
from rayzero.errors import RayZeroError
from rayzero.lanes import Lane

# ---- the way out ----------------------------------------------------------------------------------------------------


class Unload:
    """Decides on a group's tensors, storage by storage, and starts the copies of those that leave.

    Knows shares, the limit in flight and what is stored already; not scopes, what comes back, or how bytes move. Called
    under the offload's lock."""

    def __init__(
        self, shelf: Shelf, entries: Entries, ledger: Ledger, policy: OffloadPolicy, book: CostBook | None
    ) -> None:
        self._shelf, self._entries, self._ledger = shelf, entries, ledger
        self._policy, self._book = policy, book
        self._flying: deque[list[Entry]] = deque()  # groups on their way out, oldest first

    def commit(self, group: Group, release: list[Tensor] | None) -> None:
        """Empty ``release``, decide and send, count which of the released tensors are dead, and keep to the limit in
        flight."""
        found = group.waiting()
        handed = take_over(found, release)
        sent = [entry for same in _by_storage(found) for entry in self._commit_storage(group, same)]
        self._ledger.add(
            group.name, groups=group.saved_bytes > 0, saved_bytes=group.saved_bytes, recomputed=group.recomputed
        )
        for each in handed:
            self._ledger.add(group.name, **{"released_bytes" if each.dead else "refused_bytes": each.nbytes})
        self._limit_in_flight(sent)

    def forget_landed(self) -> None:
        """Take groups that have left off the count of groups in flight."""
        while self._flying and all(entry.place is not EntryPlace.LEAVING for entry in self._flying[0]):
            self._flying.popleft()

    def _commit_storage(self, group: Group, found: list[Saved[Group]]) -> list[Entry]:
        """Decide on the handles of one storage. Returns the entries that were sent."""
        tensor = found[0].tensor
        assert tensor is not None
        storage = tensor.untyped_storage()
        fresh = [saved for saved in found if not self._join_existing(group, storage, saved)]
        valid = [saved for saved in fresh if saved.version == saved.probe._version]
        big = [saved for saved in valid if not saved.small]
        pieces = plan_pieces(storage.nbytes(), [saved.view for saved in big], self._policy.view_coverage) if big else []
        sent = []
        for piece in pieces:
            members = [saved for saved in valid if saved.entry is None and piece.covers(saved.view)]
            sent += [entry] if (entry := self._commit_piece(group, piece, members, storage)) is not None else []
        return sent

    def _join_existing(self, group: Group, storage: torch.UntypedStorage, saved: Saved[Group]) -> bool:
        """Let ``saved`` read from an entry that already has its bytes, so that they are stored once. False if there is
        none."""
        entry = self._entries.with_content(storage, saved)
        if entry is None:
            return False
        self._ledger.add(group.name, shared_bytes=saved.view.nbytes)
        _attach(group, entry, saved)
        return True

    def _commit_piece(
        self, group: Group, piece: StoragePiece, members: list[Saved[Group]], storage: torch.UntypedStorage
    ) -> Entry | None:
        """Make the piece's entry, on the device or on its way out. Returns it if it was sent."""
        entry = Entry(piece, members, storage, group.key.label)
        first = members[0].tensor
        assert first is not None
        group.saved_bytes += piece.nbytes
        self._ledger.add(group.name, shared_bytes=sum(saved.view.nbytes for saved in members[1:]))
        take = self._share(group, piece.nbytes, entry.dtype.itemsize)
        sent = take > 0 and self._shelf.send(entry, storage, first, take)
        if take and not sent:
            group.chunk.quota.put_back(take)
            self._ledger.add(group.name, no_room_bytes=take)
        if sent:
            self._count_sent(group, entry, take)
        else:
            self._shelf.keep(entry)
            self._ledger.add(group.name, kept_bytes=piece.nbytes)
        self._entries.add(storage, entry)
        for saved in members:
            _attach(group, entry, saved)
        return entry if sent else None

    def _share(self, group: Group, nbytes: int, itemsize: int) -> int:
        """How many bytes of a piece leave: a whole number of elements."""
        if self._book is not None:
            return nbytes if not group.recomputed and self._book.choice(group) is Choice.OFFLOAD else 0
        taken = group.chunk.quota.take(nbytes, group=group.index)
        group.chunk.quota.put_back(taken % itemsize)
        return taken - taken % itemsize

    def _count_sent(self, group: Group, entry: Entry, take: int) -> None:
        assert entry.lease is not None
        group.offloaded_bytes += take
        self._ledger.add(
            group.name,
            offloaded_bytes=take,
            host_bytes=entry.lease.bytes.numel(),
            kept_bytes=entry.piece.nbytes - take,
        )

    def _limit_in_flight(self, sent: list[Entry]) -> None:
        limit = self._policy.max_in_flight
        if limit is None or not sent:
            return
        self._flying.append(sent)
        while len(self._flying) > limit:
            for entry in self._flying.popleft():
                self._shelf.let_go(entry)


def _attach(group: Group, entry: Entry, saved: Saved[Group]) -> None:
    """Let ``saved`` read from ``entry``, which ``group``'s backward needs."""
    entry.attach(saved)
    if entry not in group.entries:
        group.entries.append(entry)
    if entry.place is EntryPlace.KEPT:
        saved.entry = entry
    else:
        saved.leave(entry)


def _by_storage(found: Sequence[Saved[Group]]) -> list[list[Saved[Group]]]:
    """The handles, those of one storage together, in the order in which the storages were first saved."""
    groups: dict[int, list[Saved[Group]]] = {}
    for saved in found:
        assert saved.tensor is not None
        groups.setdefault(saved.tensor.untyped_storage()._cdata, []).append(saved)
    return list(groups.values())


# ---- tensors that the caller of a commit no longer needs --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Handed:
    """One tensor that was handed over. Knows its bytes and the handles that hold them; not where they go."""

    nbytes: int
    sharing: list[Saved[Group]] | None  # handles that share its storage; None if somebody else holds it too

    @property
    def dead(self) -> bool:
        """Whether its bytes on the device are no longer held."""
        return self.sharing is not None and all(saved.tensor is None for saved in self.sharing)


def take_over(found: Sequence[Saved[Group]], release: list[Tensor] | None) -> list[Handed]:
    """Empty the list ``release``. ``found``: the handles of the group that is committed.

    Only these handles hold a tensor if nobody else has the Python object and each reference to its storage belongs to
    one of them."""
    handed: list[Handed] = []
    while release:
        tensor = release.pop()
        storage = tensor.untyped_storage()
        sharing = [s for s in found if s.tensor is not None and s.tensor.untyped_storage()._cdata == storage._cdata]
        alone = torch._C._storage_Use_Count(storage._cdata) <= 2 + len(sharing)
        proven = alone and sys.getrefcount(tensor) <= 2
        handed.append(Handed(view_bytes(tensor), sharing if proven else None))
    return handed


# ---- the way back ---------------------------------------------------------------------------------------------------


class Reload:
    """Decides which groups come back when a group's backward begins, and finds each tensor that is read.

    Knows the order of chunks and of groups (as in the last backward of the same part, else the reverse of this
    forward); not why something left, or how bytes move. A group's backward begins with its first read in a graph task.
    Called under the offload's lock."""

    def __init__(self, shelf: Shelf, lane: Lane, order: ChunkOrder, ledger: Ledger, prefetch: int) -> None:
        """``lane``: its clock times the waits. ``prefetch``: how many groups come back ahead."""
        self._shelf, self._lane, self._order, self._ledger = shelf, lane, order, ledger
        self._prefetch = prefetch
        self.chunks: dict[ChunkKey, Chunk] = {}  # that are not gone
        self._learned: dict[int, tuple[int, tuple[int, ...]]] = {}  # stage -> number of groups, backward order

    def chunk_gone(self, chunk: Chunk) -> None:
        """Nothing of a chunk is left: remember the order in which it was read."""
        del self.chunks[chunk.key]
        if chunk.begun:
            self._learned[chunk.key.stage] = (len(chunk.groups), tuple(chunk.begun))

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
        if following is not None and following in self.chunks:
            yield from self._after(self.chunks[following], None)

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


# ---- chunks ---------------------------------------------------------------------------------------------------------


class Chunks:
    """The chunk whose forward runs, if any, and the beginning and end of every chunk.

    Knows forwards, and who needs to hear of a chunk (the order, the reload, the cost book); not what is saved, or who
    moves it. Called under the offload's lock."""

    def __init__(
        self,
        policy: OffloadPolicy,
        protected: ProtectedStorages,
        order: ChunkOrder,
        reload: Reload,
        book: CostBook | None,
    ) -> None:
        self._policy, self._protected = policy, protected
        self._order, self._reload, self._book = order, reload, book
        self.all = False  # whether chunks offload all eligible bytes, whatever the policy's fraction
        self._current: Chunk | None = None
        self._depth = 0  # running forwards of models, one inside the other
        self._last_bytes: dict[int, tuple[int, ...]] = {}  # stage -> those of the last chunk's groups

    def begin(self, stage: int) -> None:
        """A forward of part ``stage`` starts. Inside another forward, or without gradients, it opens no chunk."""
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            self._close()
            self._open_new(stage)

    def end(self) -> None:
        """That forward has ended."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._close()

    def current(self) -> Chunk:
        """The open chunk, or a new one for groups outside any forward of the model."""
        return self._current if self._current is not None else self._open_new(0)

    def backward_began(self, chunk: Chunk) -> None:
        """Something of ``chunk`` is read. If its groups were outside any forward, this closes it."""
        if self._current is chunk and self._depth == 0:
            self._close()

    def drop_if_gone(self, chunk: Chunk) -> None:
        """Forget a chunk if nothing of it is left."""
        if not chunk.gone or chunk.key not in self._reload.chunks:
            return
        self._reload.chunk_gone(chunk)
        self._order.gone(chunk.key)
        if self._book is not None:
            self._book.chunk_gone(chunk)

    def _open_new(self, stage: int) -> Chunk:
        self._protected.refresh()
        key = self._order.forward_began(stage)
        margin = self._policy.margin if self._order.comes_next(key) else 0
        policy = replace(self._policy, fraction=1.0) if self.all else self._policy
        chunk = Chunk(key, ChunkQuota(policy, self._last_bytes.get(stage), margin=margin))
        self._current = chunk
        self._reload.chunks[key] = chunk
        if self._book is not None:
            self._book.chunk_began(len(self._reload.chunks))
        return chunk

    def _close(self) -> None:
        chunk, self._current = self._current, None
        if chunk is None:
            return
        chunk.forward_open = False
        self._order.forward_ended(chunk.key)
        sizes = tuple(group.saved_bytes for group in chunk.groups)
        if any(sizes):
            self._last_bytes[chunk.key.stage] = sizes
        self.drop_if_gone(chunk)
