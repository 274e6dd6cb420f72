"""Numbers of things, as people write them."""

from __future__ import annotations

__all__ = ["count"]


def count(number: float, noun: str, plural: str | None = None) -> str:
    """``count(1, "rank")`` -> ``"1 rank"``; ``count(2_000, "rank")`` -> ``"2,000 ranks"``; ``count(0.5, "CPU")`` ->
    ``"0.5 CPUs"``. plural: where it is not the noun with an s."""
    digits = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{digits} {noun if number == 1 else plural or noun + 's'}"
