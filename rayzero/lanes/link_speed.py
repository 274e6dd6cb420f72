"""The speed of copies between host memory and a device, measured by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

_BYTES = 64 << 20
_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Bytes per second of one copy at a time, in each direction."""

    to_device: float
    to_host: float


def measure_link(device: torch.device, nbytes: int = _BYTES) -> LinkSpeed:
    """Measure now: page-locked memory to and from a CUDA device; for the CPU, from host memory to host memory.

    The best of a few copies of ``nbytes`` each."""
    on_gpu = device.type == "cuda"
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu, device="cpu")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def into() -> object:
        return there.copy_(host, non_blocking=True)

    def out() -> object:
        return host.copy_(there, non_blocking=True)

    return LinkSpeed(to_device=nbytes / fastest(into, device), to_host=nbytes / fastest(out, device))


def fastest(act: Callable[[], object], device: torch.device, clock: Callable[[], float] = perf_counter) -> float:
    """Seconds of the fastest of a few calls, each with what it makes the device do."""
    seconds = []
    for _ in range(_ROUNDS + 1):  # the first warms up
        start = clock()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(clock() - start)
    return min(seconds[1:])
