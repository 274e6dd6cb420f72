"""Maps each unit's published parameters, where their owners write them, as one tensor."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rayzero.layout.model_layout import runs
from rayzero.memory.page_lock import PageLock
from rayzero.slabs.arena import Arena
from rayzero.slabs.windows import Window, WindowPiece, can_map
from rayzero.store.shm.plan import SharedPlan


class UnitWindows:
    """One window per unit over its owners' slabs, made at first use.

    Knows where shards lie; not versions. A unit has no window if an owner's slabs are not mapped here, if it is kept
    encoded, or if shards of different owners do not meet at page boundaries."""

    def __init__(self, plan: SharedPlan, params: Mapping[int, Arena], *, page_lock: bool) -> None:
        """``params``: by owner, of this host. ``page_lock``: lock windows for copies to a CUDA device; else windows are
        private (slabs/windows.py), because this process computes with these very bytes and may write to them."""
        self._plan, self._params, self._page_lock = plan, params, page_lock
        self._locks: list[PageLock] = []
        self._windows: dict[int, Window | None] = {}  # freed by: close(), and the last tensor of each

    def tensor(self, unit: int) -> Tensor | None:
        """1D, unit.numel elements, the unit's dtype; None where there is no window."""
        if unit not in self._windows:
            pieces = self._pieces(unit)
            self._windows[unit] = None if pieces is None else self._open(pieces)
        window = self._windows[unit]
        return None if window is None else window.tensor(self._plan.spec.layout.units[unit].dtype)

    def _open(self, pieces: list[WindowPiece]) -> Window:
        window = Window(pieces, private=not self._page_lock)
        if self._page_lock:
            self._locks.append(window.page_lock())
        return window

    def _pieces(self, unit: int) -> list[WindowPiece] | None:
        if self._plan.spec.layout.units[unit].is_coded:
            return None
        owner_of, pieces, at, places = self._plan.shard_map.owner, [], 0, []
        itemsize = self._plan.spec.layout.units[unit].dtype.itemsize
        of_one_owner = [
            run
            for owner in dict.fromkeys(owner_of(s.index) for s in self._plan.spec.layout.shards_by_unit[unit])
            for run in runs([s for s in self._plan.spec.layout.shards_by_unit[unit] if owner_of(s.index) == owner])
        ]
        for run in sorted(of_one_owner, key=lambda run: run[0].start):
            arena = self._params.get(owner_of(run[0].index))
            if arena is None:
                return None
            place, size = arena.plan.places[run[0].index], sum(shard.numel for shard in run) * itemsize
            pieces.append(WindowPiece(slab=arena.slabs[place.slab], offset=place.offset, bytes=size))
            places.append((at, place.offset, size))
            at += size
        return pieces if can_map(places) else None

    def revert(self, unit: int) -> None:
        """Discard what this process wrote into the unit's window."""
        window = self._windows.get(unit)
        if window is not None and window.private:
            window.revert()

    def close(self) -> None:
        """Unmap each window as soon as no tensor uses it. Idempotent."""
        for lock in self._locks:
            lock.release()
        for window in self._windows.values():
            if window is not None:
                window.close()
        self._windows = {}
