"""Torch's thread count, set where computing happens.

[Note: thread counts] ``torch.set_num_threads`` also sets MKL's count, which is one for the whole process: while another
thread computes, its matrix products are cut differently and so round differently. OpenMP's own count belongs to the
calling thread alone, and it is what torch's operations ask for. Asking torch first fixes the thread's own, which would
otherwise be taken from the last one set anywhere.
"""

from __future__ import annotations

from functools import cache

import torch
from threadpoolctl import ThreadpoolController


def use_torch_threads(threads: int) -> None:
    """Make torch operations of the calling thread, and of no other, use ``threads`` threads (OpenMP's, as torch's
    Linux builds have it)."""
    if torch.get_num_threads() != threads:
        _openmp().limit(limits=threads)


@cache
def _openmp() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")
