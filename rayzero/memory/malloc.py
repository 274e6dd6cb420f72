"""What the C library's allocator does with memory that was freed: kept for the next message, or given back."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)
_LARGEST_MOVING = 32 << 20  # glibc raises its mmap threshold to the largest block that was freed, and no further
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_message_buffers() -> bool:
    """Have freed memory kept for the next message instead of given back and faulted in again. False: no glibc.

    For processes that do little else than serve: on loopback it took 13-53 % (median 22 %) of a fetch's processor time
    away, 106-262 page faults per MiB became 0-18. A rank would keep its user's freed memory as well."""
    return _set({_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: (1 << 31) - 1, _TOP_PAD: 64 << 20})


def keep_some_buffers() -> bool:
    """The same in a process that also does its user's work: up to 64 MiB stay at the end of a heap.

    These are the thresholds that glibc comes to by itself in a process that has freed one block of 32 MiB. One that
    frees messages of 2 MiB only stays at 4 MiB, and most messages that come are faulted in anew: fetches over loopback
    went from 1.7 to 3.0 GB/s. False, and nothing is changed, where there is no glibc or the user has set thresholds."""
    chosen = any(name in os.environ for name in _SETTINGS) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    return not chosen and _set({_MMAP_THRESHOLD: _LARGEST_MOVING, _TRIM_THRESHOLD: 2 * _LARGEST_MOVING})


def _set(values: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*setting) for setting in values.items()])


def give_back_freed() -> bool:
    """Give the kernel all memory that was freed and is kept; once, after the start's large buffers. False: no glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
