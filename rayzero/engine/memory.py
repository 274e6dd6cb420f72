"""A rank's memory: what metrics show of it (what the engine holds, the heap's peak, torch's allocator on CUDA), and
giving back what nothing uses."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import torch

from rayzero.activations.offload import ActivationOffload
from rayzero.engine.units.residency import Residency
from rayzero.engine.units.transfers import UnitTransfers
from rayzero.engine.units.unit_cache import UnitCache
from rayzero.memory.heap import heap_use
from rayzero.memory.malloc import give_back_freed
from rayzero.memory.page_lock import locked_bytes
from rayzero.memory.pressure import read_memory
from rayzero.telemetry.names import (
    GPU_ALLOC_RETRIES,
    GPU_MEMORY_BYTES,
    GPU_OOMS,
    HEAP_BYTES,
    MEMORY_BYTES,
    PINNED_BYTES,
)
from rayzero.telemetry.recorder import Reading
from rayzero.telemetry.stats import Freed

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
    """One rank's memory, read from any thread, freed from the one that trains.

    Knows who holds memory; not what for."""

    def __init__(self, device: torch.device, residency: Residency, transfers: UnitTransfers, heap: HeapPeak) -> None:
        """``device``: the one that the rank computes on."""
        self._device, self._residency, self._transfers, self._heap = device, residency, transfers, heap
        self.freed: dict[str, Freed] = {}  # by action, all calls of ``free``

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

    def free(self, cache: UnitCache | None, activations: ActivationOffload | None) -> dict[str, Freed]:
        """Free what nothing uses; returns what each action gave back and took, in this order:

        - ``garbage``: Python's cycles are collected. Bytes that malloc has out less; None without glibc.
        - ``units``: idle units are resharded (None for ``cache``: not). Room in ``gpu_param_memory_budget``; a CPU rank
          on the owners' host computes in their memory, so that nothing but room is freed.
        - ``buffers``: pools drop buffers that are not in use. Bytes of these.
        - ``malloc``: freed memory goes back to the kernel. Bytes that are resident less.
        - ``device``: on CUDA, torch's allocator gives back what it keeps. Bytes that it has reserved less."""
        residency, transfers = self._residency, self._transfers
        done = {"garbage": _freeing(gc.collect, _heap_used)}
        if cache is not None:
            done["units"] = _freeing(cache.release_idle, lambda: residency.used)
        before = time.perf_counter()
        dropped = residency.trim() + transfers.trim() + (activations.trim() if activations is not None else 0)
        done["buffers"] = Freed(count=1, bytes=dropped, seconds=time.perf_counter() - before)
        done["malloc"] = _freeing(give_back_freed, lambda: read_memory().cpu_used)
        if self._device.type == "cuda":
            done["device"] = _freeing(torch.cuda.empty_cache, lambda: torch.cuda.memory_reserved(self._device))
        for action, freed in done.items():
            self.freed[action] = self.freed.get(action, Freed()).merged(freed)
        return done


def _freeing(act: Callable[[], object], held: Callable[[], int | None]) -> Freed:
    """Act; the bytes are what ``held`` has become less by, 0 if other threads took more meanwhile."""
    before, start = held(), time.perf_counter()
    act()
    seconds, after = time.perf_counter() - start, held()
    size = None if before is None or after is None else max(0, before - after)
    return Freed(count=1, bytes=size, seconds=seconds)


def _heap_used() -> int | None:
    use = heap_use()
    return None if use is None else use.used


def _allocator(device: torch.device) -> Iterator[Reading]:
    """Torch's allocator on a CUDA device, now."""
    stats = torch.cuda.memory_stats(device)
    for kind, name in _ALLOCATOR.items():
        yield Reading(GPU_MEMORY_BYTES, stats.get(name, 0), {"kind": kind})
    yield Reading(GPU_MEMORY_BYTES, torch.cuda.get_device_properties(device).total_memory, {"kind": "total"})
    yield Reading(GPU_ALLOC_RETRIES, stats.get("num_alloc_retries", 0), {})
    yield Reading(GPU_OOMS, stats.get("num_ooms", 0), {})
