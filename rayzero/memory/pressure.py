"""Measures how full memory is, and reduces the prefetch depth accordingly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from rayzero.config import MIB, AutoMemoryStrategy
from rayzero.telemetry.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """What this process uses, in bytes."""

    cpu_used: int  # resident set of the process
    gpu_used: int  # torch's allocated bytes on the rank's device; 0 on a CPU rank

    def pressure(self, *, max_cpu_memory_mb: int, max_gpu_memory_mb: int) -> float:
        """The share of its limit that the fuller of the two uses, at most 1.0. The limits are in MiB."""
        cpu = self.cpu_used / (max_cpu_memory_mb * MIB)
        gpu = self.gpu_used / (max_gpu_memory_mb * MIB)
        return min(1.0, max(cpu, gpu))


def read_memory(device: torch.device | str = "cpu") -> MemoryReading:
    """Measure now: the process's resident set, and torch's allocated bytes on ``device`` if it is CUDA."""
    on_gpu = torch.device(device).type == "cuda"
    return MemoryReading(
        cpu_used=psutil.Process().memory_info().rss,
        gpu_used=torch.cuda.memory_allocated(device) if on_gpu else 0,
    )


def scaled_depth(depth: int, pressure: float, strategy: AutoMemoryStrategy) -> int:
    """The prefetch depth to use: ``depth`` up to the strategy's threshold of pressure, and then less in proportion.

    At full pressure, the depth falls by the strategy's ``aggressiveness``, a share of it. The result is rounded up, so
    only ``extreme`` ever reaches 0."""
    above = min(1.0, pressure) - strategy.pressure_threshold
    if above <= 0:
        return depth
    given_up = strategy.aggressiveness * above / (1 - strategy.pressure_threshold)
    return math.ceil(round(depth * (1 - given_up), 9))  # 8.000000001 is 8


class PressureGauge:
    """A rank's memory pressure, measured at most once a second.

    Knows limits and the last reading; not what is done about it. A reading opens files, which costs milliseconds while
    other threads wait for the interpreter, and pressure builds up over seconds."""

    def __init__(
        self,
        device: torch.device,
        max_cpu_memory_mb: int,
        max_gpu_memory_mb: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_*_memory_mb``: MiB, see ``MemoryReading.pressure``."""
        self._device = device
        self._limits = {"max_cpu_memory_mb": max_cpu_memory_mb, "max_gpu_memory_mb": max_gpu_memory_mb}
        self._clock = clock
        self._due = -math.inf
        self.pressure: float | None = None  # at the last reading
        self.readings = Tally()  # of pressures, not of seconds
        self.seconds = Tally()  # that readings took

    def read(self) -> float:
        """The present pressure, 0.0 to 1.0; at most a second old."""
        return self.measure() if self.pressure is None or self._clock() >= self._due else self.pressure

    def measure(self) -> float:
        """Measure the pressure now."""
        self._due = self._clock() + 1.0
        began = time.perf_counter()
        self.pressure = read_memory(self._device).pressure(**self._limits)
        self.seconds.add(time.perf_counter() - began)
        self.readings.add(self.pressure)
        return self.pressure

    def restart(self) -> None:
        """Forget the readings so far."""
        self.pressure, self._due = None, -math.inf
        self.readings.restart()
        self.seconds.restart()
