"""A thread that computes: torch's thread count, and the CUDA device that it works on and waits for.

[Note: thread counts] ``torch.set_num_threads`` also sets MKL's count, which holds for the whole process. If another
thread computes meanwhile, its matrix products are cut differently and so round differently. OpenMP's count belongs to
the calling thread alone, and torch's operations use it. Reading torch's count first fixes that of this thread, which
otherwise would be taken from the last count that any thread has set.

[Note: a thread's device] A thread begins on device 0, whichever its rank has. What CUDA is asked there, and be it
whether another device's event has passed, makes a context on device 0: some 500 MiB for every rank. So code that
may run in a thread of the store, of the owner or of the garbage collector says which device is meant.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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


_ALREADY = nullcontext()


def with_index(device: torch.device) -> torch.device:
    """A CUDA device with its number: the calling thread's if ``device`` is only "cuda"."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device, which has a number, this thread's. [Note: a thread's device]

    Costs a microsecond or two if it is not yet, and 0.4 if it is. Leaving the block asks CUDA for nothing:
    a device without a context gets none."""
    return _ALREADY if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def sleep_until_done(stream: torch.cuda.Stream) -> None:
    """Block the thread until a stream of its device has done what it was given. ``stream.synchronize()`` would spin,
    and take a core from owners on the same host."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    event.synchronize()
