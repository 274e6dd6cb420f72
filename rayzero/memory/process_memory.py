"""Reads from the kernel how much memory this process uses, and how much this node and its shared memory have left. And
from the C library what its allocator has given out and keeps; whether it keeps freed memory is set here.

[Note: the ledger] The code that allocates a tensor reports its bytes by purpose. The rest is measured from other
sources:

- ``process``: the size of the process before the run, by the kernel's count, with its part of what it shares now: code,
  and what its fork server has imported. A rank is counted when its loop hands over its first model, without that model,
  because what it imports and reads belongs to the user.
- ``other``: what the allocator has given out since then, less the tensors that were reported. That is activations,
  gradients on their way, and what the user's program and libraries keep. Malloc counts it, resident or not.
- ``unused``: memory that the program has freed and the allocator keeps. Malloc knows how much that is, but not how much
  of it is resident. So it is the smaller of malloc's number and of what is resident beyond all the rest.

As long as malloc keeps something, ``unused`` makes the sum come out right. Memory that neither malloc nor anybody else
reports is in no kind, and the sum falls short by it. Memory that is reported twice makes the sum too large.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_SELF = Path("/proc/self")


def map_blocks() -> bool:
    """Map blocks of 1 MiB and more, each by itself, so that the kernel has them back when they are freed.

    For a rank's process until its model is prepared: the constructor's memory goes then, and glibc would keep holes,
    and fill them bit by bit: 100 of 400 MB came back. Returns False, and changes nothing, without glibc or if the user
    has set thresholds."""
    return not _are_chosen() and _set({_MMAP_THRESHOLD: 1 << 20})


def keep_some_buffers(*, alone: bool = False) -> bool:
    """Keep freed blocks below 8 MiB, up to 64 MiB of them, in a process that runs the user's code. ``alone``: below 32
    MiB, which glibc comes to by itself, because no other rank shares the memory. Returns False, and changes nothing,
    without glibc or if the user has set thresholds.

    A process that only frees messages of 2 MiB would give most of them back, and fault them in again: fetches over
    loopback went from 1.7 to 3.0 GB/s. Gradients of 8 MiB and more are mapped: small blocks that live longer lie
    between them, so that few of them fit where others were, and each of 8 ranks kept 45 to 100 MB of holes. A lone rank
    can afford that, and saves 12 to 20 ms of a step of 420 whose largest activations have 16 MiB: 15,000 page faults.
    Mapping blocks of 1 MiB, too, costs a step 30 %."""
    return not _are_chosen() and _set({_MMAP_THRESHOLD: (32 if alone else 8) << 20, _TRIM_THRESHOLD: 64 << 20})


def _are_chosen() -> bool:
    return any(name in os.environ for name in _SETTINGS) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")


def _set(values: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*setting) for setting in values.items()])


def give_back_freed() -> bool:
    """Give the kernel all freed memory that the allocator keeps. Call it after large buffers that do not come again.
    Returns False if nothing was given back or there is no glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapUse:
    """Bytes of this process's heap."""

    used: int  # given out, touched or not, including large blocks that have their own mappings
    free: int  # freed by the program and kept by the allocator, resident or not


def heap_use() -> HeapUse | None:
    """Measure now, which takes each arena's lock for a moment. None without glibc 2.33 or later."""
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return None
    found = mallinfo2()
    return HeapUse(used=found.uordblks + found.hblkhd, free=found.fordblks)


@cache
def _mallinfo2() -> Any:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo2
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Bytes of this process's memory. A page that n processes share counts whole in ``rss`` and 1/n in ``pss``."""

    rss: int
    shm: int  # of that, shared memory
    pss: int
    uss: int  # what would become free if the process ended
    anonymous: int  # of rss, what is in no file: heaps, stacks
    split: int  # of anonymous, what counts for the other processes that were forked with it; not in pss
    file: int  # of pss, files other than shared memory: mostly the code of libraries


