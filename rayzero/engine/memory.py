"""A rank's memory as its metrics show it: what the engine holds, the heap's peak, and torch's allocator on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rayzero.engine.units.residency import Residency
from rayzero.engine.units.transfers import UnitTransfers
from rayzero.memory.heap import heap_use
from rayzero.memory.page_lock import locked_bytes
from rayzero.telemetry.names import (
    GPU_ALLOC_RETRIES,
    GPU_MEMORY_BYTES,
    GPU_OOMS,
    HEAP_BYTES,
    MEMORY_BYTES,
    PINNED_BYTES,
)
from rayzero.telemetry.recorder import Reading

_STEPS = 3  # later steps are like them, and mallinfo2 takes up to a millisecond on a large heap
_ALLOCATOR = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "peak_active": "active_bytes.all.peak",
}


class HeapPeak:
    """Reads malloc's statistics when memory is high: at the end of a forward, and when a unit's gradients are
    complete."""

    def __init__(self, first_step: int | None) -> None:
        """``first_step``: the first step that this rank takes; None: never sample."""
        self._end = 0 if first_step is None else first_step + _STEPS
        self.peak = 0  # bytes; 0: not sampled yet

    def look(self, step: int) -> None:
        """Sample now, during ``step``."""
        if step < self._end and (use := heap_use()) is not None:
            self.peak = max(self.peak, use.used)


class RankMemory:
    """Reads one rank's memory for metrics, from any thread. Changes nothing."""

    def __init__(self, device: torch.device, residency: Residency, transfers: UnitTransfers, heap: HeapPeak) -> None:
        """``device``: the one that the rank computes on."""
        self._device, self._residency, self._transfers, self._heap = device, residency, transfers, heap

    def readings(self) -> Iterator[Reading]:
        """Bytes of gathered parameters and of gradients in flight, and what the device's allocator reports."""
        on_gpu = self._device.type == "cuda"
        held = {("param", "gpu" if on_gpu else "ram"): self._residency.allocated, **self._transfers.allocated()}
        for (kind, tier), size in held.items():
            yield Reading(MEMORY_BYTES, size, {"kind": kind, "tier": tier})
        if self._heap.peak:
            yield Reading(HEAP_BYTES, self._heap.peak, {"kind": "peak"})
        if on_gpu:
            pinned = sum(size for (_, tier), size in held.items() if tier == "pinned")
            yield Reading(PINNED_BYTES, locked_bytes() + pinned, {})
            yield from _allocator(self._device)


def _allocator(device: torch.device) -> Iterator[Reading]:
    """Torch's allocator on a CUDA device, now."""
    stats = torch.cuda.memory_stats(device)
    for kind, name in _ALLOCATOR.items():
        yield Reading(GPU_MEMORY_BYTES, stats.get(name, 0), {"kind": kind})
    yield Reading(GPU_MEMORY_BYTES, torch.cuda.get_device_properties(device).total_memory, {"kind": "total"})
    yield Reading(GPU_ALLOC_RETRIES, stats.get("num_alloc_retries", 0), {})
    yield Reading(GPU_OOMS, stats.get("num_ooms", 0), {})
