"""What the kernel says this process, its node's memory and its shared-memory file system hold."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rayzero.memory.planner import ray_memory_threshold, tightest_cgroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Bytes of this process's memory; a page shared by n processes counts whole in ``rss`` and 1/n in ``pss``."""

    rss: int
    shm: int  # of that, shared memory
    pss: int
    uss: int  # what would be free if it ended
    anonymous: int  # of rss, what is in no file: heaps, stacks
    file: int  # of pss, files other than shared memory: code of libraries, mostly


def process_memory(proc: Path = Path("/proc/self")) -> ProcessMemory:
    """Measure now. The kernel walks the page tables for it, which takes long where there are many pages."""
    rollup = dict(_fields(proc / "smaps_rollup"))
    status = dict(_fields(proc / "status"))
    return ProcessMemory(
        rss=rollup["Rss"],
        shm=status["RssShmem"],
        pss=rollup["Pss"],
        uss=rollup["Private_Clean"] + rollup["Private_Dirty"],
        anonymous=rollup["Anonymous"],
        file=rollup["Pss_File"],
    )


def own_bytes(proc: Path = Path("/proc/self")) -> int:
    """This process's resident heaps, stacks and shared memory, shared pages whole; code of libraries left out, which
    all processes share and the kernel may drop. Cheap."""
    status = dict(_fields(proc / "status"))
    return status["RssAnon"] + status["RssShmem"]


def _fields(path: Path) -> list[tuple[str, int]]:
    """The lines ``Name:  123 kB`` of a file, in bytes."""
    found = []
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found.append((name, int(value.split()[0]) << 10))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Bytes of this node."""

    limits: Mapping[str, int]  # by source: ram, ray, cgroup where there is one
    headroom: int  # before the first of them
    shm_used: int
    shm_limit: int


def node_memory(slab_dir: Path, environment: Mapping[str, str] = os.environ) -> NodeMemory:
    """Measure now."""
    ram, cgroup, shm = psutil.virtual_memory(), tightest_cgroup(), shutil.disk_usage(slab_dir)
    ray = int(ram.total * ray_memory_threshold(environment))
    rooms = [ram.available - (ram.total - ray)]
    limits = {"ram": int(ram.total), "ray": ray}
    if cgroup is not None:
        limits["cgroup"] = cgroup.total
        rooms.append(cgroup.available)
    return NodeMemory(limits=limits, headroom=max(0, min(rooms)), shm_used=shm.used, shm_limit=shm.total)
