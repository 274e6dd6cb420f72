"""A tensor that autograd saved, and its bytes: an entry is one piece of one storage at one version. Also which storages
never leave.

[Note: versions] torch notices in-place changes of saved tensors by a version counter, but not if hooks pack them. A
detached alias shares its tensor's counter, even after its own memory is swapped for an empty one. Each handle keeps
such an alias, its ``probe``, and unpack raises what torch would have raised.

[Note: cycles] pack may get the node's own output with its ``grad_fn``. What a handle keeps is always detached, because
otherwise the graph would keep itself alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rayzero.activations.host_pool import HostBuffer
from rayzero.activations.ledger import Ledger
from rayzero.codecs import RAW, Codec
from rayzero.lanes import Event
from rayzero.tensor_metadata import plain

ALIGN = 512  # bytes; a piece begins at a multiple, so that what comes back has its old alignment


@dataclass(frozen=True, slots=True)
class View:
    """A strided view of a storage."""

    start: int  # bytes from the storage's first byte
    size: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    itemsize: int  # bytes

    @property
    def nbytes(self) -> int:
        """The bytes of the elements that it shows. An expanded element counts every time."""
        count = self.itemsize
        for length in self.size:
            count *= length
        return count

    @property
    def stop(self) -> int:
        """One past the last byte that it touches, counted from the storage's first."""
        if 0 in self.size:
            return self.start
        reach = sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))
        return self.start + (reach + 1) * self.itemsize

    @property
    def dense(self) -> bool:
        """Whether it shows every element between start and stop once: it is contiguous, or a permutation of that."""
        return self.nbytes == self.stop - self.start and all(
            step > 0 or length <= 1 for length, step in zip(self.size, self.stride, strict=True)
        )


@dataclass(frozen=True, slots=True)
class StoragePiece:
    """Bytes that travel together: an interval of the storage, or the gathered elements of one view."""

    start: int
    stop: int
    gathered: View | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that it has on the device."""
        return self.stop - self.start if self.gathered is None else self.gathered.nbytes

    def covers(self, view: View) -> bool:
        """Whether ``view`` can be shown from this piece alone."""
        if self.gathered is not None:
            return self.gathered == view
        return self.start <= view.start and view.stop <= self.stop


def plan_pieces(storage_bytes: int, views: Sequence[View], coverage: float = 0.5) -> list[StoragePiece]:
    """Pieces that cover all ``views`` of a storage, each byte at most once unless it is gathered.

    A dense view takes its own interval. A strided view with at least ``coverage`` of the storage's bytes takes the
    whole storage; any other is gathered unless an interval holds it anyway. Touching intervals become one."""
    spread = [view for view in views if not view.dense]
    if any(min(view.nbytes, storage_bytes) >= coverage * storage_bytes for view in spread):
        return [StoragePiece(0, storage_bytes)]
    pieces = _merged(sorted((view.start // ALIGN * ALIGN, view.stop) for view in views if view.dense))
    for view in dict.fromkeys(spread):
        if not any(piece.covers(view) for piece in pieces):
            pieces.append(StoragePiece(view.start, view.stop, view))
    return pieces


def _merged(intervals: Sequence[tuple[int, int]]) -> list[StoragePiece]:
    pieces: list[StoragePiece] = []
    for start, stop in intervals:
        if pieces and start <= pieces[-1].stop:
            pieces[-1] = StoragePiece(pieces[-1].start, max(stop, pieces[-1].stop))
        else:
            pieces.append(StoragePiece(start, stop))
    return pieces


GroupT = TypeVar("GroupT")  # the group that a tensor was saved in


class KeptTensor:
    """A tensor that stays on the device: it is too small, a parameter, or of a kind that is never offloaded."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version

    def read(self) -> Tensor:
        """The tensor. Raises RuntimeError if it was changed in place since it was saved."""
        check_version(self.tensor, self.version, self.tensor)
        return self.tensor


End = tuple[GroupT, "Entry | None", int]  # of a handle that has ended: its group, its entry, the last return it read


class Saved(Generic[GroupT]):
    """A handle: what autograd keeps in place of a tensor that may leave. It holds the tensor itself until its group is
    committed, and afterwards if the tensor stays.

    When the graph node is freed, ``__del__`` only notes the handle's end, because it may run in any thread at any
    moment."""

    __slots__ = (
        "__weakref__",
        "_ends",
        "dtype",
        "entry",
        "epoch",
        "group",
        "probe",
        "small",
        "tensor",
        "version",
        "view",
    )

    def __init__(self, tensor: Tensor, group: GroupT, *, small: bool, ends: deque[End[GroupT]]) -> None:
        """``tensor``: strided, of any shape and dtype. ``small``: it only leaves with a storage that leaves anyway."""
        self.tensor: Tensor | None = tensor.detach()  # freed by: leave()
        self.version: int = tensor._version
        self.probe = probe_of(tensor)
        self.view = view_of(tensor)
        self.dtype = tensor.dtype
        self.group = group
        self.small = small
        self.entry: Entry | None = None
        self.epoch = 0  # number of the entry's return that this handle last read
        self._ends = ends

    def leave(self, entry: Entry) -> None:
        """Let go of the tensor: ``entry`` has its bytes from now on."""
        self.entry = entry
        self.tensor = None

    def check(self) -> None:
        """Raise torch's RuntimeError if the tensor was changed in place since it was saved."""
        check_version(self.probe, self.version, self)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.view.size)}"

    def __del__(self) -> None:
        self._ends.append((self.group, self.entry, self.epoch))


