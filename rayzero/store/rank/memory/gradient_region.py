"""One rank's gradients in its own memory, where the owners of its host read them. For other owners they are kept there
until they are published: an owner that is replaced needs them again.

[Note: one writer] The rank copies a unit's first push of a step into its range and adds later ones in fp32, in the
order of its pushes; owners only read. Nothing is written before the unit's current version is published: until then
the owners may still read the last step's gradients.

[Note: the pool] Where owners keep totals (protocol/gradient_sum.py), a unit's gradients are needed for a moment only.
So units take turns in a small pool. One that finds no room there, because other ranks are behind, goes to its home: a
range of its own, which has pages for as long as it is used. So no push ever waits for another rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from rayzero.errors import StoreError
from rayzero.layout.model_layout import Shard
from rayzero.memory.page_lock import host_zeros
from rayzero.protocol.gradient_sum import GradientMemory, GradientSum, gradient_sizes, has_totals
from rayzero.protocol.messages import AT_HOME, IN_TOTAL, Contribution, ModelSpec, Pushed
from rayzero.protocol.scattered import ScatteredUnit
from rayzero.store.rank.memory.gradient_pool import GradientPool


def gradient_memory(spec: ModelSpec, *, pinned_for: torch.device | None) -> GradientMemory:
    """Zeroed memory of this process for a rank's gradients, without a pool: one block for each dtype. ``pinned_for``:
    page-locked, for copies from this CUDA device."""
    found: dict[int, Tensor] = {}
    for dtype, sizes in gradient_sizes(spec).items():
        block = host_zeros(sum(numel for _, numel in sizes), dtype, pinned_for=pinned_for)
        found |= zip([unit for unit, _ in sizes], torch.split(block, [numel for _, numel in sizes]), strict=True)
    return GradientMemory(found)


class HomePages(Protocol):
    """The pages of units' homes, where they have some only while they are used."""

    def allocate(self, unit: int) -> None:
        """Raises MemoryPlanError if there is no room."""
        ...

    def give_back(self, unit: int) -> None:
        """Nothing reads or writes the unit's home any more."""
        ...


