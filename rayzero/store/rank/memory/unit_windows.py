"""Maps each unit's published parameters, where their owners write them, as one tensor."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rayzero.memory.page_lock import PageLock
from rayzero.slabs.arena import Arena
from rayzero.slabs.slab import Slab
from rayzero.slabs.windows import Window, WindowPiece, can_map
from rayzero.store.shm.shared_plan import SharedPlan


class UnitWindows:
    """One window per unit over its owners' slabs, made at first use.

    Knows where shards lie; not versions. A unit has no window if an owner's slabs are not mapped here, if it is kept
    encoded, or if shards of different owners do not meet at page boundaries."""

    def __init__(self, plan: SharedPlan, params: Mapping[int, Arena], *, page_lock: torch.device | None) -> None:
        """``params``: by owner, where its shards lie on this host: in its slabs, or in the host's copy of what comes
        from elsewhere. ``page_lock``: lock windows for copies to this CUDA device; None: windows are private
        (slabs/windows.py), because this process computes with these very bytes and may write to them."""
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