def view_of(tensor: Tensor) -> View:
    """The tensor as a view of its storage."""
    itemsize = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * itemsize
    return View(start, tuple(tensor.shape), tuple(tensor.stride()), itemsize)


def view_bytes(tensor: Tensor) -> int:
    """The bytes of the view, or of its storage if that is smaller (expanded tensors)."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def probe_of(tensor: Tensor) -> Tensor:
    """An empty tensor whose version counter is ``tensor``'s. See [Note: versions]."""
    probe = tensor.detach()
    probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return probe


def check_version(probe: Tensor, expected: int, shown: object) -> None:
    """Raise RuntimeError in torch's words if ``probe``'s counter is no longer ``expected``."""
    if probe._version != expected:
        what = f"{shown.dtype} {list(shown.shape)}" if isinstance(shown, Tensor) else str(shown)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{what}] is at version {probe._version}; expected version {expected} instead. Hint: the tensor was saved "
            "under activation offload; find the operation that changed it after it was used."
        )


class Resident:
    """The device bytes of an entry on its way out; ``bytes`` is None once the device memory may be freed.

    Its copy may clear it in any thread, so read ``bytes`` once into a local. Its bytes leave the ledger once."""

    __slots__ = ("_held", "_ledger", "_lock", "bytes")

    def __init__(self, data: Tensor, ledger: Ledger) -> None:
        self.bytes: Tensor | None = data  # 1D uint8 on the device; freed by: clear()
        self._ledger = ledger
        self._held = False
        self._lock = threading.Lock()

    def hold(self) -> bool:
        """Keep the device memory until ``clear(held=True)``, because its bytes are needed soon. False if it is already
        gone."""
        with self._lock:
            self._held = self.bytes is not None
            return self._held

    def clear(self, *, held: bool = False) -> None:
        """Let the device memory go; where it is held, only if ``held``. Idempotent."""
        with self._lock:
            if self._held and not held:
                return
            data, self.bytes = self.bytes, None
        if data is not None:
            self._ledger.drop_device(data.numel())


class EntryPlace(Enum):
    """Where an entry's bytes are, and so which of its memory exists."""

    KEPT = auto()  # on the device only; the handles hold it
    LEAVING = auto()  # on the device; a copy into a host buffer is in flight
    AWAY = auto()  # in a host buffer only (and, of a split, the head on the device)
    RETURNING = auto()  # in a host buffer; a copy into device memory is in flight
    BACK = auto()  # in a host buffer and in valid device memory
    FREED = auto()  # nothing


class Entry:
    """Bytes that leave and return together.

    Knows its memory and how many handles read it; not groups, or who decides."""

    __slots__ = (
        "ahead",
        "arrival", "back", "captured", "codec", "departure", "dtype", "epoch", "freed", "handles", "head", "label",
        "lease", "piece", "probe", "resident", "storage", "storage_bytes", "version", "waiting",
    )  # fmt: skip

    def __init__(
        self, piece: StoragePiece, members: Sequence[Saved[Any]], storage: torch.UntypedStorage, label: str
    ) -> None:
        saved = members[0]
        self.piece = piece
        self.label = label
        self.dtype = _common_dtype(piece, members)
        self.storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # keeps the address from being used again
        self.storage_bytes = storage.nbytes()
        self.probe, self.version = saved.probe, saved.version
        self.handles = 0  # handles that have not ended
        self.waiting = 0  # handles that have not read since the last return
        self.epoch = 0  # number of returns
        self.resident: Resident | None = None  # freed by: its copy out, or Shelf.free()
        self.head: Tensor | None = None  # 1D uint8, the part of a split that stays; freed by: Shelf.free()
        self.lease: HostBuffer | None = None  # freed by: Shelf.free(), back to the pool after the last copy
        self.back: Tensor | None = None  # 1D uint8; freed by: the last handle to read it, or Shelf.free()
        self.departure: Event | None = None
        self.arrival: Event | None = None
        self.codec: Codec = RAW
        self.captured = False
        self.ahead = False  # its latest return was started before anybody needed it
        self.freed = False

    @property
    def place(self) -> EntryPlace:
        """Where its bytes are now."""
        if self.freed:
            return EntryPlace.FREED
        if self.back is not None:
            return EntryPlace.BACK if self.arrival is not None and self.arrival.finished() else EntryPlace.RETURNING
        if self.lease is None:
            return EntryPlace.KEPT
        return EntryPlace.LEAVING if self.resident is not None and self.resident.bytes is not None else EntryPlace.AWAY

    def same_content(self, saved: Saved[Any]) -> bool:
        """Whether this entry has the bytes of ``saved``: it covers them, and nobody has changed them since."""
        return (
            not self.freed
            and saved.version == self.version == self.probe._version == saved.probe._version
            and self.piece.covers(saved.view)
        )

    def attach(self, saved: Saved[Any]) -> None:
        """One more handle reads this entry."""
        self.handles += 1
        self.waiting += 1
        saved.epoch = self.epoch