def process_memory() -> ProcessMemory:
    """Measure now. The kernel walks the page tables for this, which takes long if there are many pages."""
    rollup = dict(_fields(_SELF / "smaps_rollup"))
    status = dict(_fields(_SELF / "status"))
    return ProcessMemory(
        rss=rollup["Rss"],
        shm=status["RssShmem"],
        pss=rollup["Pss"],
        uss=rollup["Private_Clean"] + rollup["Private_Dirty"],
        anonymous=rollup["Anonymous"],
        split=rollup["Anonymous"] - rollup["Pss_Anon"],
        file=rollup["Pss_File"],
    )


def own_bytes() -> int:
    """The bytes of this process's resident heaps, stacks and shared memory; shared pages count whole. The code of
    libraries does not count, because all processes share it and the kernel may drop it. Cheap."""
    status = dict(_fields(_SELF / "status"))
    return status["RssAnon"] + status["RssShmem"]


def resident_bytes() -> int:
    """The bytes of this process that are resident, shared pages whole. Cheap."""
    return int(psutil.Process().memory_info().rss)


def peak_resident() -> int | None:
    """The most bytes of this process that were ever resident; None where the kernel does not say."""
    try:
        return dict(_fields(_SELF / "status"))["VmHWM"]
    except (OSError, KeyError):
        return None


def _fields(path: Path) -> list[tuple[str, int]]:
    """The lines ``Name:  123 kB`` of a file, in bytes."""
    found = []
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found.append((name, int(value.split()[0]) << 10))
    return found


def node_limits() -> tuple[dict[str, int], int]:
    """(this node's memory limits in bytes by source: ram, ray, and cgroup if there is one; bytes before the first of
    them is reached)."""
    ram, cgroup = psutil.virtual_memory(), tightest_cgroup()
    ray = int(ram.total * ray_memory_threshold(os.environ))
    rooms = [ram.available - (ram.total - ray)]
    limits = {"ram": int(ram.total), "ray": ray}
    if cgroup is not None:
        limits["cgroup"] = cgroup.total
        rooms.append(cgroup.available)
    return limits, max(0, min(rooms))


def ray_memory_threshold(environment: Mapping[str, str]) -> float:
    """The share of a host's memory above which Ray kills processes, by the environment that Ray was started with."""
    if environment.get("RAY_memory_monitor_refresh_ms") == "0":  # the monitor is off
        return 1.0
    return float(environment.get("RAY_memory_usage_threshold", 0.95))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """How much host memory this process may still take, and what limits it."""

    available: int  # bytes
    total: int  # bytes
    source: str  # "RAM" or the cgroup file that is tighter


def host_limits(
    cgroup_root: Path = Path("/sys/fs/cgroup"), proc_cgroup: Path = Path("/proc/self/cgroup")
) -> HostLimits:
    """Measure now: the tighter of free RAM and the limits of this process's cgroups (v1 or v2)."""
    ram = psutil.virtual_memory()
    found = [HostLimits(available=ram.available, total=ram.total, source="RAM")]
    tightest = tightest_cgroup(cgroup_root, proc_cgroup)
    return min([*found, *([tightest] if tightest else [])], key=lambda limits: limits.available)


def tightest_cgroup(
    cgroup_root: Path = Path("/sys/fs/cgroup"), proc_cgroup: Path = Path("/proc/self/cgroup")
) -> HostLimits | None:
    """The limit of the cgroup of this process that leaves the least; None if no cgroup has a limit."""
    return min(_cgroup_limits(cgroup_root, proc_cgroup), key=lambda limits: limits.available, default=None)


