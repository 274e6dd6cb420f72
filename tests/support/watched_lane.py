"""A lane of threads that tells a test of each copy: it delays copies, fails them, or notes their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayzero.lanes import Direction, Event, ThreadLane


class WatchedLane(ThreadLane):
    """Calls ``before_copy(direction, label)`` on the copy's thread."""

    def __init__(self, before_copy: Callable[[str, str], object]) -> None:
        super().__init__()
        self._before_copy = before_copy

    def issue(self, direction: Direction, copy: Callable[[], object], *, label: str = "", **options: Any) -> Event:
        def watched() -> object:
            self._before_copy(direction, label)
            return copy()

        return super().issue(direction, watched, label=label, **options)
