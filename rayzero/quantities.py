"""Writes numbers of things, and reads and writes sizes in bytes, as people do."""

from __future__ import annotations

import mmap
import re
from fractions import Fraction

__all__ = ["BYTE_TEXT", "count", "format_bytes", "parse_bytes"]

_BYTE_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
BYTE_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
PAGE = mmap.PAGESIZE  # bytes


def count(number: float, noun: str, plural: str | None = None) -> str:
    """``count(1, "rank")`` -> ``"1 rank"``; ``count(2_000, "rank")`` -> ``"2,000 ranks"``; ``count(0.5, "CPU")`` ->
    ``"0.5 CPUs"``. plural: if it is not the noun with an s."""
    digits = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{digits} {noun if number == 1 else plural or noun + 's'}"


def parse_bytes(value: object) -> object:
    """The bytes that a text such as ``"2GiB"``, ``"1.5 GB"`` or ``"4096"`` means. Returns anything else unchanged.

    Raises ValueError for a text that is not a whole number of bytes."""
    if not isinstance(value, str):
        return value
    match = BYTE_TEXT.fullmatch(value)
    factor = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError("must be bytes: a whole number, or a number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    size = Fraction(match[1]) * factor
    if size.denominator != 1:
        raise ValueError("must be a whole number of bytes")
    return int(size)


def format_bytes(size: int) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def whole_pages(size: int) -> int:
    """``size`` bytes rounded up to whole pages."""
    return -(-size // PAGE) * PAGE
