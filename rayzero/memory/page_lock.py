"""Page-locks host memory by registering it with the CUDA driver, so that CUDA can copy from and to it by itself.

[Note: torch's own] ``pin_memory=True`` takes the next power of two, up to twice what was asked for, and keeps what is
freed. A range that this module maps and registers takes whole pages, and goes back when its last tensor does.

[Note: CUDA's last error] CUDA keeps a refusal as the thread's last error, and torch reads it after each kernel launch:
the next one, whatever it computes, would raise it as its own. torch does not offer cudaGetLastError, which clears it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rayzero.concurrency.threads import on_device, with_index
from rayzero.errors import MemoryPlanError
from rayzero.memory.mapping import Mapping
from rayzero.memory.pages import whole_pages
from rayzero.quantities import format_bytes

_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly: CUDA runtime API, cudaHostRegister

log = logging.getLogger(__name__)

_locked: dict[int, int] = {}  # of this process: address -> bytes


def locked_bytes() -> int:
    """How many bytes this process has registered now."""
    return sum(list(_locked.values()))


def host_zeros(numel: int, dtype: torch.dtype, *, pinned_for: torch.device | None) -> Tensor:
    """Zeroed host memory, 1D. ``pinned_for``: page-locked, for copies to and from this CUDA device; None: it is not.
    [Note: torch's own] Pages that are not take no memory before they are written; torch.zeros would write them. Raises
    MemoryPlanError if the driver refuses. Freed with its last tensor, and if it is page-locked, once that device has
    ended what is queued."""
    if not numel:
        return torch.zeros(0, dtype=dtype, device="cpu")
    mapping = Mapping.fresh(whole_pages(numel * dtype.itemsize))
    if pinned_for is None:
        return mapping.tensor(0, numel, dtype)
    device = with_index(pinned_for)
    runtime = _register(mapping.address, mapping.size, device, read_only=False)
    last = weakref.finalize(mapping.keeper, _unregister_idle, runtime, mapping.address, device)  # before it is unmapped
    last.atexit = False
    return mapping.tensor(0, numel, dtype)


def beyond_limit(params: int, gradients: int, limit: int) -> str | None:
    """Why page-locking a rank's shared memory may fail, with the sum; None if ``limit`` allows it. All are in bytes;
    ``limit`` is RLIMIT_MEMLOCK, and a negative one is no limit.

    This is a warning and not a refusal, because the driver decides whether registered memory counts. NVIDIA's driver
    pins it without charging it, even in containers with the usual limit of 64 KiB or 8 MiB. If it does count,
    ``PageLock`` fails."""
    needed = params + gradients
    if limit < 0 or needed <= limit:
        return None
    return (
        f"page-locking needs {format_bytes(needed)} = parameters {format_bytes(params)} + gradients "
        f"{format_bytes(gradients)}, but RLIMIT_MEMLOCK is {format_bytes(limit)}; if CUDA refuses, raise it (ulimit "
        "-l, docker --ulimit memlock=-1), or set pin_cpu_memory=False"
    )


class PageLock:
    """Registered ranges of memory. They stay registered until ``release()``, or until nothing refers to this object."""

    def __init__(
        self, ranges: Sequence[tuple[int, int]], keeper: object, *, read_only: bool, device: torch.device
    ) -> None:
        """``ranges``: (address, bytes) of each part. ``keeper``: keeps them mapped. ``read_only``: they are mapped
        without the right to write; not every device can register such memory. ``device``: the CUDA device that copies
        from and to them. Raises MemoryPlanError if the driver refuses; then none is registered."""
        done: list[tuple[Any, int]] = []
        device = with_index(device)
        try:
            for address, size in ranges:
                done.append((_register(address, size, device, read_only=read_only), address))
        except MemoryPlanError:
            _unregister_all(done, device, keeper)
            raise
        self._release = weakref.finalize(self, _unregister_all, done, device, keeper)

    def release(self) -> None:
        """Unregister it. Call it after the last copy. Idempotent."""
        self._release()


def _register(address: int, size: int, device: torch.device, *, read_only: bool) -> Any:
    """Register a range; returns CUDA's runtime. [Note: a thread's device] in threads.py: this makes a context, if
    there is none."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with on_device(device):
        status = runtime.cudaHostRegister(address, size, _PORTABLE | (_READ_ONLY if read_only else 0))
    if int(status) != 0:
        with suppress(RuntimeError):
            _launch(device)  # takes the refusal. [Note: CUDA's last error]
        raise MemoryPlanError(
            f"CUDA refused to page-lock {format_bytes(size)} of host memory (error {int(status)}); "
            "raise the limit (ulimit -l), or set pin_cpu_memory=False"
        )
    _locked[address] = size
    return runtime


def _launch(device: torch.device) -> None:
    torch.zeros(1, device=device, dtype=torch.float32)


def _unregister_idle(runtime: Any, address: int, device: torch.device) -> None:
    """Unregister a range whose last tensor is gone; a copy that is queued may still use it.

    The thread spins meanwhile: an event, for which it could sleep, is of one stream, and who used the range is not
    known here."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:  # in a capture, which refuses it, or after a fault of the device
        log.exception("could not wait for %s before giving back page-locked memory at %#x", device, address)
    finally:  # it is unmapped next, and must not be registered then
        _unregister(runtime, address, device)


def _unregister_all(ranges: Sequence[tuple[Any, int]], device: torch.device, keeper: object) -> None:
    """``keeper`` is held until here, because a registered range must not be unmapped."""
    for runtime, address in ranges:
        _unregister(runtime, address, device)


def _unregister(runtime: Any, address: int, device: torch.device) -> None:
    _locked.pop(address, None)
    with on_device(device):
        status = int(runtime.cudaHostUnregister(address))
    if status != 0:
        with suppress(RuntimeError):
            _launch(device)  # [Note: CUDA's last error]
        log.warning("CUDA did not unregister host memory at %#x: error %d", address, status)
