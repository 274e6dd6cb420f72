"""Clocks that tests turn."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class StallClock(Clock):
    """The clock of all that watches over waits: only while a test lets a wait stall does time pass, two seconds with
    each look. So a stall takes as many answers of the peer however busy the machine is, and nothing else stalls."""

    runs = False

    def __call__(self) -> float:
        self.now += 2.0 if self.runs else 0.0
        return self.now

    def stall(self, wait: Future[Any]) -> None:
        """Let time pass until the wait has ended, and raise its error."""
        self.runs = True
        try:
            wait.result(60)  # only a fault lasts so long
        finally:
            self.runs = False