class GradientRegion:
    """All trained units' gradients of one rank, each contiguous.

    Knows units and pushes; not owners, or when a range is free. Calls for one unit must not overlap, but for those of
    ``pushed``, ``copy``, ``given`` and ``give_back``."""

    def __init__(self, spec: ModelSpec, memory: GradientMemory, pages: HomePages | None = None) -> None:
        """``pages``: of homes, if there is a pool."""
        self.memory, self._pages = memory, pages
        self._pool = None if memory.pool is None else GradientPool(memory.pool.nbytes)
        self._pooling = threading.Lock()  # held while the pool or ``_places`` changes
        self._places: dict[int, int] = {}  # units that have a range now, the oldest first
        self._writing: set[int] = set()  # those whose range is being written, or is soon
        self._scattered: dict[int, ref[ScatteredUnit]] = {}  # units of which nothing is in the region
        trained = [unit for unit in spec.layout.units if unit.trainable]
        self.units = tuple(unit.index for unit in trained)
        homes, single = memory.homes, has_totals(spec.world_size, spec.accumulation_steps)
        self._sums = {
            unit.index: GradientSum.of_unit(
                unit,
                None if self._pool is not None else homes[unit.index],
                dtype=homes[unit.index].dtype,
                is_single=single,
            )
            for unit in trained
        }
        self._locks = {unit.index: threading.Lock() for unit in trained}  # each held while its unit's sum changes

    # ---- ranges

    def _range(self, unit: int) -> Tensor:
        """The unit's range, to be written until ``put`` ends; it is given one if it has none."""
        found = self._sums[unit]
        if self._pool is None:
            return found.memory
        with self._pooling:
            self._writing.add(unit)
            if found.has_memory:
                return found.memory
            place = self._pool.take(self.memory.homes[unit].nbytes)
            self._places[unit] = AT_HOME if place is None else place
        if place is None and self._pages is not None:
            self._pages.allocate(unit)
        found.move(self.memory.at(unit, self._places[unit]))
        return found.memory

    @property
    def held(self) -> Sequence[int]:
        """The units that have a range of the pool, or a home for a while, the oldest first."""
        with self._pooling:
            return tuple(self._places)

    def given(self, unit: int) -> Pushed | None:
        """What a unit's range holds; None: it has none, or one that is being written."""
        with self._pooling:
            has_one = unit in self._places and unit not in self._writing
        return self.pushed(unit) if has_one else None

    def give_back(self, unit: int, pushed: Pushed, note: Callable[[Pushed], None]) -> None:
        """What was ``pushed`` is in totals, or applied: ``note`` that it is here no more, then let other units have its
        range. It stays if it is being written by now."""
        assert self._pool is not None
        with self._pooling, self._locks[unit]:
            here = self._sums[unit].pushed()
            if unit not in self._places or unit in self._writing or here is None or self._placed(unit, here) != pushed:
                return
            note(replace(pushed, place=IN_TOTAL))
            self._sums[unit].move(None)
            place = self._places.pop(unit)
            if place != AT_HOME:
                self._pool.give_back(place, self.memory.homes[unit].nbytes)
            elif self._pages is not None:  # before the unit can be at home again
                self._pages.give_back(unit)

    # ---- pushes

    def is_stale(self, push: Contribution) -> bool:
        """Whether ``push`` is a repeat or from an older attempt, so that it is dropped. Raises StoreError for a push
        that no trained unit can have."""
        found = self._sums.get(push.unit)
        expected = None if found is None else (len(found.unit.slots) + 7) // 8
        if found is None or len(push.presence) != expected:
            what = "it is not trained" if found is None else f"{found.unit.name!r} has {expected}"
            raise StoreError(
                f"rank {push.rank} pushed unit {push.unit} with {len(push.presence)} presence bytes: {what}"
            )
        return found.is_stale(push)

    def landing(self, push: Contribution) -> Tensor | None:
        """Where the gradients of ``push`` may be gathered before ``put`` (1D, unit.numel elements, the unit's dtype);
        None: ``put`` has to convert or add them."""
        found = self._sums[push.unit]
        return self._range(push.unit) if found.lands(push) and not found.is_stale(push) else None

    def holds(self, unit: int, grads: Tensor) -> bool:
        """Whether ``grads`` is the unit's range itself."""
        return self._sums[unit].holds(grads)

    def put(self, push: Contribution, grads: Tensor | ScatteredUnit) -> Pushed | None:
        """Write the gradients of ``push`` (1D, unit.numel elements, the unit's dtype) into the region; those that were
        gathered there are not copied, and a first push may stay scattered.

        Returns what the unit's range holds now, None for a stale push or a repeat. Raises AccumulationError for a
        second push into 16-bit memory."""
        found = self._sums[push.unit]
        if found.is_stale(push):
            return None
        found.require_room(push)
        if isinstance(grads, Tensor):
            self._range(push.unit)
        with self._locks[push.unit]:
            found.open(push)
            before = self.scattered(push.unit) if found.count else None
            self._scattered.pop(push.unit, None)
            if isinstance(grads, ScatteredUnit):
                assert not found.count, push
                self._scattered[push.unit] = ref(grads)
            else:
                if before is not None:
                    before.copy_to(found.memory, found.unit)
                found.add(push, grads)
            return self._placed(push.unit, found.close(push))

    def announced(self, unit: int) -> None:
        """Owners know what ``put`` has written: the unit's range may be given back once they need it no more."""
        self._writing.discard(unit)

    def scattered(self, unit: int) -> ScatteredUnit | None:
        """What the unit's gradients are, if they were not written into the region and an owner still holds them."""
        found = self._scattered.get(unit)
        return None if found is None else found()

    @property
    def held_bytes(self) -> int:
        """Bytes of the gradients that are kept, in the region or scattered."""
        homes, pool = self.memory.homes, self.memory.pool
        if pool is not None:
            places = self._places.copy()
            return pool.nbytes + sum(homes[unit].nbytes for unit, place in places.items() if place == AT_HOME)
        scattered = {unit: found() for unit, found in self._scattered.copy().items()}
        kept = sum(home.nbytes for unit, home in homes.items() if unit not in scattered)
        return kept + sum(each.nbytes for each in scattered.values() if each is not None)

    def _placed(self, unit: int, pushed: Pushed) -> Pushed:
        return replace(pushed, place=self._places.get(unit, AT_HOME))

    def pushed(self, unit: int) -> Pushed | None:
        """What the unit's range holds now; None before the first push."""
        with self._locks[unit]:
            pushed = self._sums[unit].pushed()
            return None if pushed is None else self._placed(unit, pushed)

    def copy(self, unit: int, shards: Sequence[Shard]) -> tuple[Pushed | None, Tensor]:
        """The same, with a copy of the shards' elements in memory for the whole unit (1D, unit.numel elements, the
        dtype of the sum), of which the rest stays untouched; None, too, once the range was given back."""
        with self._locks[unit]:
            found = self._sums[unit]
            if not found.has_memory:
                return None, torch.empty(0, dtype=found.dtype, device="cpu")
            values = torch.empty_like(found.memory)
            for shard in shards:
                values[shard.start : shard.stop] = found.memory[shard.start : shard.stop]
            return found.pushed(), values
