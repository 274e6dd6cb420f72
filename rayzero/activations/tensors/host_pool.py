"""A pool of host buffers in size classes: it reuses, bounds and counts them.

[Note: two pools] Activations come in sizes that change with every batch; units have a few sizes that never change. Size
classes reuse buffers across near sizes and leave up to a quarter of them spare. ``memory/pool.py`` fits units almost
exactly, because their budget is device memory. That pool refuses at once; this one first waits for a copy that ends
soon. That one lets a single oversize unit through; here the cap holds, and the tensor stays on the device.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rayzero.errors import MemoryPlanError, RayZeroError
from rayzero.lanes import Event
from rayzero.memory.page_lock import host_zeros

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClassStatus:
    """The buffers of one size class, of ``size_bytes`` each."""

    size_bytes: int
    num_in_use: int
    num_free: int
    num_returning: int  # given back while a copy still uses them

    @property
    def utilization(self) -> float:
        """The share of this class's buffers that is in use, 0 to 1."""
        total = self.num_in_use + self.num_free + self.num_returning
        return self.num_in_use / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """What the pool holds now, in bytes of whole buffers, and what it has served so far, in counts."""

    total_bytes: int
    in_use_bytes: int
    free_bytes: int
    returning_bytes: int
    pinned_bytes: int
    peak_bytes: int
    requests: int
    hits: int
    misses: int
    refusals: int
    classes: tuple[SizeClassStatus, ...]

    def as_dict(self) -> dict[str, object]:
        """Plain values, ready for JSON."""
        return asdict(self)


class HostPool:
    """Leases host memory to copies.

    Knows sizes, and which buffer is leased, free, or still used by a copy; not what is in them. A buffer that is given
    back with a copy in flight is leased again only after that copy has finished. Thread-safe."""

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        pinned_cap_bytes: int | None = None,
        pin: bool = False,
        poison: bool = False,
        allocate: Callable[[int, bool], Tensor] | None = None,
    ) -> None:
        """``pin``: use page-locked memory as far as ``pinned_cap_bytes`` and the system allow, and pageable memory
        after that. ``allocate(nbytes, pinned)``: makes the memory (1D uint8); by default torch does. ``poison``: for
        tests, fill each buffer with 0xFF when it comes back."""
        self._cap, self._pinned_cap, self._pin, self._poison = cap_bytes, pinned_cap_bytes, pin, poison
        self._allocate = allocate or _host_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[HostBuffer]] = {}
        self._returning: deque[tuple[HostBuffer, Event]] = deque()
        self._in_use: dict[int, int] = {}
        self._total = self._pinned = self._peak = 0
        self._requests = self._hits = self._misses = self._refusals = 0

    def acquire(self, nbytes: int, *, wait: bool = True) -> HostBuffer | None:
        """A buffer of ``nbytes`` bytes with undefined contents; None if the cap leaves no room for it.

        Near the cap, it first drops free buffers of other sizes, then, with ``wait``, waits for copies that still use a
        buffer."""
        size = size_class(nbytes)
        with self._lock:
            self._requests += 1
            self._collect()
            buffer = self._take_free(size) or self._make(size, wait)
            if buffer is None:
                self._refusals += 1
                return None
            self._in_use[size] = self._in_use.get(size, 0) + 1
        buffer.bytes, buffer.leased = buffer.whole[:nbytes], True
        return buffer

    def give_back(self, buffer: HostBuffer, after: Event | None = None) -> None:
        """End the lease. ``after``: a copy that still reads or writes the buffer.

        Raises RayZeroError if the lease has ended already."""
        with self._lock:
            if not buffer.leased:
                raise RayZeroError(f"a host buffer of {buffer.bytes.numel()} bytes was given back twice")
            buffer.leased = False
            self._in_use[buffer.whole.numel()] -= 1
            if after is None or after.finished():
                self._keep(buffer)
            else:
                self._returning.append((buffer, after))

    def trim(self, keep_bytes: int = 0) -> int:
        """Drop free buffers, the biggest first, until at most ``keep_bytes`` of them are left. Returns the bytes that
        were dropped."""
        with self._lock:
            self._collect()
            return self._trim(keep_bytes)

    def status(self) -> PoolStatus:
        """The pool's present numbers."""
        with self._lock:
            self._collect()
            free = sum(size * len(kept) for size, kept in self._free.items())
            returning = sum(buffer.whole.numel() for buffer, _ in self._returning)
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
                classes=self._classes(),
            )

    # -------------------------------------------------------------------------------- under the lock

    def _classes(self) -> tuple[SizeClassStatus, ...]:
        returning = [buffer.whole.numel() for buffer, _ in self._returning]
        return tuple(
            SizeClassStatus(
                size_bytes=size,
                num_in_use=self._in_use.get(size, 0),
                num_free=len(self._free.get(size, ())),
                num_returning=returning.count(size),
            )
            for size in sorted(self._in_use.keys() | self._free.keys())
        )

    def _take_free(self, size: int) -> HostBuffer | None:
        kept = self._free.get(size)
        if not kept:
            return None
        self._hits += 1
        return kept.pop()

    def _make(self, size: int, wait: bool) -> HostBuffer | None:
        if not self._make_room(size, wait):
            return self._take_free(size)
        self._misses += 1
        whole, pinned = self._new_memory(size)
        self._total += size
        self._pinned += size if pinned else 0
        self._peak = max(self._peak, self._total)
        return HostBuffer(whole, whole, pinned)

    def _make_room(self, size: int, wait: bool) -> bool:
        """Whether a new buffer of ``size`` fits the cap. False also if a buffer of that size became free meanwhile."""
        if self._cap is None:
            return True
        while self._total + size > self._cap:
            if self._trim_bytes(self._total + size - self._cap):
                continue
            if not (self._returning and wait):
                return False
            self._returning[0][1].join()
            self._collect()
            if self._free.get(size):
                return False
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

    def _collect(self) -> None:
        still = [(buffer, copy) for buffer, copy in self._returning if not copy.finished()]
        if len(still) < len(self._returning):
            waiting = {id(buffer) for buffer, _ in still}
            for buffer, _ in self._returning:
                if id(buffer) not in waiting:
                    self._keep(buffer)
            self._returning = deque(still)

    def _keep(self, buffer: HostBuffer) -> None:
        if self._poison:
            buffer.whole.fill_(255)
        self._free.setdefault(buffer.whole.numel(), []).append(buffer)

    def _trim_bytes(self, wanted: int) -> int:
        free = sum(size * len(kept) for size, kept in self._free.items())
        return self._trim(max(0, free - wanted))

    def _trim(self, keep_bytes: int) -> int:
        free = sum(size * len(kept) for size, kept in self._free.items())
        dropped = 0
        for size in sorted(self._free, reverse=True):
            while free - dropped > keep_bytes and self._free[size]:
                buffer = self._free[size].pop()
                dropped += size
                self._pinned -= size if buffer.pinned else 0
        self._total -= dropped
        return dropped


def _host_bytes(nbytes: int, pinned: bool) -> Tensor:
    return host_zeros(nbytes, torch.uint8, pinned=True) if pinned else torch.empty(nbytes, dtype=torch.uint8)


def _warn_pageable(why: str) -> None:
    warnings.warn(f"activation offload continues with pageable host buffers (slower copies): {why}", stacklevel=2)
