"""How many bytes of gathered parameters may exist on the device, and the buffers they lie in.

[Note: the budget] Every gathered unit is a lease of ``gpu_param_memory_budget``, whether its bytes are in a buffer of
the pool or (CPU ranks of the owners' host) where the owners write them: the same units may be up, however bytes
move. Gathered parameters never exceed the budget; one oversize unit alone is let through. Which units are up within
it is the cache's business (unit_cache.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rayzero.config import ZeroConfig
from rayzero.engine.private_torch import owning_slice
from rayzero.errors import ConfigError
from rayzero.layout.model_layout import ModelLayout, UnitLayout
from rayzero.memory.budget import MemoryBudget
from rayzero.memory.pool import BufferPool, buffer_bytes

Slices = tuple[torch.UntypedStorage, ...]
Shape = tuple[object, ...]
Views = tuple[Tensor, Slices]  # of one buffer in one shape: flat, and a storage per slot


class Held(Protocol):
    """Some bytes of the budget."""

    def release(self) -> None:
        """Give them back, once."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class UnitBuffer:
    """Leased memory for one unit's parameters, and a storage over each slot's range of it."""

    flat: Tensor  # 1D, unit.numel elements, the unit's dtype
    slices: Slices  # per slot; swapped under its Parameter while the unit is up
    lease: Held  # freed by: Residency.release
    mapped: bool = False  # True: the owners' memory, which nobody else fills


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
    """Leases the memory that units are gathered in, within the byte budget.

    Knows bytes, buffers and their slices; not units' states or the schedule."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        *,
        budget: int,
        device: torch.device,
        poison: bool,
        mapped: Mapping[int, Tensor] | None = None,
    ) -> None:
        """``budget``: bytes. ``poison``: fill every buffer that is given back with NaN. ``mapped``: units' parameters
        where the owners write them (``ParameterStore.mapped``), instead of buffers."""
        self._budget = MemoryBudget(budget)
        self._pool = BufferPool(device, budget=self._budget, poison=poison)
        self._layouts = layouts
        numbers: dict[Shape, int] = {}  # of the shapes there are: they are long to hash
        self._shapes = [("views", numbers.setdefault(buffer_shape(layout), len(numbers))) for layout in layouts]
        self._mapped: dict[int, Views] = {
            unit: (flat, self._slices(unit, flat)) for unit, flat in (mapped or {}).items()
        }

    @property
    def used(self) -> int:
        """Bytes of gathered parameters, prefetches included."""
        return self._budget.used

    @property
    def allocated(self) -> int:
        """Bytes of buffers there are, in use or kept for it; the owners' memory is not among them."""
        stats = self._pool.stats
        return stats.leased + stats.free

    @property
    def peak(self) -> int:
        """The most there ever were."""
        return self._budget.peak

    def is_mapped(self, unit: int) -> bool:
        """Whether the unit is read where the owners write it."""
        return unit in self._mapped

    def acquire(self, unit: int) -> UnitBuffer | None:
        """Memory for a unit, its content undefined (mapped: the owners'); None where the budget has no room now."""
        if unit in self._mapped:
            return self._map(unit)
        if torch.is_inference_mode_enabled():  # a buffer made inside it could not be filled outside it
            with torch.inference_mode(False):
                return self.acquire(unit)
        lease = self._pool.acquire(self._layouts[unit].size_bytes)
        if lease is None:
            return None
        shape = self._shapes[unit]
        if shape not in lease.made:
            flat = lease.tensor.view(self._layouts[unit].dtype)
            lease.made[shape] = (flat, self._slices(unit, flat))
        flat, slices = lease.made[shape]
        return UnitBuffer(flat=flat, slices=slices, lease=lease)

    def _map(self, unit: int) -> UnitBuffer | None:
        lease = self._budget.reserve(buffer_bytes(self._layouts[unit].size_bytes))
        if lease is None:
            return None
        flat, slices = self._mapped[unit]
        return UnitBuffer(flat=flat, slices=slices, lease=lease, mapped=True)

    def _slices(self, unit: int, flat: Tensor) -> Slices:
        return tuple(owning_slice(flat, slot.start, slot.numel) for slot in self._layouts[unit].slots)

    def release(self, buffer: UnitBuffer) -> None:
        """Take memory back; its slices are in the buffer again. On CUDA later copies into it wait for the compute
        stream (transfers.py), so this need not."""
        buffer.lease.release()
