"""Maps each unit's published parameters, where their owners write them, as one tensor: parts of several slabs side by
side in one range of addresses, without a copy."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rayzero.errors import MemoryPlanError, StoreClosedError, UnsupportedError
from rayzero.memory import mapping
from rayzero.memory.mapping import PageLock
from rayzero.quantities import PAGE, whole_pages
from rayzero.slabs.arena import Arena
from rayzero.slabs.slab import Slab
from rayzero.store.shm.shared_plan import SharedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPiece:
    """Part of a slab."""

    slab: Slab
    offset: int  # bytes from the slab's start
    bytes: int


def can_map(pieces: Sequence[tuple[int, int, int]]) -> bool:
    """Whether pieces (window offset, file offset, bytes), in window order, fill a window from its start without a gap,
    and each starts at a page in both the window and the file."""
    end = 0
    for window_offset, file_offset, size in pieces:
        if window_offset != end or window_offset % PAGE or file_offset % PAGE or size <= 0:
            return False
        end += size
    return end > 0


class Window:
    """Parts of slabs, one after the other, as one 1D tensor.

    Knows the range it maps; not what the bytes mean. Slabs may be closed while it is open. Its pages are shared with
    every process that maps the slabs. With ``private=True``, a page that this process writes to becomes its own copy
    until ``revert()``: it does not see what others write there meanwhile."""

    def __init__(self, pieces: Sequence[WindowPiece], *, private: bool) -> None:
        """Map the pieces. Raises UnsupportedError unless ``can_map`` and each piece lies within its slab, OSError if
        a slab was attached read-only and ``private`` is False."""
        starts = [sum(piece.bytes for piece in pieces[:index]) for index in range(len(pieces))]
        _check([(at, piece.offset, piece.bytes) for at, piece in zip(starts, pieces, strict=True)], pieces)
        self.private, self.bytes = private, sum(piece.bytes for piece in pieces)
        self._parts = [(at, piece.bytes) for at, piece in zip(starts, pieces, strict=True)]  # (offset, bytes)
        largest = max(range(len(pieces)), key=lambda index: pieces[index].bytes)
        alike = pieces[largest].offset - starts[largest]  # [Note: huge pages] in mapping.py
        found = mapping.Mapping.reserve(whole_pages(self.bytes), alike)
        for at, piece in zip(starts, pieces, strict=True):
            found.place(at, piece.slab.fileno(), piece.offset, piece.bytes, private=private)
        self._mapping: mapping.Mapping | None = found

    def tensor(self, dtype: torch.dtype = torch.uint8) -> Tensor:
        """The whole window, 1D. The tensor stays readable after ``close()``. Raises StoreClosedError after that."""
        return self._open().tensor(0, self.bytes // dtype.itemsize, dtype)

    def page_lock(self, device: torch.device) -> PageLock:
        """Lock the window's pages, so that a CUDA device copies from it directly. See :class:`PageLock`."""
        mapping = self._open()
        try:
            return PageLock([(mapping.address, mapping.size)], mapping.keeper, device=device)
        except MemoryPlanError:
            if len(self._parts) == 1:
                raise
        parts = [(mapping.address + at, whole_pages(size)) for at, size in self._parts]  # a driver may want one a file
        return PageLock(parts, mapping.keeper, device=device)

    def revert(self) -> None:
        """Discard what this process wrote, so that the window shows the slabs again. Costs little if nothing was
        written. Raises UnsupportedError for a window that is not private."""
        if not self.private:
            raise UnsupportedError("a shared window cannot be reverted: what was written to it is in the slabs")
        mapping = self._open()
        if mapping.has_private(0, mapping.size):
            mapping.drop_private(0, mapping.size)

    def empty(self) -> None:
        """Show no slab any more: the window is memory of this process from now on, zeros at first, also where a tensor
        has it. Only for a private window, while nobody computes with it."""
        mapping = self._open()
        mapping.place_nothing(0, mapping.size)

    def close(self) -> None:
        """Unmap as soon as no tensor uses it. Idempotent."""
        self._mapping = None

    def _open(self) -> mapping.Mapping:
        if self._mapping is None:
            raise StoreClosedError("a window was used after close()")
        return self._mapping


def _check(offsets: Sequence[tuple[int, int, int]], pieces: Sequence[WindowPiece]) -> None:
    if not can_map(offsets):
        raise UnsupportedError(
            f"pieces (window offset, file offset, bytes) {offsets} cannot be mapped side by side: all but the last "
            f"must be whole pages of {PAGE} bytes and begin at one"
        )
    for piece in pieces:
        if piece.offset + piece.bytes > piece.slab.header.bytes:
            raise UnsupportedError(
                f"bytes {piece.offset} to {piece.offset + piece.bytes} are not all in slab {piece.slab.path}, "
                f"which has {piece.slab.header.bytes}"
            )


