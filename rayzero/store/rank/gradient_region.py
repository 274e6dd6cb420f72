"""One rank's gradients in its own memory, where the owners of its host read them. For other owners they are kept there
until they need them no more: an owner that is replaced needs them again.

[Note: one writer] The rank writes each push, owners only read. Nothing is written before the unit's current version is
published: until then the owners may still read the last step's gradients. A single rank copies a unit's first push of a
step into its range, and adds later ones there in fp32, in the order of its pushes.

[Note: the pool] Where owners keep totals (protocol/gradient_sum.py), a push is needed for a moment only. So units take
turns in a small pool. A push that finds no room there, because other ranks are behind, goes to a home of its unit: a
range of its own, which has pages for as long as it is used. There is one for each round, so that no push ever waits for
another rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from rayzero.errors import StoreError
from rayzero.layout.model_layout import Shard, UnitLayout
from rayzero.memory.mapping import host_zeros
from rayzero.protocol.gradient_sum import (
    GradientMemory,
    GradientSum,
    Rounds,
    ScatteredUnit,
    gradient_sizes,
    has_totals,
    most_rounds,
    pool_room,
    require_round,
)
from rayzero.protocol.messages import AT_HOME, IN_TOTAL, Contribution, ModelSpec, Pushed


def gradient_memory(spec: ModelSpec, *, pinned_for: torch.device | None) -> GradientMemory:
    """Zeroed memory of this process for a rank's gradients, without a pool: one block for each dtype, and further homes
    as they are asked for. ``pinned_for``: page-locked, for copies from this CUDA device."""
    found: dict[int, Tensor] = {}
    for dtype, sizes in gradient_sizes(spec).items():
        block = host_zeros(sum(numel for _, numel in sizes), dtype, pinned_for=pinned_for)
        found |= zip([unit for unit, _ in sizes], torch.split(block, [numel for _, numel in sizes]), strict=True)
    made: dict[tuple[int, int], Tensor] = {}

    def more(unit: int, number: int) -> Tensor:
        if (unit, number) not in made:
            made[unit, number] = host_zeros(found[unit].numel(), found[unit].dtype, pinned_for=pinned_for)
        return made[unit, number]

    return GradientMemory(found, more=more)


class HomePages(Protocol):
    """The pages of units' homes, where they have some only while they are used."""

    def allocate(self, unit: int, number: int) -> None:
        """Raises MemoryPlanError if there is no room."""
        ...

    def give_back(self, unit: int, number: int) -> None:
        """Nothing reads or writes the home any more."""
        ...


class GradientRegion(Protocol):
    """All trained units' gradients of one rank.

    Knows units and pushes; not owners, or when a range is free. Calls for one unit must not overlap, but for those of
    ``pushed``, ``copy``, ``held``, ``given`` and ``give_back``."""

    memory: GradientMemory
    units: tuple[int, ...]  # the trained ones

    def held(self, unit: int | None = None) -> Sequence[tuple[int, int]]:
        """(unit, count) of pushes that have a range which can be given back, the oldest first. ``unit``: those that
        take a place which another push of it can have; None: all."""
        return ()

    def given(self, unit: int, count: int) -> Pushed | None:
        """What such a range holds; None: it was given back, or something of the unit is being written."""
        return None

    def give_back(self, unit: int, pushed: Pushed, note: Callable[[Sequence[Pushed]], None]) -> None:
        """What was ``pushed`` is in totals, or applied: ``note`` that it is here no more, then let other pushes have
        its range. It stays if something of the unit is being written by now."""
        return

    def is_stale(self, push: Contribution) -> bool:
        """Whether ``push`` is a repeat or from an older attempt, so that it is dropped. Raises StoreError for a push
        that no trained unit can have."""
        ...

    def landing(self, push: Contribution) -> Tensor | None:
        """Where the gradients of ``push`` may be gathered before ``put`` (1D, unit.numel elements, the unit's dtype);
        None: ``put`` has to copy, convert or add them."""
        ...

    def holds(self, unit: int, grads: Tensor) -> bool:
        """Whether ``grads`` is a range of the unit itself."""
        ...

    def put(self, push: Contribution, grads: Tensor | ScatteredUnit) -> Sequence[Pushed]:
        """Write the gradients of ``push`` (1D, unit.numel elements, the unit's dtype) into the region; those that were
        gathered there are not copied, and a first push may stay scattered.

        Returns what the region has of the unit now, nothing for a stale push or a repeat. Raises AccumulationError for
        a push too many."""
        ...

    def announced(self, unit: int) -> None:
        """Owners know what ``put`` has written: ranges of the unit may be given back once they need them no more."""
        return

    def scattered(self, unit: int) -> ScatteredUnit | None:
        """What the unit's gradients are, if they were not written into the region and an owner still holds them."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of the gradients that are kept, in the region or scattered."""
        ...

    def pushed(self, unit: int) -> Sequence[Pushed]:
        """What the region has of the unit now; nothing before the first push."""
        ...

    def copy(self, unit: int, pushed: Pushed, shards: Sequence[Shard]) -> Tensor | None:
        """A copy of the shards' elements of what was ``pushed``, in memory for the whole unit (1D, unit.numel elements,
        the dtype in which they are kept), of which the rest stays untouched; None if that is no longer there."""
        ...


