"""The C library's allocator: what it has given out and keeps, and whether it keeps freed memory or gives it back."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def map_blocks() -> bool:
    """Map blocks of 1 MiB and more, each by itself, so that the kernel has them back when they are freed.

    For a rank's process until its model is prepared: the constructor's memory goes then, and glibc would keep holes,
    and fill them bit by bit: 100 of 400 MB came back. Returns False, and changes nothing, without glibc or if the user
    has set thresholds."""
    return not _are_chosen() and _set({_MMAP_THRESHOLD: 1 << 20})


def keep_some_buffers() -> bool:
    """Keep freed blocks below 8 MiB, up to 64 MiB of them, in a process that runs the user's code. Returns False, and
    changes nothing, without glibc or if the user has set thresholds.

    A process that only frees messages of 2 MiB would give most of them back, and fault them in again: fetches over
    loopback went from 1.7 to 3.0 GB/s. Gradients of 8 MiB and more are mapped: small blocks that live longer lie
    between them, so that few of them fit where others were, and a rank kept 100 MB of holes. Mapping those costs a step
    nothing that could be measured; mapping blocks of 1 MiB, too, costs it 30 %."""
    return not _are_chosen() and _set({_MMAP_THRESHOLD: 8 << 20, _TRIM_THRESHOLD: 64 << 20})


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
