"""Measures how full memory is, resource by resource. What is done about it: engine/engine_memory.py."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from time import monotonic, perf_counter

import psutil
import torch

from rayzero.config import MIB
from rayzero.memory.process_memory import HostLimits, Stalls, memory_stalls, resident_bytes, tightest_cgroup
from rayzero.telemetry.stats import Tally


class Resource(StrEnum):
    """What can be full. The last two are limits that the config sets for this process alone."""

    DEVICE = "device"  # a CUDA device, used by anybody
    HOST = "host"  # the RAM
    CGROUP = "cgroup"  # the cgroup of this process that leaves it the least
    SHM = "shm"  # the file system of slab_dir
    MAX_CPU = "max_cpu_memory_mb"
    MAX_GPU = "max_gpu_memory_mb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How full memory was at one moment."""

    shares: Mapping[Resource, float]  # used over limit, 0 to 1, of each resource that there is
    stalls: Stalls | None = None  # None: the kernel counts none

    @property
    def fullest(self) -> Resource:
        """The resource with the largest share."""
        return max(self.shares, key=lambda resource: self.shares[resource])

    @property
    def share(self) -> float:
        return self.shares[self.fullest]


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureLimits:
    """What full means where no kernel says so."""

    max_cpu_memory_mb: int | None = None  # MiB of the process's resident set; None: only the machine's limits count
    max_gpu_memory_mb: int | None = None  # MiB that torch has allocated on the device; None: the same
    slab_dir: Path | None = None  # its file system holds shared memory; None: there is none


def read_pressure(device: torch.device, limits: PressureLimits) -> Pressure:
    """Measure a process's resources now. Page cache that the kernel drops first, and blocks that torch keeps free, do
    not count as used."""
    host, shares = read_host_pressure(limits.slab_dir), {}
    if limits.max_cpu_memory_mb is not None:
        shares[Resource.MAX_CPU] = resident_bytes() / (limits.max_cpu_memory_mb * MIB)
    if device.type == "cuda":
        shares[Resource.DEVICE] = _device_share(device)
    if device.type == "cuda" and limits.max_gpu_memory_mb is not None:
        shares[Resource.MAX_GPU] = torch.cuda.memory_allocated(device) / (limits.max_gpu_memory_mb * MIB)
    return Pressure(shares={**host.shares, **_bounded(shares)}, stalls=host.stalls)


def read_host_pressure(slab_dir: Path | None) -> Pressure:
    """Measure now what all processes of a host share. ``slab_dir``: see ``PressureLimits``."""
    memory, cgroup = psutil.virtual_memory(), tightest_cgroup()
    shares = {Resource.HOST: 1 - memory.available / memory.total}
    if cgroup is not None:
        shares[Resource.CGROUP] = cgroup_share(cgroup)
    if slab_dir is not None and slab_dir.is_dir():
        shares[Resource.SHM] = _file_system_share(slab_dir)
    return Pressure(shares=_bounded(shares), stalls=memory_stalls())


def _bounded(shares: Mapping[Resource, float]) -> dict[Resource, float]:
    return {resource: min(1.0, max(0.0, share)) for resource, share in shares.items()}


def cgroup_share(limits: HostLimits) -> float:
    """The part of a cgroup's limit that is in use and not reclaimable."""
    return 1 - limits.available / limits.total if limits.total else 1.0


def _file_system_share(folder: Path) -> float:
    found = os.statvfs(folder)
    return 1 - found.f_bavail / found.f_blocks if found.f_blocks else 0.0


def _device_share(device: torch.device) -> float:
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch frees it before it fails
    return (total - free - kept) / total


class PressureGauge:
    """A process's memory pressure, measured at most once a second.

    Knows limits and readings; not what is done about them. A reading opens files, which costs up to a millisecond while
    other threads wait for the interpreter, and pressure builds up over seconds."""

    def __init__(self, device: torch.device, limits: PressureLimits) -> None:
        self._device, self._limits = device, limits
        self._due = -math.inf
        self.pressure: Pressure | None = None  # at the last reading
        self.taken = 0  # readings ever
        self.resources: dict[Resource, Tally] = {}  # shares at all readings, in place of seconds
        self.readings = Tally()  # of the fullest resource's share
        self.seconds = Tally()  # that readings took

    def read(self) -> Pressure:
        """The present pressure, at most a second old."""
        return self.measure() if self.pressure is None or monotonic() >= self._due else self.pressure

    def measure(self) -> Pressure:
        self._due = monotonic() + 1.0
        began = perf_counter()
        self.pressure = read_pressure(self._device, self._limits)
        self.taken += 1
        self.seconds.add(perf_counter() - began)
        self.readings.add(self.pressure.share)
        for resource, share in self.pressure.shares.items():
            self.resources.setdefault(resource, Tally()).add(share)
        return self.pressure

    def restart(self) -> None:
        self.pressure, self._due = None, -math.inf
        self.resources = {}
        self.readings.restart()
        self.seconds.restart()
