"""Keeps gathered parameters within their budget of bytes on the device, and owns the buffers they lie in.

[Note: the target] Under memory pressure, units aim at less than the budget (engine_memory.py). The target is a wish:
what computes gets its memory up to the budget. So a lower target evicts earlier, and never fails.

[Note: the budget] Every gathered unit leases its bytes from ``gpu_param_memory_budget``, whether they are in a buffer
of the pool or (on CPU ranks of the owners' host) in memory that the owners write. So the transport does not change
which units may be up. Gathered parameters never exceed the budget, except that one oversize unit is admitted alone. The
cache decides which units are up (unit_cache.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rayzero.config import ZeroConfig
from rayzero.engine.private_torch import owning_slice
from rayzero.errors import ConfigError
from rayzero.lanes import Lane, StreamUses
from rayzero.layout.model_layout import ModelLayout, UnitLayout
from rayzero.memory.pool import Buffer, BufferPool, Lease, MemoryBudget, buffer_bytes
from rayzero.protocol.store import ParameterStore

Slices = tuple[torch.UntypedStorage, ...]
Shape = tuple[object, ...]
Views = tuple[Tensor, Slices]  # a buffer in one shape: flat, and a storage per slot
_USES = "uses"


@dataclass(frozen=True, slots=True, eq=False)
class UnitBuffer:
    """Leased memory for one unit's parameters, and a storage over each slot's range of it."""

    flat: Tensor  # 1D, unit.numel elements, the unit's dtype
    slices: Slices  # per slot; swapped under its Parameter while the unit is up
    lease: Buffer | Lease  # freed by: Residency.release
    mapped: bool = False  # True: the owners' memory, which only they fill
    made: dict[Any, Any] = field(default_factory=dict)  # stays with the memory from lease to lease

    def uses(self, lane: Lane) -> StreamUses:
        """Which streams of ``lane`` use the memory."""
        known: StreamUses | None = self.made.get(_USES)
        if known is None:
            known = self.made[_USES] = StreamUses(lane, self.flat)
        return known

    def settle(self) -> None:
        """Order what the caller computes next after all that uses the memory, if it is a device's."""
        uses: StreamUses | None = self.made.get(_USES)
        for event in uses.so_far() if uses is not None else ():
            event.wait()


def buffer_shape(unit: UnitLayout) -> Shape:
    """What two units must share to use the same buffer with the same slices: dtype and slot ranges."""
    return (unit.dtype, tuple((slot.start, slot.numel) for slot in unit.slots))


def stays_up(layout: ModelLayout, config: ZeroConfig) -> bool:
    """Whether the whole model fits the budget and so stays up from first use to step; then weights need no handles.

    Raises ConfigError if ``offload_params=False`` asks for it and the budget is too small."""
    needed, budget = sum(buffer_bytes(unit.size_bytes) for unit in layout.units), config.gpu_param_memory_budget
    if not config.offload_params and needed > budget:
        raise ConfigError(
            f"offload_params=False keeps the whole model up, {needed:,} bytes, but "
            f"gpu_param_memory_budget={budget:,}; raise it or use offload_params=True"
        )
    return needed <= budget


def mapped_units(store: ParameterStore, units: Iterable[UnitLayout]) -> dict[int, Tensor]:
    """Flat parameters of the units that a rank can read where the owners write them; see ``ParameterStore.mapped``."""
    return {unit.index: flat for unit in units if (flat := store.mapped(unit.index)) is not None}


class Residency:
    """Leases memory for gathered units within the budget.

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
        """``budget``: bytes. ``poison``: fill released buffers with NaN. ``mapped``: unit -> 1D tensor over the owners'
        memory (``ParameterStore.mapped``), which is used in place of a buffer."""
        self._budget = MemoryBudget(budget)
        self._limit = self.target = budget  # bytes; units stay below the target where they can, see ``shrink``
        self._pool = BufferPool(device, budget=self._budget, poison=poison)
        self.device, self.poisons = device, poison
        self._layouts = layouts
        numbers: dict[Shape, int] = {}  # one object per shape: shapes are slow to hash
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
        """Bytes of buffers, in use or free; the owners' memory is not included."""
        return self._pool.held_bytes

    @property
    def peak(self) -> int:
        """The highest ``used`` since the last ``restart_peak``."""
        return self._budget.peak

    def restart_peak(self) -> None:
        """Measure the peak from now on."""
        self._budget.restart_peak()

    def trim(self) -> int:
        """Free the buffers that are not in use; returns their bytes."""
        return self._pool.trim()

    def window(self, root: Iterable[int], count: int) -> int:
        """The bytes of the units ``root`` and of ``count`` more, each as large as the largest."""
        sizes = [buffer_bytes(layout.size_bytes) for layout in self._layouts]
        return sum(sizes[unit] for unit in root) + count * max(sizes)

    def shrink(self, target: int) -> None:
        """Aim at no more than ``target`` bytes from now on, and drop free buffers beyond it."""
        self.target = min(self._limit, target)
        if self.target < self._limit:
            self._pool.trim(max(0, self.target - self.used))

    @property
    def has_buffers(self) -> bool:
        """Whether some units are gathered into buffers, not read from the owners' memory."""
        return len(self._mapped) < len(self._layouts)

    def is_mapped(self, unit: int) -> bool:
        """Whether the unit is read from the owners' memory."""
        return unit in self._mapped

    def acquire(self, unit: int, *, beyond: bool = False) -> UnitBuffer | None:
        """Lease memory for a unit; None if the target has no room now, or the budget if ``beyond`` the target. Its
        content is undefined (mapped: the owners')."""
        if self.target < self._limit and not self._fits(unit, beyond):
            return None
        if unit in self._mapped:
            return self._map(unit)
        if torch.is_inference_mode_enabled():  # a buffer created in inference mode could not be filled outside it
            with torch.inference_mode(False):
                return self.acquire(unit, beyond=beyond)
        lease = self._pool.acquire(self._layouts[unit].size_bytes)
        if lease is None:
            return None
        shape = self._shapes[unit]
        if shape not in lease.made:
            flat = lease.tensor.view(self._layouts[unit].dtype)
            lease.made[shape] = (flat, self._slices(unit, flat))
        flat, slices = lease.made[shape]
        return UnitBuffer(flat=flat, slices=slices, lease=lease, made=lease.made)

    def _fits(self, unit: int, beyond: bool) -> bool:
        """Whether the target leaves room, or need not. Drops free buffers that would go beyond it."""
        used = self.used
        if used and not beyond and used + buffer_bytes(self._layouts[unit].size_bytes) > self.target:
            return False
        self._pool.trim(max(0, self.target - used))
        return True

    def _map(self, unit: int) -> UnitBuffer | None:
        lease = self._budget.reserve(buffer_bytes(self._layouts[unit].size_bytes))
        if lease is None:
            return None
        flat, slices = self._mapped[unit]
        return UnitBuffer(flat=flat, slices=slices, lease=lease, mapped=True)

    def _slices(self, unit: int, flat: Tensor) -> Slices:
        return tuple(owning_slice(flat, slot.start, slot.numel) for slot in self._layouts[unit].slots)

    def release(self, buffer: UnitBuffer) -> None:
        """Return memory whose slices are in the buffer again. Does not wait for the device: on CUDA, later copies into
        it wait for all streams that have used it (transfers.py)."""
        if self.poisons:
            buffer.settle()  # the pool overwrites it at once
        buffer.lease.release()