def _cgroup_limits(root: Path, proc_cgroup: Path) -> list[HostLimits]:
    """The memory limits of this process's cgroup and of each one above it. A cgroup without a limit is left out."""
    found = []
    for hierarchy, controllers, path in _own_cgroups(proc_cgroup):
        if hierarchy == "0":
            found += _limits_up(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _limits_up(root / "memory", path, *names)
    return found


def _own_cgroups(proc_cgroup: Path) -> list[tuple[str, str, str]]:
    """This process's cgroups: hierarchy ("0" is version 2), its controllers by comma, and the path in it."""
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:  # not Linux
        return []
    fields = [line.split(":", 2) for line in lines]
    return [(hierarchy, controllers, path) for hierarchy, controllers, path in fields]


def _limits_up(mount: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> list[HostLimits]:
    relative = Path(path.lstrip("/"))
    found = []
    for folder in (relative, *relative.parents):
        limit, usage = _read_int(mount / folder / limit_name), _read_int(mount / folder / usage_name)
        if limit is None or usage is None or limit >= 1 << 60:  # "max", or v1's way to say no limit
            continue
        free = limit - usage + _reclaimable(mount / folder / "memory.stat", cache_name)
        found.append(HostLimits(available=max(0, free), total=limit, source=str(mount / folder / limit_name)))
    return found


def _reclaimable(stat: Path, name: str) -> int:
    """The bytes of page cache that the kernel reclaims first: they count as used, but any process can have them."""
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get(name, 0))


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Shares of the last ten seconds, 0 to 1, in which processes waited for memory (the kernel's pressure stall
    information)."""

    some: float  # at least one waited
    full: float  # all waited: nothing was computed


def memory_stalls(
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    proc_cgroup: Path = Path("/proc/self/cgroup"),
    host: Path = Path("/proc/pressure/memory"),
) -> Stalls | None:
    """Read now: of this process's cgroup where the kernel counts them (version 2), else of the host; None where it
    counts none."""
    own = [path.lstrip("/") for hierarchy, _, path in _own_cgroups(proc_cgroup) if hierarchy == "0"]
    for file in (*(cgroup_root / path / "memory.pressure" for path in own), host):
        try:
            return parse_stalls(file.read_text())
        except OSError:  # the kernel counts none here
            continue
    return None


def parse_stalls(text: str) -> Stalls:
    """``text``: lines such as "some avg10=1.50 avg60=0.70 avg300=0.20 total=12345", in percent."""
    found = {}
    for line in text.splitlines():
        kind, *fields = line.split()
        found[kind] = float(dict(field.split("=") for field in fields)["avg10"]) / 100
    return Stalls(some=found["some"], full=found["full"])


@dataclass(frozen=True, slots=True)
class LedgerCount:
    """A process's memory at one moment."""

    process: ProcessMemory
    heap: HeapUse | None  # None: the allocator does not report it
    told: float  # bytes of the heap that other code reports by purpose


def without_model(first: LedgerCount, now: LedgerCount, model_bytes: int) -> LedgerCount:
    """``now`` without the model that the process is about to give away: less ``model_bytes``, but at most what the
    heap has grown by since ``first``, because weights may be in a mapped file."""
    grown = now.process.anonymous - first.process.anonymous
    if first.heap is not None and now.heap is not None:
        grown = min(grown, now.heap.used - first.heap.used)
    gone = max(0, min(model_bytes, grown))
    process = replace(now.process, pss=now.process.pss - gone, anonymous=now.process.anonymous - gone)
    heap = None if now.heap is None else replace(now.heap, used=now.heap.used - gone)
    return LedgerCount(process, heap, now.told)


def ledger_rest(before: LedgerCount, now: LedgerCount) -> dict[str, float]:
    """The bytes by kind; see [Note: the ledger]. ``before``: the count before the run, when nothing was reported."""
    of_others = now.process.split - before.process.split
    rest = {"process": float(before.process.pss + now.process.file - before.process.file - of_others)}
    if before.heap is None or now.heap is None:
        return rest
    used = now.heap.used - before.heap.used
    kept = now.heap.free - before.heap.free
    resident = now.process.anonymous - before.process.anonymous
    return rest | {"other": max(0.0, used - now.told), "unused": float(max(0, min(kept, resident - used)))}
