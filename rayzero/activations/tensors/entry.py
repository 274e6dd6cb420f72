"""One piece of one storage at one version, wherever its bytes are, and the shelf that moves pieces."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rayzero.activations.copy_lane import CopyLane, Parcel, Resident, Ticket
from rayzero.activations.ledger import Ledger
from rayzero.activations.policy import OffloadPolicy
from rayzero.activations.tensors.codec import Codec, codec_for
from rayzero.activations.tensors.host_pool import HostBuffer, HostPool
from rayzero.activations.tensors.pieces import Piece, View
from rayzero.activations.tensors.saved import Saved


class Place(Enum):
    """Where an entry's bytes are, and so which memory exists."""

    KEPT = auto()  # on the device only; the handles hold it
    LEAVING = auto()  # on the device; copy out in flight into a host buffer
    AWAY = auto()  # host buffer only (and the kept head of a split)
    RETURNING = auto()  # host buffer, and a device target with the copy in in flight
    BACK = auto()  # host buffer, and a valid device target
    FREED = auto()  # nothing


class Entry:
    """Bytes that leave and return together.

    Knows its memory and how many handles read it; not groups, nor who decides."""

    __slots__ = (
        "ahead",
        "arrival", "back", "captured", "codec", "departure", "dtype", "epoch", "freed", "handles", "head", "label",
        "lease", "piece", "probe", "resident", "storage", "storage_bytes", "version", "waiting",
    )  # fmt: skip

    def __init__(self, piece: Piece, members: Sequence[Saved], storage: torch.UntypedStorage, label: str) -> None:
        saved = members[0]
        self.piece = piece
        self.label = label
        self.dtype = _common_dtype(piece, members)
        self.storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # keeps the address from being used again
        self.storage_bytes = storage.nbytes()
        self.probe, self.version = saved.probe, saved.version
        self.handles = 0  # that have not ended
        self.waiting = 0  # handles that have not read since the last return
        self.epoch = 0  # number of returns
        self.resident: Resident | None = None  # freed by: the lane when the copy out is through, or free()
        self.head: Tensor | None = None  # 1D uint8, the part of a split that stays; freed by: free()
        self.lease: HostBuffer | None = None  # freed by: free(), back to the pool after the last copy
        self.back: Tensor | None = None  # 1D uint8; freed by: the last handle to read it, or free()
        self.departure: Ticket | None = None
        self.arrival: Ticket | None = None
        self.codec: Codec = codec_for("none", self.dtype)
        self.captured = False
        self.ahead = False  # its latest return was asked for before anybody needed it
        self.freed = False

    @property
    def place(self) -> Place:
        """Where its bytes are now."""
        if self.freed:
            return Place.FREED
        if self.back is not None:
            return Place.BACK if self.arrival is not None and self.arrival.finished() else Place.RETURNING
        if self.lease is None:
            return Place.KEPT
        return Place.LEAVING if self.resident is not None and self.resident.bytes is not None else Place.AWAY

    def same_content(self, saved: Saved) -> bool:
        """True when ``saved`` shows the very bytes this entry has: neither has been changed since it was saved."""
        return (
            not self.freed
            and saved.version == self.version == self.probe._version == saved.probe._version
            and self.piece.covers(saved.view)
        )

    def attach(self, saved: Saved) -> None:
        """One more handle reads this entry."""
        self.handles += 1
        self.waiting += 1
        saved.epoch = self.epoch


