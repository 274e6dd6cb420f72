"""Adds up the gradients that one rank has pushed for one range.

Both ends of the store use it: a rank in its own memory, which owners of its host read; an owner in the memory that it
keeps for a rank on another host.

[Note: gradient memory] With one planned backward a step, the memory has the unit's dtype, and a push lands in it as it
is. With more it is fp32, and pushes are added in order, whatever their dtype. fp32 memory of a single rank takes more
pushes than were planned; all other memory refuses the second one with an error that names the setting.

[Note: totals] With several ranks and one planned backward a step, an owner adds up the gradients of a shard once, as
soon as every rank has pushed them: into the shard's total, fp32, which the update reads. From then on the step needs no
rank's own gradients of the shard, and their memory is free for other units. So a host has one total where it had as
many gradients as ranks. What is in a total cannot be taken back by one rank alone: all ranks discard, or none.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.errors import AccumulationError
from rayzero.layout.model_layout import ALIGN, ModelLayout, SlotSlice, UnitLayout, aligned
from rayzero.protocol.messages import AT_HOME, IN_TOTAL, Contribution, ModelSpec, Pushed

POOL_ALIGN = 256  # bytes: a range of a pool begins at a multiple
_WIDE = 1 << 16  # elements


@dataclass(frozen=True, slots=True)
class GradientMemory:
    """The memory of one rank's gradients: a place for each unit, its home, and a pool in which units lie that are soon
    in totals."""

    homes: Mapping[int, Tensor]  # by trained unit: 1D, unit.numel elements of ``gradient_dtype``
    pool: Tensor | None = None  # 1D uint8

    def at(self, unit: int, place: int) -> Tensor | None:
        """A unit's gradients at a ``Pushed.place``; None: they are in totals alone."""
        if place == IN_TOTAL:
            return None
        home = self.homes[unit]
        if place == AT_HOME:
            return home
        assert self.pool is not None
        return self.pool[place : place + home.nbytes].view(home.dtype)


@dataclass(frozen=True, slots=True)
class FormerRank:
    """What a dead rank has left in its own memory."""

    gradients: Mapping[int, Tensor]  # by unit: 1D, read-only; of those that are not in totals alone
    pushed: Sequence[tuple[int, Pushed]]  # (unit, what of it is there, AT_HOME in ``gradients`` or IN_TOTAL)


def has_totals(world_size: int, accumulation_steps: int) -> bool:
    """Whether owners keep totals. See [Note: totals]."""
    return world_size > 1 and accumulation_steps == 1


def gradient_dtype(unit: UnitLayout, accumulate: bool) -> torch.dtype:
    """The dtype of the memory for a rank's gradients of a unit. ``accumulate``: more than one backward a step is
    planned."""
    return torch.float32 if accumulate else unit.dtype


def gradient_sizes(spec: ModelSpec) -> dict[torch.dtype, list[tuple[int, int]]]:
    """The sizes of the memory for a rank's gradients: by dtype, (unit, elements) of every trained unit."""
    sizes: dict[torch.dtype, list[tuple[int, int]]] = {}
    for unit in spec.layout.units:
        if unit.trainable:
            sizes.setdefault(gradient_dtype(unit, spec.accumulation_steps > 1), []).append((unit.index, unit.numel))
    return sizes


