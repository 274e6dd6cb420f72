"""How many bytes of gathered parameters may exist on the device, and which units may keep theirs.

[Note: the window] A model that fits the budget as a whole stays up from its first use to the step. Else the units
that may be up are those in use, the units of the root module, and the next ``depth`` distinct units of the schedule,
as far as the budget goes: gathered parameters never exceed (1 + depth) largest units + root, nor the budget. One
oversize unit alone is let through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rayzero.config import ZeroConfig
from rayzero.engine.private_torch import base_of, owning_slice
from rayzero.errors import ConfigError
from rayzero.layout.model_layout import ModelLayout, UnitLayout
from rayzero.memory.budget import MemoryBudget
from rayzero.memory.pool import Buffer, BufferPool, buffer_bytes

Slices = tuple[torch.UntypedStorage, ...]
Shape = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class UnitBuffer:
    """Leased device memory for one unit's parameters, and a storage over each slot's range of it."""

    flat: Tensor  # 1D, unit.numel elements, the unit's dtype
    slices: Slices  # per slot; swapped under its Parameter while the unit is up
    lease: Buffer  # freed by: Residency.release


def buffer_shape(unit: UnitLayout) -> Shape:
    """What two units must have in common to use the same buffer in the same way: dtype and slot ranges."""
    return (unit.dtype, tuple((slot.start, slot.numel) for slot in unit.slots))


def stays_up(layout: ModelLayout, config: ZeroConfig) -> bool:
    """Whether the budget lets the whole model stay up from its first use to the step: then weights need no handles.

    Raises ConfigError where it must (``offload_params=False``) and the budget does not."""
    needed, budget = sum(buffer_bytes(unit.size_bytes) for unit in layout.units), config.gpu_param_memory_budget
    if not config.offload_params and needed > budget:
        raise ConfigError(
            f"offload_params=False keeps the whole model up, {needed:,} bytes, but "
            f"gpu_param_memory_budget={budget:,}; raise it or use offload_params=True"
        )
    return needed <= budget


class Residency:
    """Leases the device memory that units are gathered in, within the byte budget.

    Knows bytes, buffers and their slices; not units' states or the schedule."""

    def __init__(self, layouts: Sequence[UnitLayout], *, budget: int, device: torch.device, poison: bool) -> None:
        """``budget``: bytes. ``poison``: fill every buffer that is given back with NaN."""
        self._pool = BufferPool(device, budget=MemoryBudget(budget), poison=poison)
        self._layouts = layouts
        self._shapes = [buffer_shape(layout) for layout in layouts]
        self._slices: Any = WeakTensorKeyDictionary()  # whole buffer -> {shape: slices}; dies with the buffer

    @property
    def used(self) -> int:
        """Bytes of gathered parameters, prefetches included."""
        return self._pool.stats.leased

    @property
    def peak(self) -> int:
        """The most there ever were."""
        return self._pool.stats.peak_leased

    def acquire(self, unit: int) -> UnitBuffer | None:
        """Memory for a unit, its content undefined; None where the budget has no room now."""
        if torch.is_inference_mode_enabled():  # a buffer made inside it could not be filled outside it
            with torch.inference_mode(False):
                return self.acquire(unit)
        lease = self._pool.acquire(self._layouts[unit].size_bytes)
        if lease is None:
            return None
        flat = lease.tensor.view(self._layouts[unit].dtype)
        return UnitBuffer(flat=flat, slices=self._slices_of(lease.tensor, flat, unit), lease=lease)

    def _slices_of(self, leased: Tensor, flat: Tensor, unit: int) -> Slices:
        by_shape: dict[Shape, Slices] = self._slices.setdefault(base_of(leased), {})
        shape = self._shapes[unit]
        if shape not in by_shape:
            by_shape[shape] = tuple(owning_slice(flat, slot.start, slot.numel) for slot in self._layouts[unit].slots)
        return by_shape[shape]

    def release(self, buffer: UnitBuffer) -> None:
        """Take memory back; its slices are in the buffer again. On CUDA later copies into it wait for the compute
        stream (lane.py), so this need not."""
        buffer.lease.release()

    def trim(self) -> None:
        """Let go of all memory that is kept for reuse."""
        self._pool.trim()
