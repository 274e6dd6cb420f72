"""Flat byte buffers that are reused, within a number of bytes that several parts of a program share by leases."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rayzero.concurrency.threads import with_index
from rayzero.errors import ConfigError
from rayzero.memory.mapping import host_zeros


class MemoryBudget:
    """Bytes shared by leases. A reservation is granted or refused at once and never waits.

    Knows counts of bytes; not whose they are or where they are. Invariant: ``used`` is the sum of the live leases, and
    ``used <= limit`` unless a single lease is larger than the limit. That one is granted while nothing else is leased,
    because otherwise it never could be. Thread-safe."""

    def __init__(self, limit: int | None) -> None:
        """``limit``: bytes; None counts without a limit. Raises ConfigError if it is not positive."""
        if limit is not None and limit <= 0:
            raise ConfigError(f"a memory budget must be more than 0 bytes, got {limit}")
        self.limit = limit
        self._lock = threading.Lock()
        self._used = 0
        self._peak = 0

    def reserve(self, size: int) -> Lease | None:
        """A lease of ``size`` bytes, or None if they are not free now. Raises ConfigError if ``size`` is negative."""
        if size < 0:
            raise ConfigError(f"cannot reserve {size} bytes")
        with self._lock:
            if self.limit is not None and self._used + size > self.limit and self._used > 0:
                return None
            self._used += size
            self._peak = max(self._peak, self._used)
        return Lease(self, size)

    @property
    def used(self) -> int:
        with self._lock:
            return self._used

    @property
    def peak(self) -> int:
        """The most bytes that were leased at a time since the last ``restart_peak``."""
        with self._lock:
            return self._peak

    def restart_peak(self) -> None:
        """Measure the peak from now on."""
        with self._lock:
            self._peak = self._used

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size


class Lease:
    """Some bytes of a budget, until ``release()``."""

    def __init__(self, budget: MemoryBudget, size: int) -> None:
        """Only ``MemoryBudget.reserve`` makes leases."""
        self.size = size
        self._budget: MemoryBudget | None = budget
        self._lock = threading.Lock()

    def release(self) -> None:
        """Give the bytes back. A second release is a bug of ours and raises RuntimeError."""
        with self._lock:
            budget, self._budget = self._budget, None
        if budget is None:
            raise RuntimeError(f"a lease of {self.size} bytes was released twice")
        budget._give_back(self.size)


_GRAIN = 512  # bytes; buffers are whole multiples, because device allocators round to these anyway


def buffer_bytes(nbytes: int) -> int:
    """The bytes of a new buffer for ``nbytes``: the next multiple of 512, and at least 512."""
    return max(1, -(-nbytes // _GRAIN)) * _GRAIN


@dataclass(eq=False, slots=True)
class _Allocation:
    """One allocation."""

    whole: Tensor
    size: int  # bytes
    made: dict[Any, Any] = field(default_factory=dict)  # see Buffer.made


class Buffer:
    """One leased byte buffer. ``tensor`` (1D uint8, exactly the bytes asked for) is valid until ``release()``.

    ``made``: what callers have made over its memory, for example views, under keys that they choose. It stays with the
    memory from lease to lease and is dropped with it."""

    def __init__(self, pool: BufferPool, memory: _Allocation, nbytes: int, lease: Lease) -> None:
        """Only ``BufferPool.acquire`` makes buffers."""
        self.tensor = _first_bytes(memory, nbytes)
        self.made = memory.made
        self._pool, self._memory = pool, memory
        self._lease: Lease | None = lease
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        return self.tensor.numel()

    def release(self) -> None:
        """Give the memory back. ``tensor`` may not be used afterwards. A second release raises RuntimeError."""
        with self._lock:
            lease, self._lease = self._lease, None
        if lease is None:
            raise RuntimeError(f"a buffer of {self.size_bytes} bytes was released twice")
        self._pool.give_back(self._memory, lease)


class BufferPool:
    """Reusable flat byte buffers on one device, bounded by a budget.

    Knows sizes and which buffers are leased; not what is in them, or when a device is done with one: release a buffer
    only after the work that uses it. A kept buffer serves a request if at most 1/8 of it stays spare; the tightest fit
    comes first. Leased buffers are leases of the budget. Kept ones are dropped, the longest unused first, so that
    leased and kept together stay within the budget's limit. Contents are not cleared. With ``poison``, a released
    buffer is filled with 0xFF (NaN in every float type), so that a late read shows. Thread-safe."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        pinned_for: torch.device | None = None,
        budget: MemoryBudget | None = None,
        poison: bool = False,
    ) -> None:
        """``pinned_for``: page-locked host memory, for copies to and from this CUDA device; raises ConfigError if that
        is impossible. Without a budget, nothing is bounded, only counted."""
        self.device = torch.device(device)
        if pinned_for is not None and (self.device.type != "cpu" or not torch.cuda.is_available()):
            raise ConfigError(f"pinned buffers need host memory and CUDA, got device {self.device}")
        self.pinned_for = None if pinned_for is None else with_index(pinned_for)
        self.budget = budget or MemoryBudget(None)
        self._poison = poison
        self._lock = threading.Lock()
        self._free: list[_Allocation] = []  # the longest unused first
        self._leased = 0  # bytes

    def acquire(self, nbytes: int) -> Buffer | None:
        """A buffer of ``nbytes`` bytes with undefined contents, or None if the budget has no room for it now."""
        with self._lock:
            kept = self._best_fit(nbytes)
            size = kept.size if kept is not None else buffer_bytes(nbytes)
            lease = self.budget.reserve(size)
            if lease is None:
                return None
            try:
                memory = self._reuse(kept) if kept is not None else self._allocate(size)
            except BaseException:
                lease.release()
                raise
            self._leased += memory.size
        return Buffer(self, memory, nbytes, lease)

    def trim(self, keep: int = 0) -> int:
        """Drop kept buffers, the longest unused first, until at most ``keep`` bytes are kept. Returns how many bytes it
        dropped."""
        with self._lock:
            return self._trim(keep)

    @property
    def held_bytes(self) -> int:
        """The bytes of all its buffers, in use or kept for reuse."""
        with self._lock:
            return self._leased + self._free_bytes()

    def give_back(self, memory: _Allocation, lease: Lease) -> None:
        """Only a buffer's ``release`` calls it."""
        if self._poison:
            memory.whole.fill_(0xFF)
        with self._lock:
            self._free.append(memory)  # freed by: acquire (reuse), or trim
            self._leased -= memory.size
        lease.release()

    # The rest runs under the lock.

    def _best_fit(self, nbytes: int) -> _Allocation | None:
        size = buffer_bytes(nbytes)
        best = None
        for kept in reversed(self._free):
            if kept.size == size:
                return kept
            if size < kept.size <= size + size // 8 and (best is None or kept.size < best.size):
                best = kept
        return best

    def _reuse(self, kept: _Allocation) -> _Allocation:
        self._free.remove(kept)
        return kept

    def _allocate(self, size: int) -> _Allocation:
        if self.budget.limit is not None:
            self._trim(max(0, self.budget.limit - self._leased - size))
        if self.pinned_for is not None:
            return _Allocation(host_zeros(size, torch.uint8, pinned_for=self.pinned_for), size)
        return _Allocation(torch.empty(size, dtype=torch.uint8, device=self.device), size)

    def _trim(self, keep: int) -> int:
        before = self._free_bytes()
        while self._free and self._free_bytes() > keep:
            self._free.pop(0)
        return before - self._free_bytes()

    def _free_bytes(self) -> int:
        return sum(kept.size for kept in self._free)


def _first_bytes(memory: _Allocation, nbytes: int) -> Tensor:
    """The memory's first bytes as a tensor. Made once for each size, because a tensor operation may let other threads
    run first."""
    if nbytes not in memory.made:
        memory.made[nbytes] = memory.whole[:nbytes]
    found: Tensor = memory.made[nbytes]
    return found
