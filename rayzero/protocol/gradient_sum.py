"""Adds up the gradients that one rank has pushed for one range.

Both ends of the store use it: a rank in its own memory, which owners of its host read; an owner in the memory that it
keeps for a rank on another host.

[Note: gradient memory] With one planned backward a step, the memory has the unit's dtype, and a push lands in it as it
is. With more it is fp32, and pushes are added in order, whatever their dtype. fp32 memory takes more pushes than were
planned; 16-bit memory refuses the second one with an error that names the setting.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayzero.errors import AccumulationError
from rayzero.layout.model_layout import ALIGN, SlotSlice, UnitLayout, aligned
from rayzero.protocol.messages import Contribution, ModelSpec, Pushed

_WIDE = 1 << 16  # elements


@dataclass(frozen=True, slots=True)
class FormerRank:
    """What a dead rank has left in its own memory."""

    gradients: Mapping[int, Tensor]  # by unit: 1D, read-only
    pushed: Sequence[tuple[int, Pushed]]  # (unit, what of it is there)


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


class GradientSum:
    """The sum of one rank's pushes in one attempt at a step, over a whole unit or a shard of it.

    Knows pushes, their order and which parameters have a gradient; not who reads the memory, or when it is free.
    Calls must not overlap."""

    def __init__(self, unit: UnitLayout, memory: Tensor, slices: Sequence[SlotSlice]) -> None:
        """``memory``: 1D, the range's elements, ``gradient_dtype``. ``slices``: the parameters that lie in it."""
        self.unit, self.memory = unit, memory
        self.step, self.attempt = -1, 0
        self.count = 0  # pushes of that attempt whose bytes are here
        self.presence = 0  # bit i set: slot i of the unit has a gradient here
        self._slices = slices
        self._all = sum(1 << part.slot for part in slices)
        self._padding = [(s.stop, s.start + aligned(s.numel)) for s in slices if s.numel % ALIGN]

    @classmethod
    def of_unit(cls, unit: UnitLayout, memory: Tensor) -> GradientSum:
        """The sum over a whole unit: ``memory`` has unit.numel elements."""
        return cls(
            unit,
            memory,
            [SlotSlice(slot=i, start=s.start, stop=s.stop, param_start=0) for i, s in enumerate(unit.slots)],
        )

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
        return push.first == 0 and self.memory.dtype is self.dtype_of(push)

    def dtype_of(self, push: Contribution) -> torch.dtype:
        """The dtype in which the bytes of ``push`` come."""
        return self.memory.dtype if push.sum_of else self.unit.dtype

    def holds(self, values: Tensor) -> bool:
        """Whether ``values`` is the memory itself."""
        return values.data_ptr() == self.memory.data_ptr()

    def require_room(self, push: Contribution) -> None:
        """Raise AccumulationError for a second push into 16-bit memory."""
        if push.first > 0 and self.memory.dtype is not torch.float32:
            kept = str(self.memory.dtype).removeprefix("torch.")
            raise AccumulationError(
                f"rank {push.rank} pushed {self.unit.name!r} {push.seq + 1} times in step {push.step}, but one "
                f"backward a step was planned and {kept} gradient memory holds one push: set "
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
