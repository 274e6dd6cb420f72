"""Torch's thread count, set where computing happens.

[Note: thread counts] A count set in one thread is what threads started later begin with, and a thread that never
asked for its count takes the last one set anywhere. So: ask first (which fixes the thread's own), set, and let a
passing thread put the value for later threads back.
"""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()


def use_torch_threads(threads: int) -> None:
    """Make torch operations of the calling thread, and of no other, use ``threads`` threads."""
    with _lock:
        before = torch.get_num_threads()
        if before == threads:
            return
        torch.set_num_threads(threads)
        passing = threading.Thread(target=torch.set_num_threads, args=(before,))
        passing.start()
        passing.join()