def gradient_region(spec: ModelSpec, memory: GradientMemory, pages: HomePages | None = None) -> GradientRegion:
    """The region over ``memory``. ``pages``: of homes, if there is a pool."""
    return RoundRegion(spec, memory, pages) if has_totals(spec.world_size) else SumRegion(spec, memory)


def _require_unit(push: Contribution, unit: UnitLayout | None) -> None:
    """Raise StoreError for a push that no trained unit can have."""
    expected = None if unit is None else (len(unit.slots) + 7) // 8
    if unit is None or len(push.presence) != expected:
        what = "it is not trained" if unit is None else f"{unit.name!r} has {expected}"
        raise StoreError(f"rank {push.rank} pushed unit {push.unit} with {len(push.presence)} presence bytes: {what}")


def _copy_of(memory: Tensor, shards: Sequence[Shard]) -> Tensor:
    values = torch.empty_like(memory)
    for shard in shards:
        values[shard.start : shard.stop] = memory[shard.start : shard.stop]
    return values


class SumRegion(GradientRegion):
    """The gradients of a single rank, added up in its memory. No range is given back: the next step's pushes take the
    same one."""

    def __init__(self, spec: ModelSpec, memory: GradientMemory) -> None:
        self.memory = memory
        self._scattered: dict[int, ref[ScatteredUnit]] = {}  # units of which nothing is in the region
        trained = [unit for unit in spec.layout.units if unit.trainable]
        self.units = tuple(unit.index for unit in trained)
        self._sums = {unit.index: GradientSum.of_unit(unit, memory.homes[unit.index]) for unit in trained}
        self._locks = {unit.index: threading.Lock() for unit in trained}  # each held while its unit's sum changes

    def is_stale(self, push: Contribution) -> bool:
        found = self._sums.get(push.unit)
        _require_unit(push, None if found is None else found.unit)
        assert found is not None
        return found.is_stale(push)

    def landing(self, push: Contribution) -> Tensor | None:
        found = self._sums[push.unit]
        return found.memory if found.lands(push) and not found.is_stale(push) else None

    def holds(self, unit: int, grads: Tensor) -> bool:
        return self._sums[unit].holds(grads)

    def put(self, push: Contribution, grads: Tensor | ScatteredUnit) -> Sequence[Pushed]:
        found = self._sums[push.unit]
        if found.is_stale(push):
            return ()
        found.require_room(push)
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
            return (found.close(push),)

    def scattered(self, unit: int) -> ScatteredUnit | None:
        found = self._scattered.get(unit)
        return None if found is None else found()

    @property
    def held_bytes(self) -> int:
        scattered = {unit: found() for unit, found in self._scattered.copy().items()}
        kept = sum(home.nbytes for unit, home in self.memory.homes.items() if unit not in scattered)
        return kept + sum(each.nbytes for each in scattered.values() if each is not None)

    def pushed(self, unit: int) -> Sequence[Pushed]:
        with self._locks[unit]:
            pushed = self._sums[unit].pushed()
        return () if pushed is None else (pushed,)

    def copy(self, unit: int, pushed: Pushed, shards: Sequence[Shard]) -> Tensor | None:
        with self._locks[unit]:
            found = self._sums[unit]
            return _copy_of(found.memory, shards) if found.pushed() == pushed else None


