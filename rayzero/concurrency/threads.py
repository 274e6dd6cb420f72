"""Sets torch's thread count for the thread that computes.

[Note: thread counts] ``torch.set_num_threads`` also sets MKL's count, which holds for the whole process. If another
thread computes meanwhile, its matrix products are cut differently and so round differently. OpenMP's count belongs to
the calling thread alone, and torch's operations use it. Reading torch's count first fixes that of this thread, which
otherwise would be taken from the last count that any thread has set.
"""

from __future__ import annotations

from functools import cache

import torch
from threadpoolctl import ThreadpoolController


def use_torch_threads(threads: int) -> None:
    """Make torch operations of the calling thread, and of no other, use ``threads`` threads. Needs a torch that
    computes with OpenMP, as the Linux builds do."""
    if torch.get_num_threads() != threads:
        _openmp().limit(limits=threads)


@cache
def _openmp() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="openmp")
