"""Measures this host's memory bandwidth as updates use it: by reading, changing and writing a few arrays in place."""

from __future__ import annotations

import mmap
import time

import torch
from torch import Tensor

from rayzero.kernels import native
from rayzero.kernels.native import Team

_ELEMENTS = 8 << 20  # fp32, of each of three arrays: 96 MiB together, more than caches hold
_RUNS = 5


def measure_bandwidth(threads: int) -> float | None:
    """The bytes per second that ``threads`` threads read and write; the best of a few runs, about 0.1 s in all.

    None without the native library, which has the loop. Frees its memory."""
    library = native.load()
    if isinstance(library, str):
        return None
    arrays, team = [_array() for _ in range(3)], Team(library, threads)

    def seconds() -> float:
        began = time.perf_counter()
        library.rewrite(team.address, *(array.data_ptr() for array in arrays), _ELEMENTS, 1.0, native.TILE)
        return time.perf_counter() - began

    size = 2 * sum(array.nbytes for array in arrays)
    return size / min(seconds() for _ in range(_RUNS))


def _array() -> Tensor:
    """A 1D fp32 array with all pages touched. It has its own mapping, because malloc may keep freed memory."""
    return torch.frombuffer(mmap.mmap(-1, 4 * _ELEMENTS), dtype=torch.float32).fill_(1.0)