class GradientPool:
    """Which ranges of a pool are free. The lowest that is large enough is given first, so that as few pages as possible
    are used, again and again.

    Knows sizes; not memory, or what is in it."""

    def __init__(self, size: int) -> None:
        """``size``: bytes."""
        self._free = [(0, size)] if size else []  # (start, stop), ascending, never adjacent

    def take(self, size: int) -> int | None:
        """The start of ``size`` bytes; None: no free range has so many."""
        size = pool_room(size)
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[at : at + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """What ``take`` gave for this size is free again."""
        stop = start + pool_room(size)
        ranges = sorted([*self._free, (start, stop)])
        self._free = ranges[:1]
        for begin, end in ranges[1:]:
            last = self._free[-1]
            if begin == last[1]:
                self._free[-1] = last[0], end
            else:
                self._free.append((begin, end))


@dataclass(eq=False)
class _Unit:
    """A unit's pushes of the newest attempt."""

    layout: UnitLayout
    pushes: Rounds[Pushed] = field(default_factory=Rounds)
    next: Tensor | None = None  # the range of the next push, once it may be written
    next_place: int = IN_TOTAL
    scattered: ref[ScatteredUnit] | None = None  # the newest push, if nothing of it is in the region
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while anything of it changes


class RoundRegion(GradientRegion):
    """The gradients of one of several ranks, push by push. See [Note: the pool]."""

    def __init__(self, spec: ModelSpec, memory: GradientMemory, pages: HomePages | None = None) -> None:
        """``pages``: of homes that have some only while they are used; None: all have."""
        self.memory, self._pages, self._planned = memory, pages, spec.accumulation_steps
        self._pool = None if memory.pool is None else GradientPool(memory.pool.nbytes)
        self._pooling = threading.Lock()  # held while the pool, ``_places`` or ``_writing`` changes
        # (unit, place) of ranges that are given, the oldest first -> the count of the push there; 0: none yet
        self._places: dict[tuple[int, int], int] = {}
        self._writing: set[int] = set()  # units of which a push is being written, or is soon
        self._units = {unit.index: _Unit(unit) for unit in spec.layout.units if unit.trainable}
        self.units = tuple(self._units)

    # ---- ranges

    def _open(self, push: Contribution) -> _Unit:
        """A push is soon written, until ``announced``. Ranges of earlier attempts are given back."""
        found = self._units[push.unit]
        with self._pooling, found.lock:
            self._writing.add(push.unit)
            for dropped in found.pushes.open(push):
                self._free(push.unit, dropped.place)
        return found

    def _range(self, found: _Unit) -> Tensor:
        """The range of a unit's next push; it is given one if it has none."""
        if found.next is None:
            unit = found.layout.index
            with self._pooling:
                found.next_place = self._take(unit)
            found.next = self.memory.at(unit, found.next_place)
        assert found.next is not None
        return found.next

    def _take(self, unit: int) -> int:
        """The place of a free range of a unit."""
        place = None if self._pool is None else self._pool.take(self.memory.homes[unit].nbytes)
        if place is None:
            number = next(number for number in count() if (unit, AT_HOME - number) not in self._places)
            if self._pages is not None:
                self._pages.allocate(unit, number)
            place = AT_HOME - number
        self._places[unit, place] = 0
        return place

    def _free(self, unit: int, place: int) -> None:
        if place == IN_TOTAL:
            return
        del self._places[unit, place]
        if place > AT_HOME:
            assert self._pool is not None
            self._pool.give_back(place, self.memory.homes[unit].nbytes)
        elif self._pages is not None:
            self._pages.give_back(unit, AT_HOME - place)

    def held(self, unit: int | None = None) -> Sequence[tuple[int, int]]:
        every = unit is None or self._pool is not None
        with self._pooling:
            return [(of, count) for (of, _), count in self._places.items() if count and (every or of == unit)]

    def given(self, unit: int, count: int) -> Pushed | None:
        found = self._units[unit]
        with self._pooling, found.lock:
            pushes = [] if unit in self._writing else found.pushes.each
            return pushes[count - 1] if count <= len(pushes) and pushes[count - 1].place != IN_TOTAL else None

    def give_back(self, unit: int, pushed: Pushed, note: Callable[[Sequence[Pushed]], None]) -> None:
        found = self._units[unit]
        with self._pooling, found.lock:
            here = found.pushes.each
            if unit in self._writing or pushed.place == IN_TOTAL or not _has(here, pushed):
                return
            here[pushed.count - 1] = replace(pushed, place=IN_TOTAL)
            note(tuple(here))
            self._free(unit, pushed.place)

    # ---- pushes

    def is_stale(self, push: Contribution) -> bool:
        found = self._units.get(push.unit)
        _require_unit(push, None if found is None else found.layout)
        assert found is not None
        return found.pushes.is_stale(push)

    def landing(self, push: Contribution) -> Tensor | None:
        there = self._units[push.unit].pushes
        is_next = not there.is_stale(push) and push.seq == there.count_of(push.step, push.attempt)
        return self._range(self._open(push)) if is_next and push.seq < most_rounds(self._planned) else None

    def holds(self, unit: int, grads: Tensor) -> bool:
        memory = self._units[unit].next
        return memory is not None and memory.data_ptr() == grads.data_ptr()

    def put(self, push: Contribution, grads: Tensor | ScatteredUnit) -> Sequence[Pushed]:
        found = self._units[push.unit]
        if found.pushes.is_stale(push):
            return ()
        require_round(push, found.layout, self._planned)
        self._open(push)
        place = IN_TOTAL  # owners hold what is scattered
        if isinstance(grads, Tensor):
            memory, place = self._range(found), found.next_place
            if memory.data_ptr() != grads.data_ptr():
                memory.copy_(grads)
        now = Pushed(step=push.step, attempt=push.attempt, count=push.seq + 1, presence=push.presence, place=place)
        with self._pooling, found.lock:
            if place != IN_TOTAL:
                self._places[push.unit, place] = now.count
            found.scattered = ref(grads) if isinstance(grads, ScatteredUnit) else None
            found.next = None if place == found.next_place else found.next
            found.pushes.each.append(now)
            return tuple(found.pushes.each)

    def announced(self, unit: int) -> None:
        with self._pooling:
            self._writing.discard(unit)

    def scattered(self, unit: int) -> ScatteredUnit | None:
        found = self._units[unit].scattered
        return None if found is None else found()

    @property
    def held_bytes(self) -> int:
        homes, pool = self.memory.homes, self.memory.pool
        places, scattered = tuple(self._places), {unit: self.scattered(unit) for unit in self.units}
        if pool is not None:
            return pool.nbytes + sum(homes[unit].nbytes for unit, place in places if place <= AT_HOME)
        kept = sum(homes[unit].nbytes for unit, each in scattered.items() if each is None)
        kept += sum(each.nbytes for each in scattered.values() if each is not None)
        return kept + sum(homes[unit].nbytes for unit, place in places if place < AT_HOME)

    def pushed(self, unit: int) -> Sequence[Pushed]:
        with self._units[unit].lock:
            return tuple(self._units[unit].pushes.each)

    def copy(self, unit: int, pushed: Pushed, shards: Sequence[Shard]) -> Tensor | None:
        with self._units[unit].lock:
            memory = self.memory.at(unit, pushed.place) if _has(self._units[unit].pushes.each, pushed) else None
            return None if memory is None else _copy_of(memory, shards)


def _has(pushes: Sequence[Pushed], pushed: Pushed) -> bool:
    """Whether ``pushed`` is one of a unit's pushes of an attempt."""
    return pushed.count <= len(pushes) and pushes[pushed.count - 1] == pushed
