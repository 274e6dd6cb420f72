"""Lanes with one mistake each: what the suites on a simulated device must find."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rayzero.lanes import Direction, Event
from tests.support.happens_before import RaceError
from tests.support.simulated_copy import FreedError
from tests.support.simulated_lane import SimulatedEvent, SimulatedLane

FOUND = RaceError, FreedError


class Unwaited(SimulatedEvent):
    """An event that orders nothing."""

    def wait(self) -> None:
        """Forget it."""

    def join(self) -> None:
        """Forget it."""


class MutatedLane(SimulatedLane):
    """``change``: what becomes of the options of each copy, by direction, "after" and "holds". ``waits``: whether
    waiting for a copy orders anything."""

    def __init__(self, seed: int, change: Callable[[str, dict[str, Any]], dict[str, Any]], waits: bool = True) -> None:
        super().__init__(seed)
        self._change, self._waits, self._first = change, waits, self.now()

    def issue(self, direction: Direction, copy: Callable[[], object], **options: Any) -> Event:
        changed = self._change(direction, options)
        if changed.get("after") == "at first":
            changed["after"] = [self._first]
        event = super().issue(direction, copy, **changed)
        assert isinstance(event, SimulatedEvent)
        return event if self._waits else Unwaited(event.lane, event.work, event.stamp, event.at)

    def run_out(self) -> None:
        """Make what is still queued, whatever becomes of it."""
        while self.waiting:
            with suppress(*FOUND):
                self.close()

    def settle(self, direction: Direction) -> None:
        if self._waits:
            super().settle(direction)


def not_held(direction: str, options: dict[str, Any]) -> dict[str, Any]:
    """One record_stream is missing."""
    return options | {"holds": ()}


def in_at_once(direction: str, options: dict[str, Any]) -> dict[str, Any]:
    """The copies to the device wait for nothing."""
    return options | ({"after": "at first"} if direction == "in" else {})


def out_at_once(direction: str, options: dict[str, Any]) -> dict[str, Any]:
    """The copies from the device wait for nothing."""
    return options | ({"after": "at first"} if direction == "out" else {})


def unchanged(direction: str, options: dict[str, Any]) -> dict[str, Any]:
    return options
