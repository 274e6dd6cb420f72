"""Packs a value once that is sent to many, and unpacks once what many send alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
P = TypeVar("P")


class Once(Generic[T, P]):
    """What ``pack`` makes of a value, kept until it is called with another one: a decision goes to every rank, a
    collect to every owner, every rank sends the same inputs, and with a thousand of them packing takes longer than
    sending. Value and result are shared, so nobody may change them. Any thread may call it.

    Knows the last value; not what is packed."""

    def __init__(self, pack: Callable[[T], P], bits: Callable[[T], bytes] | None = None) -> None:
        """``bits``: of a value, by which it is known; None: by identity."""
        self._pack, self._bits = pack, bits
        self._last: tuple[T | bytes, P] | None = None

    def __call__(self, value: T) -> P:
        """The packed ``value``."""
        known: T | bytes = value if self._bits is None else self._bits(value)
        last = self._last
        if last is None or not (last[0] is known or (self._bits is not None and last[0] == known)):
            last = self._last = (known, self._pack(value))
        return last[1]