class Entries:
    """All entries that are not freed, by the storage they were saved from.

    Knows storages' addresses; not where an entry's bytes are, or who needs it. While an entry exists, its storage's
    address is not used again."""

    def __init__(self) -> None:
        self._of_storage: dict[int, list[Entry]] = {}  # storage address -> entries saved from it

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._of_storage.values())

    def add(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        """Remember that ``entry`` has bytes of ``storage``."""
        self._of_storage.setdefault(storage._cdata, []).append(entry)

    def with_content(self, storage: torch.UntypedStorage, saved: Saved[Any]) -> Entry | None:
        """An entry that already has the bytes of ``saved``, a view of ``storage``; None if there is none."""
        return next((entry for entry in self._of_storage.get(storage._cdata, ()) if entry.same_content(saved)), None)

    def forget(self, entry: Entry) -> None:
        """Drop an entry that is freed."""
        address = entry.storage.cdata
        left = [other for other in self._of_storage.get(address, ()) if other is not entry]
        if left:
            self._of_storage[address] = left
        else:
            self._of_storage.pop(address, None)


def source_of(piece: StoragePiece, storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """The piece's bytes on the device: 1D uint8, sharing ``storage`` unless they had to be gathered.

    A gathered piece must be ``tensor``'s own view."""
    if piece.gathered is None:
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return data.set_(storage, piece.start, (piece.nbytes,), (1,))
    compact = torch.empty_like(tensor, memory_format=torch.preserve_format).copy_(tensor)
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return data.set_(compact.untyped_storage(), 0, (piece.nbytes,), (1,))


def shown(data: Tensor, piece: StoragePiece, saved: Saved[Any]) -> Tensor:
    """``saved``'s tensor, in its shape, strides and dtype, over ``data``: the piece's bytes (1D uint8)."""
    view, start = saved.view, int(data.storage_offset())
    if piece.gathered is not None:
        return _tensor(data.untyped_storage(), start, view.size, _compact_strides(view), saved.probe)
    return _tensor(data.untyped_storage(), start + view.start - piece.start, view.size, view.stride, saved.probe)


def alive(entry: Entry) -> torch.UntypedStorage | None:
    """The storage that the entry was saved from, if somebody else keeps it alive, whole and unchanged; else None."""
    if entry.probe._version != entry.version:
        return None
    storage = torch.UntypedStorage._new_with_weak_ptr(entry.storage.cdata)
    if storage is None or storage.nbytes() != entry.storage_bytes:
        return None
    return storage


def in_place(storage: torch.UntypedStorage, saved: Saved[Any]) -> Tensor:
    """``saved``'s tensor as a view of the storage that it was saved from."""
    return _tensor(storage, saved.view.start, saved.view.size, saved.view.stride, saved.probe)


def _tensor(
    storage: torch.UntypedStorage, start: int, size: tuple[int, ...], stride: tuple[int, ...], like: Tensor
) -> Tensor:
    """A tensor of ``like``'s dtype and device (a fake tensor's device is not its storage's). ``start`` is in bytes."""
    with torch.no_grad():
        return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, start // like.itemsize, size, stride)


def _common_dtype(piece: StoragePiece, members: Sequence[Saved[Any]]) -> torch.dtype:
    """The dtype of the piece's values; uint8, which is never rounded, if there are several or they do not fill it."""
    dtype = members[0].dtype
    same = all(saved.dtype == dtype for saved in members)
    return dtype if same and piece.nbytes % dtype.itemsize == 0 else torch.uint8


def _compact_strides(view: View) -> tuple[int, ...]:
    like = torch.empty_strided(view.size, view.stride, device="meta", dtype=torch.uint8)
    return tuple(torch.empty_like(like, memory_format=torch.preserve_format).stride())


class ProtectedStorages:
    """Recognises tensors by storage, because autograd saves detached views and not the objects themselves.

    Knows storages; not why they are protected."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._of_modules: frozenset[int] = frozenset()
        self._marked: dict[int, StorageWeakRef] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the modules' parameters and buffers again: they may have been replaced or moved."""
        with plain():  # otherwise an engine would unshard its parameters
            self._of_modules = frozenset(
                tensor.untyped_storage()._cdata
                for module in self._modules
                for tensor in (*module.parameters(), *module.buffers())
                if tensor.layout is torch.strided
            )
        self._marked = {cdata: ref for cdata, ref in self._marked.items() if not ref.expired()}  # type: ignore[no-untyped-call]

    def mark(self, tensor: Tensor) -> None:
        """Keep this tensor's storage on the device as long as it lives."""
        ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._marked[ref.cdata] = ref

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        cdata = storage._cdata
        return cdata in self._of_modules or cdata in self._marked
