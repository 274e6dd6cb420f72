"""Numbers of things, as people write them."""

from __future__ import annotations

__all__ = ["count"]


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``count(1, "rank")`` -> ``"1 rank"``; ``count(2_000, "rank")`` -> ``"2,000 ranks"``. plural: where it is not the
    noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
