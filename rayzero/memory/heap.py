"""Reads from the C library's allocator how much memory it has given out and how much it keeps, in all its arenas."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

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