class UnitWindows:
    """One window per unit over its owners' slabs, made at first use.

    Knows where shards lie; not versions. A unit has no window if an owner's slabs are not mapped here, if it is kept
    encoded, or if shards of different owners do not meet at page boundaries."""

    def __init__(self, plan: SharedPlan, params: Mapping[int, Arena], *, page_lock: torch.device | None) -> None:
        """``params``: by owner, where its shards lie on this host: in its slabs, or in the host's copy of what comes
        from elsewhere. ``page_lock``: lock windows for copies to this CUDA device; None: windows are private
        (``Window``), because this process computes with these very bytes and may write to them."""
        self._plan, self._params, self._page_lock = plan, params, page_lock
        self._making = threading.Lock()  # held while a window is made, or other owners take over
        self._locks: list[PageLock] = []
        self._windows: dict[int, Window | None] = {}  # freed by: close(), and the last tensor of each
        self._shown: dict[int, list[_Shown]] = {}  # by unit with a window: what it shows
        self._moved: set[int] = set()  # units with a window whose shards lie elsewhere by now

    @property
    def page_locked(self) -> bool:
        """Whether windows are locked for copies to a device."""
        return self._page_lock is not None

    def tensor(self, unit: int) -> Tensor | None:
        """1D, unit.numel elements, the unit's dtype; None where there is no window, or not any more."""
        if unit not in self._windows:
            with self._making:
                pieces = self._pieces(unit)
                self._windows[unit] = None if pieces is None else self._open(pieces)
                self._shown[unit] = _shown(pieces)
        return None if unit in self._moved else self._tensor(unit)

    def _tensor(self, unit: int) -> Tensor | None:
        window = self._windows.get(unit)
        return None if window is None else window.tensor(self._plan.spec.layout.units[unit].dtype)

    def moved(self, unit: int) -> Tensor | None:
        """The memory of a window whose shards lie elsewhere by now; None: it has none, or they are where they were. Who
        computes with it fills it from now on. It shows the version at which they moved until ``revert``."""
        return self._tensor(unit) if unit in self._moved else None

    def enter(self, plan: SharedPlan, params: Mapping[int, Arena]) -> None:
        """Other owners have taken over: make windows over their slabs from now on. Those that are open stay, unless
        shards have moved to another host, or come from one. See ``__init__``."""
        with self._making:
            self._plan, self._params = plan, params
            self._moved |= {unit for unit, shown in self._shown.items() if shown != _shown(self._pieces(unit))}

    def _open(self, pieces: list[WindowPiece]) -> Window:
        window = Window(pieces, private=self._page_lock is None)
        if self._page_lock is not None:
            self._locks.append(window.page_lock(self._page_lock))
        return window

    def _pieces(self, unit: int) -> list[WindowPiece] | None:
        """Where the unit's shards lie, in their order. Neighbours that lie one behind the other are one piece, also of
        different owners: one owner's may lie apart, in slabs of earlier owners."""
        layout, pieces = self._plan.spec.layout, list[WindowPiece]()
        if layout.units[unit].is_coded:
            return None
        for shard in layout.shards_by_unit[unit]:
            arena = self._params.get(self._plan.shard_map.owner(shard.index))
            if arena is None:
                return None
            place = arena.plan.places.get(shard.index)
            if place is None:  # an owner elsewhere has it, and this host has no memory for it
                return None
            piece = WindowPiece(
                slab=arena.slabs[place.slab], offset=place.offset, bytes=shard.numel * layout.units[unit].dtype.itemsize
            )
            last = pieces[-1] if pieces else None
            if last is not None and _same(last.slab, piece.slab) and last.offset + last.bytes == piece.offset:
                pieces[-1] = replace(last, bytes=last.bytes + piece.bytes)
            else:
                pieces.append(piece)
        starts = [sum(piece.bytes for piece in pieces[:index]) for index in range(len(pieces))]
        places = [(at, piece.offset, piece.bytes) for at, piece in zip(starts, pieces, strict=True)]
        return pieces if can_map(places) else None

    def revert(self, unit: int) -> None:
        """Discard what this process wrote into the unit's window; of one that has ``moved``, all of it."""
        window = self._windows.get(unit)
        if window is not None and window.private and unit in self._moved:
            window.empty()
        elif window is not None and window.private:
            window.revert()

    def close(self) -> None:
        """Unmap each window as soon as no tensor uses it. Idempotent."""
        for lock in self._locks:
            lock.release()
        for window in self._windows.values():
            if window is not None:
                window.close()
        self._windows = {}


_Shown = tuple[Path | None, int, int]  # of a window's piece: the slab's file, the offset there and the bytes


def _shown(pieces: Sequence[WindowPiece] | None) -> list[_Shown]:
    return [(piece.slab.path, piece.offset, piece.bytes) for piece in pieces or ()]


def _same(one: Slab, other: Slab) -> bool:
    """Whether two slabs are the same file, which may be mapped twice."""
    return one is other or (one.path is not None and one.path == other.path)
