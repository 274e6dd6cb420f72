"""Host memory that CUDA may copy from and to by itself: memory that exists already is registered with the driver."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from rayzero.errors import MemoryPlanError
from rayzero.quantities import format_bytes

_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly: CUDA runtime API, cudaHostRegister

log = logging.getLogger(__name__)

_locked: dict[int, int] = {}  # of this process: address -> bytes


def locked_bytes() -> int:
    """Bytes that this process has registered now."""
    return sum(list(_locked.values()))


def beyond_limit(params: int, gradients: int, limit: int) -> str | None:
    """Why page-locking a rank's shared memory may fail, with the sum; None where ``limit`` (bytes, RLIMIT_MEMLOCK;
    negative: none) allows it.

    No refusal: whether registered memory counts is the driver's choice, and NVIDIA's pins it without charging it there,
    also in containers with the usual 64 KiB or 8 MiB. Where it does count, ``PageLock`` fails."""
    needed = params + gradients
    if limit < 0 or needed <= limit:
        return None
    return (
        f"page-locking needs {format_bytes(needed)} = parameters {format_bytes(params)} + gradients "
        f"{format_bytes(gradients)}, RLIMIT_MEMLOCK is {format_bytes(limit)}: should CUDA refuse, raise it (ulimit -l, "
        "docker --ulimit memlock=-1), or set pin_cpu_memory=False"
    )


class PageLock:
    """A registered range. It is registered until ``release()``, or until nobody holds this any more."""

    def __init__(self, address: int, size: int, keeper: object, *, read_only: bool) -> None:
        """``keeper`` keeps the range mapped. ``read_only``: it is mapped without the right to write, which not every
        device can register. Raises MemoryPlanError where the driver refuses."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(address, size, _PORTABLE | (_READ_ONLY if read_only else 0))
        if int(status) != 0:
            raise MemoryPlanError(
                f"CUDA does not page-lock {format_bytes(size)} of shared memory (error {int(status)}); "
                "raise the limit (ulimit -l), or set pin_cpu_memory=False"
            )
        _locked[address] = size
        self._release = weakref.finalize(self, _unregister, runtime, address, keeper)

    def release(self) -> None:
        """Unregister; after the last copy. Idempotent."""
        self._release()


def _unregister(runtime: Any, address: int, keeper: object) -> None:
    """``keeper`` is held until here: a range must not be unmapped while it is registered."""
    _locked.pop(address, None)
    status = int(runtime.cudaHostUnregister(address))
    if status != 0:
        log.warning("CUDA did not unregister host memory at %#x: error %d", address, status)