def pool_room(size: int) -> int:
    """Bytes of a pool that ``size`` bytes take."""
    return -(-size // POOL_ALIGN) * POOL_ALIGN


def pool_bytes(layout: ModelLayout) -> int:
    """The size of a rank's pool: room for the two largest trained units, of which one is written while the other is
    added up."""
    sizes = sorted(unit.numel * unit.dtype.itemsize for unit in layout.units if unit.trainable)
    return sum(map(pool_room, sizes[-2:]))


class GradientSum:
    """The sum of one rank's pushes in one attempt at a step, over a whole unit or a shard of it.

    Knows pushes, their order and which parameters have a gradient; not who reads the memory, or when it is free.
    Calls must not overlap."""

    def __init__(
        self,
        unit: UnitLayout,
        memory: Tensor | None,
        slices: Sequence[SlotSlice],
        *,
        dtype: torch.dtype | None = None,
        is_single: bool = False,
    ) -> None:
        """``memory``: 1D, the range's elements, ``dtype``; None: there is none at present. ``slices``: the parameters
        that lie in it. ``dtype``: of its memory, if there is none yet. ``is_single``: a second push is refused."""
        dtype = dtype if memory is None else memory.dtype
        assert dtype is not None
        self.unit, self._memory, self.dtype, self._is_single = unit, memory, dtype, is_single
        self.step, self.attempt = -1, 0
        self.count = 0  # pushes of that attempt whose bytes are here
        self.presence = 0  # bit i set: slot i of the unit has a gradient here
        self._slices = slices
        self._all = sum(1 << part.slot for part in slices)
        self._padding = [(s.stop, s.start + aligned(s.numel)) for s in slices if s.numel % ALIGN]

    @classmethod
    def of_unit(
        cls, unit: UnitLayout, memory: Tensor | None, *, dtype: torch.dtype | None = None, is_single: bool = False
    ) -> GradientSum:
        """The sum over a whole unit: ``memory`` has unit.numel elements."""
        slices = [SlotSlice(slot=i, start=s.start, stop=s.stop, param_start=0) for i, s in enumerate(unit.slots)]
        return cls(unit, memory, slices, dtype=dtype, is_single=is_single)

    @property
    def memory(self) -> Tensor:
        """Where the sum is."""
        assert self._memory is not None, f"{self.unit.name} has no memory"
        return self._memory

    @property
    def has_memory(self) -> bool:
        """Whether there is memory at present."""
        return self._memory is not None

    def move(self, memory: Tensor | None) -> None:
        """The sum is in other memory, or in none."""
        self._memory = memory

    def is_older(self, push: Contribution | Pushed) -> bool:
        """Whether ``push`` belongs to an attempt before the current one."""
        return (push.step, push.attempt) < (self.step, self.attempt)

    def count_of(self, step: int, attempt: int) -> int:
        """How many pushes of that attempt have their bytes here."""
        return self.count if (self.step, self.attempt) == (step, attempt) else 0

    def is_stale(self, push: Contribution) -> bool:
        """Whether ``push`` is a repeat or from an older attempt, so that it is dropped."""
        return self.is_older(push) or push.seq < self.count_of(push.step, push.attempt)

    def lands(self, push: Contribution) -> bool:
        """Whether the bytes of ``push`` may go into the memory as they are, because there is nothing to add them to."""
        return push.first == 0 and self.dtype is self.dtype_of(push)

    def dtype_of(self, push: Contribution) -> torch.dtype:
        """The dtype in which the bytes of ``push`` come."""
        return self.dtype if push.sum_of else self.unit.dtype

    def holds(self, values: Tensor) -> bool:
        """Whether ``values`` is the memory itself."""
        return self._memory is not None and values.data_ptr() == self._memory.data_ptr()

    def require_room(self, push: Contribution) -> None:
        """Raise AccumulationError for a second push where there is room for one."""
        if push.first > 0 and (self._is_single or self.dtype is not torch.float32):
            kept = "that of several ranks" if self._is_single else str(self.dtype).removeprefix("torch.")
            raise AccumulationError(
                f"rank {push.rank} pushed {self.unit.name!r} {push.seq + 1} times in step {push.step}, but one "
                f"backward a step was planned and gradient memory ({kept}) holds one push: set "
                "gradient_accumulation_steps to the number of backwards between two optimizer.step()"
            )

    def open(self, push: Contribution) -> None:
        """Prepare to write ``push``. A newer attempt discards what is here, and so does a sum."""
        if (push.step, push.attempt) != (self.step, self.attempt) or push.first < self.count:
            self.step, self.attempt, self.count, self.presence = push.step, push.attempt, 0, 0

    def add(self, push: Contribution, values: Tensor) -> None:
        """Add the next push of the open attempt. ``values``: 1D, the range's elements, any floating dtype. Nothing is
        copied if they are the memory itself; its padding must be zero then."""
        if self.holds(values):
            return
        now = int.from_bytes(push.presence, "little") & self._all
        if push.seq == 0:
            self.memory.copy_(values)  # including absent slots, which are never read
        elif now == self._all == self.presence & self._all:
            add_widened(self.memory, values)
        else:
            self._add_some(values, now)
        self.clear_padding()

    def _add_some(self, values: Tensor, now: int) -> None:
        for part in self._slices:
            if not now >> part.slot & 1:
                continue
            ours, theirs = self.memory[part.start : part.stop], values[part.start : part.stop]
            add_widened(ours, theirs) if self.presence >> part.slot & 1 else ours.copy_(theirs)

    def clear_padding(self) -> None:
        """Zero the elements between parameters."""
        for start, stop in self._padding:
            self.memory[start:stop].zero_()

    def close(self, push: Contribution) -> Pushed:
        """Count ``push``, whose bytes have been added. Returns what is here now."""
        self.count = push.seq + 1
        self.presence |= int.from_bytes(push.presence, "little")
        return self._now()

    def pushed(self) -> Pushed | None:
        """What is here; None while that is nothing."""
        return self._now() if self.count else None

    def _now(self) -> Pushed:
        bits = self.presence.to_bytes((len(self.unit.slots) + 7) // 8, "little")
        return Pushed(step=self.step, attempt=self.attempt, count=self.count, presence=bits)

    def replace(self, pushed: Pushed) -> None:
        """Take over what the rank that owns this memory says is here."""
        self.step, self.attempt, self.count = pushed.step, pushed.attempt, pushed.count
        self.presence = int.from_bytes(pushed.presence, "little")


class _Wide(threading.local):
    """Each thread's fp32 scratch for adding 16-bit gradients, made at its first use: ``add_`` of mixed dtypes would
    allocate every time."""

    def __init__(self) -> None:
        self.values = torch.empty(_WIDE, dtype=torch.float32, device="cpu")


_wide = _Wide()


def add_widened(total: Tensor, values: Tensor) -> None:
    """``total += values``, both 1D and of one size. ``total`` is fp32; 16-bit values are widened a block at a time,
    without allocating."""
    if values.dtype is torch.float32:
        total.add_(values)
        return
    for start in range(0, values.numel(), _WIDE):
        block = values[start : start + _WIDE]
        total[start : start + _WIDE].add_(_wide.values[: block.numel()].copy_(block))
