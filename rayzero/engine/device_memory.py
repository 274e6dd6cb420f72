"""Measurements of torch's allocator on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rayzero.telemetry.names import GPU_ALLOC_RETRIES, GPU_MEMORY_BYTES, GPU_OOMS
from rayzero.telemetry.recorder import Reading

_KINDS = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "peak_active": "active_bytes.all.peak",
}


def device_memory(device: torch.device) -> Iterator[Reading]:
    """What torch's allocator on ``device`` holds now, in bytes."""
    stats = torch.cuda.memory_stats(device)
    for kind, name in _KINDS.items():
        yield Reading(GPU_MEMORY_BYTES, stats.get(name, 0), {"kind": kind})
    yield Reading(GPU_MEMORY_BYTES, torch.cuda.get_device_properties(device).total_memory, {"kind": "total"})
    yield Reading(GPU_ALLOC_RETRIES, stats.get("num_alloc_retries", 0), {})
    yield Reading(GPU_OOMS, stats.get("num_ooms", 0), {})
