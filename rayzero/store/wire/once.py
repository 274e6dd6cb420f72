"""Packs a value once that is sent to many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
P = TypeVar("P")


class Once(Generic[T, P]):
    """What ``pack`` makes of a value, kept until it is called with another one: a decision goes to every rank, a
    collect to every owner, and with a thousand of them packing takes longer than sending. The result is shared, so
    nobody may change it. Any thread may call it.

    Knows the last value, by identity; not what is packed."""

    def __init__(self, pack: Callable[[T], P]) -> None:
        self._pack = pack
        self._last: tuple[T, P] | None = None

    def __call__(self, value: T) -> P:
        """The packed ``value``."""
        last = self._last
        if last is None or last[0] is not value:
            last = self._last = (value, self._pack(value))
        return last[1]
