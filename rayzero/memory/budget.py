"""A number of bytes that several parts of a program share by leases."""

from __future__ import annotations

import threading

from rayzero.errors import ConfigError


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
