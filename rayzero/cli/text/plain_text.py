"""Makes text from a run's files and processes safe for a terminal."""

from __future__ import annotations

__all__ = ["plain"]


def plain(text: str) -> str:
    """``text`` on one line, with control characters escaped as Python does, so that none reaches the terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
