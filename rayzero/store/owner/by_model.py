"""Keeps one object for each prepared model of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from rayzero.errors import StoreClosedError, StoreError

T = TypeVar("T")


class ByModel(Generic[T]):
    """One object for each prepared model, by number: the order of the ``prepare()`` calls, equal on all ranks.

    Each is made once, at its first use. Knows numbers; not what it makes. Thread-safe."""

    def __init__(self, make: Callable[[int], T]) -> None:
        """``make(number)`` is called under the lock, for 0, then 1, and so on."""
        self._make = make
        self._made: list[T] = []
        self._lock = threading.Lock()
        self._closed = False

    def __getitem__(self, number: int) -> T:
        """The object of model ``number``, made now if it is the next one. Raises StoreError for a number beyond that,
        StoreClosedError for a new one after ``close``."""
        if (found := self.known(number)) is not None:
            return found
        with self._lock:
            if not 0 <= number <= len(self._made):
                raise StoreError(f"there is no prepared model {number}: the next one is {len(self._made)}")
            if number == len(self._made):
                if self._closed:
                    raise StoreClosedError(f"prepared model {number} comes too late: the run has ended")
                self._made.append(self._make(number))
            return self._made[number]

    def make_first(self) -> None:
        """Make the object of model 0 now."""
        self[0]

    def known(self, number: int) -> T | None:
        """The object of model ``number`` if it has been made; does not wait."""
        return self._made[number] if 0 <= number < len(self._made) else None

    @property
    def made(self) -> Sequence[T]:
        """All objects made so far, in order."""
        return tuple(self._made)

    def close(self) -> Sequence[T]:
        """Make no more objects. Returns those made, which the caller closes. Idempotent."""
        with self._lock:
            self._closed = True
        return self.made