class Shelf:
    """Moves entries between device and host.

    Knows lane, pool and ledger; not groups, order, or shares."""

    def __init__(self, lane: CopyLane, pool: HostPool, ledger: Ledger, policy: OffloadPolicy) -> None:
        self._lane, self._pool, self._ledger, self._policy = lane, pool, ledger, policy
        self._graph_leases: list[HostBuffer] = []  # belong to captured graphs; freed by: release_graph_leases()

    def keep(self, entry: Entry) -> None:
        """The entry stays: its handles hold it."""
        self._ledger.add_device(entry.piece.nbytes)

    def send(self, entry: Entry, source: Tensor, take: int) -> bool:
        """Start the last ``take`` bytes of ``source`` (the entry's bytes, 1D uint8) on their way out.

        False, and nothing has happened, when the pool has no room."""
        codec = codec_for(self._policy.compress, entry.dtype)
        lease = self._pool.acquire(codec.encoded_bytes(take, entry.dtype))
        if lease is None:
            return False
        entry.lease, entry.codec, entry.captured = lease, codec, self._lane.capturing()
        entry.head = source[: source.numel() - take].clone() if take < source.numel() else None
        self._ledger.add_device(source.numel() + (0 if entry.head is None else entry.head.numel()))
        entry.resident = Resident(source, self._ledger.drop_device)
        self._ledger.moved("out", take)
        keep = self._policy.max_in_flight is not None
        entry.departure = self._lane.copy_out(entry.resident, self._parcel(entry), take=take, keep=keep)
        return True

    def let_go(self, entry: Entry) -> None:
        """Free the device bytes of an entry on its way out, as soon as the copy is through."""
        if entry.resident is not None and entry.resident.bytes is not None and entry.departure is not None:
            self._lane.let_go(entry.resident, entry.departure)

    def fetch(self, entry: Entry, *, ahead: bool) -> bool:
        """Start the entry's return, if it is away; True if it did. ``ahead``: nobody waits for it yet.

        What is still leaving stays instead: its bytes are on the device until the entry is freed."""
        if entry.place is Place.LEAVING and entry.resident is not None and entry.resident.hold():
            return False
        if entry.place is not Place.AWAY or alive(entry) is not None:
            return False
        assert entry.departure is not None
        target = torch.empty(entry.piece.nbytes, dtype=torch.uint8, device=self._lane.device)
        if self._policy.poison:
            target.fill_(255)
        cut = 0 if entry.head is None else entry.head.numel()
        if entry.head is not None:
            target[:cut].copy_(entry.head)
        self._ledger.add_device(target.numel())
        self._ledger.moved("in", target.numel() - cut)
        entry.arrival = self._lane.copy_in(self._parcel(entry), target[cut:], after=entry.departure)
        entry.back = target
        entry.ahead = ahead
        entry.epoch += 1
        entry.waiting = entry.handles
        return True

    def wait(self, entry: Entry) -> None:
        """Order the caller's work after the entry's return."""
        if entry.arrival is not None:
            entry.arrival.wait()

    def read(self, entry: Entry, saved: Saved) -> Tensor:
        """``saved``'s tensor from the returned bytes; frees them when it is the last handle to read."""
        assert entry.back is not None
        tensor = shown(entry.back, entry.piece, saved)
        if saved.epoch != entry.epoch:
            saved.epoch = entry.epoch
            self._one_less(entry)
        return tensor

    def end(self, entry: Entry, epoch: int) -> bool:
        """A handle has ended that had last read return ``epoch``; True when it was the last and the entry is freed."""
        entry.handles -= 1
        if entry.handles == 0:
            self.free(entry)
            return True
        if epoch != entry.epoch:
            self._one_less(entry)
        return False

    def free(self, entry: Entry) -> None:
        """Free all of the entry's memory; the host buffer goes back once no copy uses it."""
        if entry.freed:
            return
        if entry.lease is None:
            self._ledger.drop_device(entry.piece.nbytes)
        else:
            self._free_moved(entry, entry.lease)
        entry.freed = True

    def release_graph_leases(self) -> None:
        """Give back host buffers that captured CUDA graphs use; call it when the graphs are gone."""
        for lease in self._graph_leases:
            self._pool.give_back(lease)
        self._graph_leases.clear()

    def _free_moved(self, entry: Entry, lease: HostBuffer) -> None:
        if entry.resident is not None and entry.departure is not None:
            self._lane.drop_out(entry.resident, entry.departure)
        self._drop_back(entry)
        if entry.head is not None:
            self._ledger.drop_device(entry.head.numel())
            entry.head = None
        if entry.captured:
            self._graph_leases.append(lease)
        else:
            self._pool.give_back(lease, after=entry.arrival or entry.departure)

    def _one_less(self, entry: Entry) -> None:
        entry.waiting -= 1
        if entry.waiting <= 0:
            self._drop_back(entry)

    def _drop_back(self, entry: Entry) -> None:
        if entry.back is None:
            return
        if entry.arrival is not None:
            self._lane.drop_in(entry.arrival)
        self._ledger.drop_device(entry.back.numel())
        entry.back = None

    def _parcel(self, entry: Entry) -> Parcel:
        assert entry.lease is not None
        return Parcel(entry.lease.bytes, entry.codec, entry.dtype, entry.label)


def source_of(piece: Piece, storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """The piece's bytes on the device: 1D uint8, sharing ``storage`` unless they had to be gathered.

    A gathered piece must be ``tensor``'s own view."""
    if piece.gathered is None:
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return data.set_(storage, piece.start, (piece.nbytes,), (1,))
    compact = torch.empty_like(tensor, memory_format=torch.preserve_format).copy_(tensor)
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return data.set_(compact.untyped_storage(), 0, (piece.nbytes,), (1,))


def shown(data: Tensor, piece: Piece, saved: Saved) -> Tensor:
    """``saved``'s tensor, sharing ``data``: the piece's bytes (1D uint8)."""
    view, start = saved.view, int(data.storage_offset())
    if piece.gathered is not None:
        return _tensor(data.untyped_storage(), start, view.size, _compact_strides(view), saved.probe)
    return _tensor(data.untyped_storage(), start + view.start - piece.start, view.size, view.stride, saved.probe)


def alive(entry: Entry) -> torch.UntypedStorage | None:
    """The storage the entry was saved from, if somebody else keeps it alive, whole and unchanged."""
    if entry.probe._version != entry.version:
        return None
    storage = torch.UntypedStorage._new_with_weak_ptr(entry.storage.cdata)
    if storage is None or storage.nbytes() != entry.storage_bytes:
        return None
    return storage


def in_place(storage: torch.UntypedStorage, saved: Saved) -> Tensor:
    """``saved``'s tensor in the storage it was saved from."""
    return _tensor(storage, saved.view.start, saved.view.size, saved.view.stride, saved.probe)


def _tensor(
    storage: torch.UntypedStorage, start: int, size: tuple[int, ...], stride: tuple[int, ...], like: Tensor
) -> Tensor:
    """A tensor of ``like``'s dtype and device (a fake one's is not its storage's); ``start`` in bytes."""
    with torch.no_grad():
        return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, start // like.itemsize, size, stride)


def _common_dtype(piece: Piece, members: Sequence[Saved]) -> torch.dtype:
    """The dtype of the piece's values; uint8 (never rounded) if they are of several or do not fill it."""
    dtype = members[0].dtype
    same = all(saved.dtype == dtype for saved in members)
    return dtype if same and piece.nbytes % dtype.itemsize == 0 else torch.uint8


def _compact_strides(view: View) -> tuple[int, ...]:
    like = torch.empty_strided(view.size, view.stride, device="meta")
    return tuple(torch.empty_like(like, memory_format=torch.preserve_format).stride())
