"""Hands out ranges of a rank's pool, in which gradients lie until they are in totals."""

from __future__ import annotations

from rayzero.protocol.gradient_sum import pool_room


class GradientPool:
    """Which ranges of a pool are free. The lowest that is large enough is given first, so that as few pages as possible
    are used, again and again.

    Knows sizes; not memory, or what is in it."""

    def __init__(self, size: int) -> None:
        """``size``: bytes."""
        self._free = [(0, size)] if size else []  # (start, stop), ascending, never adjacent

    def take(self, size: int) -> int | None:
        """The start of ``size`` bytes; None: no free range has so many."""
        size = pool_room(size)
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[at : at + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """What ``take`` gave for this size is free again."""
        stop = start + pool_room(size)
        ranges = sorted([*self._free, (start, stop)])
        self._free = ranges[:1]
        for begin, end in ranges[1:]:
            last = self._free[-1]
            if begin == last[1]:
                self._free[-1] = last[0], end
            else:
                self._free.append((begin, end))
