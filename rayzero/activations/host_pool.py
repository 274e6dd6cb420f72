"""A pool of host buffers in size classes: it reuses, bounds and counts them.

[Note: two pools] Activations come in sizes that change with every batch; units have a few sizes that never change. Size
classes reuse buffers across near sizes and leave up to a quarter of them spare. ``memory/pool.py`` fits units almost
exactly, because their budget is device memory. That pool refuses at once; this one first waits for a copy that ends
soon. That one lets a single oversize unit through; here the cap holds, and the tensor stays on the device.

[Note: reuse in the device's order] A buffer comes back while a copy of it is only queued. It is leased again at once,
and the next copy into it is ordered after that one (``HostBuffer.after``). If the host waited until it knows that the
copy is over, a host that runs ahead of its device would need one more set of buffers for each step that it is ahead.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rayzero.errors import MemoryPlanError, RayZeroError, UnsupportedError
from rayzero.lanes import Event
from rayzero.memory.mapping import host_zeros

_SMALLEST = 4096  # bytes


def size_class(nbytes: int) -> int:
    """The size in bytes of the buffer that serves ``nbytes``: 4,096, or 5, 6, 7 or 8 quarters of a power of two, so
    that less than a quarter of ``nbytes`` is spare above 4,096."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    power = 1 << ((nbytes - 1).bit_length() - 1)  # power < nbytes <= 2 * power
    quarter = power // 4
    return power + -(-(nbytes - power) // quarter) * quarter


@dataclass(slots=True, eq=False)
class HostBuffer:
    """One buffer. While it is leased, ``bytes`` (1D uint8) has exactly the size that was asked for."""

    bytes: Tensor
    whole: Tensor  # 1D uint8, the whole size class; freed by: HostPool.trim, or the pool's end
    pinned: bool
    leased: bool = True
    after: Event | None = None  # the last copy of its last lease, which may be in flight: fill it after that

    @property
    def is_returning(self) -> bool:
        """Whether a copy of its last lease may still be in flight."""
        if self.after is not None and self.after.finished():
            self.after = None
        return self.after is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """What the pool holds now, in bytes of whole buffers, and what it has served so far, in counts."""

    total_bytes: int
    in_use_bytes: int
    free_bytes: int
    returning_bytes: int  # given back while a copy still uses them
    pinned_bytes: int
    peak_bytes: int
    requests: int
    hits: int
    misses: int
    refusals: int


class HostPool:
    """Leases host memory to copies.

    Knows sizes, and which buffer is leased or free, and the copy to come after; not what is in them. Thread-safe."""

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        pinned_cap_bytes: int | None = None,
        pinned_for: torch.device | None = None,
        poison: bool = False,
        allocate: Callable[[int, bool], Tensor] | None = None,
    ) -> None:
        """``pinned_for``: use memory that is page-locked for copies to and from this CUDA device as far as
        ``pinned_cap_bytes`` and the system allow, and pageable memory after that. ``allocate(nbytes, pinned)``: makes
        the memory (1D uint8); by default torch does. ``poison``: for tests, fill each buffer with 0xFF when it comes
        back, unless a copy is in flight."""
        self._cap, self._pinned_cap, self._poison = cap_bytes, pinned_cap_bytes, poison
        self._pin = pinned_for is not None
        self._allocate = allocate or partial(_host_bytes, pinned_for)
        self._lock = threading.Lock()
        self._free: dict[int, deque[HostBuffer]] = {}  # by size class, the longest free first
        self._in_use: dict[int, int] = {}
        self._most_in_use: dict[int, int] = {}
        self._total = self._pinned = self._peak = 0
        self._requests = self._hits = self._misses = self._refusals = 0

    def acquire(self, nbytes: int, *, captured: bool = False) -> HostBuffer | None:
        """A buffer of ``nbytes`` bytes with undefined contents; None if the cap leaves no room for it.

        Near the cap, it first drops free buffers of other sizes, then waits for copies that still use a buffer.
        ``captured``: the buffer is for a CUDA graph capture, in which CUDA neither makes nor frees page-locked memory,
        and waits for nothing outside: only what ``reserve`` has made is leased. Raises UnsupportedError if that is not
        enough."""
        size = size_class(nbytes)
        with self._lock:
            self._requests += 1
            buffer = self._take_quiet(size) if captured else self._take_free(size) or self._make(size)
            if buffer is None:
                self._refusals += 1
                return None
            in_use = self._in_use[size] = self._in_use.get(size, 0) + 1
            self._most_in_use[size] = max(in_use, self._most_in_use.get(size, 0))
        buffer.bytes, buffer.leased = buffer.whole[:nbytes], True
        return buffer

    def give_back(self, buffer: HostBuffer, after: Event | None = None) -> None:
        """End the lease. ``after``: a copy that still reads or writes the buffer.

        Raises RayZeroError if the lease has ended already."""
        with self._lock:
            if not buffer.leased:
                raise RayZeroError(f"a host buffer of {buffer.bytes.numel()} bytes was given back twice")
            buffer.leased, buffer.after = False, after
            self._in_use[buffer.whole.numel()] -= 1
            self._keep(buffer)

    def reserve(self, times: int) -> None:
        """Have ``times`` as many free buffers as were ever in use at once, as far as the cap allows; all copies are
        over."""
        with self._lock:
            for size, most in self._most_in_use.items():
                free = self._free.setdefault(size, deque())
                for buffer in free:
                    buffer.after = None
                while len(free) < times * most and (self._cap is None or self._total + size <= self._cap):
                    made = self._new(size)
                    made.leased = False
                    free.append(made)

    def trim(self, keep_bytes: int = 0) -> int:
        """Drop free buffers, the biggest first, until at most ``keep_bytes`` of them are left. Returns the bytes that
        were dropped."""
        with self._lock:
            return self._trim(keep_bytes)

    def status(self) -> PoolStatus:
        """The pool's present numbers."""
        with self._lock:
            returning = sum(buffer.whole.numel() for buffer in self._all_free() if buffer.is_returning)
            free = sum(size * len(kept) for size, kept in self._free.items()) - returning
            return PoolStatus(
                total_bytes=self._total,
                in_use_bytes=self._total - free - returning,
                free_bytes=free,
                returning_bytes=returning,
                pinned_bytes=self._pinned,
                peak_bytes=self._peak,
                requests=self._requests,
                hits=self._hits,
                misses=self._misses,
                refusals=self._refusals,
            )

    # -------------------------------------------------------------------------------- under the lock

    def _all_free(self) -> Iterator[HostBuffer]:
        for kept in self._free.values():
            yield from kept

    def _take_free(self, size: int) -> HostBuffer | None:
        kept = self._free.get(size)
        if not kept:
            return None
        self._hits += 1
        return kept.popleft()

    def _take_quiet(self, size: int) -> HostBuffer | None:
        """A free buffer that no copy uses, for a capture."""
        kept = self._free.get(size, deque())
        found = next((buffer for buffer in kept if buffer.after is None), None)
        if found is not None:
            self._hits += 1
            kept.remove(found)
        elif self._cap is None or self._total + size <= self._cap:
            raise UnsupportedError(
                f"a CUDA graph capture needs one more host buffer of {size:,} bytes, which cannot be made in it: take "
                "a step without a graph, then call prepare_capture() with the number of forwards to be captured"
            )
        return found

    def _make(self, size: int) -> HostBuffer | None:
        return self._new(size) if self._make_room(size) else None

    def _new(self, size: int) -> HostBuffer:
        self._misses += 1
        whole, pinned = self._new_memory(size)
        self._total += size
        self._pinned += size if pinned else 0
        self._peak = max(self._peak, self._total)
        return HostBuffer(whole, whole, pinned)

    def _make_room(self, size: int) -> bool:
        """Whether a new buffer of ``size`` fits the cap."""
        if self._cap is None:
            return True
        while self._total + size > self._cap:
            if self._trim_bytes(self._total + size - self._cap):
                continue
            in_flight = next((buffer.after for buffer in self._all_free() if buffer.after is not None), None)
            if in_flight is None:
                return False
            in_flight.join()
        return True

    def _new_memory(self, size: int) -> tuple[Tensor, bool]:
        if self._pin and (self._pinned_cap is None or self._pinned + size <= self._pinned_cap):
            try:
                return self._allocate(size, True), True
            except (MemoryPlanError, RuntimeError) as error:
                self._pin = False
                _warn_pageable(f"page-locking {size:,} bytes failed ({error})")
        elif self._pin:
            self._pin = False
            _warn_pageable(f"the cap of {self._pinned_cap:,} page-locked bytes is reached")
        return self._allocate(size, False), False

    def _keep(self, buffer: HostBuffer) -> None:
        if self._poison and not buffer.is_returning:
            buffer.whole.fill_(255)
        self._free.setdefault(buffer.whole.numel(), deque()).append(buffer)

    def _trim_bytes(self, wanted: int) -> int:
        free = sum(size * len(kept) for size, kept in self._free.items())
        return self._trim(max(0, free - wanted))

    def _trim(self, keep_bytes: int) -> int:
        free = sum(size * len(kept) for size, kept in self._free.items())
        dropped = 0
        for size in sorted(self._free, reverse=True):
            for buffer in list(self._free[size]):
                if free - dropped > keep_bytes and not buffer.is_returning:  # else a copy would lose its memory
                    self._free[size].remove(buffer)
                    dropped += size
                    self._pinned -= size if buffer.pinned else 0
        self._total -= dropped
        return dropped


def _host_bytes(pinned_for: torch.device | None, nbytes: int, pinned: bool) -> Tensor:
    return (
        host_zeros(nbytes, torch.uint8, pinned_for=pinned_for)
        if pinned
        else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    )


def _warn_pageable(why: str) -> None:
    warnings.warn(f"activation offload continues with pageable host buffers (slower copies): {why}", stacklevel=2)
