"""Sums that grow where something happens: durations of events, and copies of bytes; and how ranks' values merge."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from rayzero.errors import ConfigError


def _together(a: Any, b: Any) -> Any:
    """Two ranks' values of a field as one: numbers add up, texts agree or are "mixed"; None is not there."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, str):
        return a if a == b else "mixed"
    if isinstance(a, Mapping):
        return {name: _together(a.get(name), b.get(name)) for name in {**a, **b}}
    return a + b if isinstance(a, int | float) else a.merged(b)


@dataclass(frozen=True, slots=True)
class Merged:
    """A value of one rank that merges with those of others, field by field."""

    LARGEST: ClassVar[frozenset[str]] = frozenset()  # fields of which the largest value counts; others add up
    SMALLEST: ClassVar[frozenset[str]] = frozenset()

    def merged(self, *others: Self) -> Self:
        """All of them together; associative. Raises ConfigError for anything of another class."""
        result = self
        for other in others:
            if not isinstance(other, type(self)):
                name = type(self).__name__
                raise ConfigError(f"merged() takes {name}, one argument each, got {type(other).__name__}")
            result = type(self)(**{one.name: result._joined(other, one.name) for one in fields(self)})
        return result

    def _joined(self, other: Self, name: str) -> Any:
        a, b = getattr(self, name), getattr(other, name)
        pick = max if name in self.LARGEST else min if name in self.SMALLEST else _together
        return _together(a, b) if a is None or b is None else pick(a, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations(Merged):
    """Seconds of ``count`` events. ``shortest`` and ``longest`` are None while there was none."""

    LARGEST, SMALLEST = frozenset({"longest"}), frozenset({"shortest"})

    count: int = 0
    total: float = 0.0
    shortest: float | None = None
    longest: float | None = None

    @property
    def mean(self) -> float | None:
        """Seconds of one event on average; None while there was none."""
        return self.total / self.count if self.count else None


class Tally:
    """Adds up durations. One thread adds; any may read, and then sees an event that is just added in part."""

    __slots__ = ("_count", "_longest", "_shortest", "_total")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._count, self._total = 0, 0.0
        self._shortest, self._longest = float("inf"), 0.0

    def add(self, seconds: float) -> None:
        self._count += 1
        self._total += seconds
        if seconds < self._shortest:
            self._shortest = seconds
        if seconds > self._longest:
            self._longest = seconds

    @property
    def value(self) -> Durations:
        if not self._count:
            return Durations()
        return Durations(count=self._count, total=self._total, shortest=self._shortest, longest=self._longest)


class CopyTally:
    """Adds up copies of bytes in one direction. Any thread adds or reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        with self._lock:
            self._copies = self._bytes = self._timed = 0
            self._seconds, self._peak = 0.0, 0.0

    def add(self, nbytes: int, seconds: float | None) -> None:
        """One copy has ended. ``seconds``: None if its time is not known, as when a device makes it."""
        with self._lock:
            self._copies += 1
            self._bytes += nbytes
            if seconds is not None and seconds > 0:
                self._timed += nbytes
                self._seconds += seconds
                self._peak = max(self._peak, nbytes / seconds)

    @property
    def value(self) -> Copies:
        with self._lock:
            return Copies(
                count=self._copies,
                bytes=self._bytes,
                timed_bytes=self._timed,
                seconds=self._seconds,
                peak=self._peak if self._timed else None,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies(Merged):
    """Copies in one direction. Those that run at the same time each count their own seconds."""

    LARGEST = frozenset({"peak"})

    count: int = 0
    bytes: int = 0
    timed_bytes: int = 0  # of the copies whose seconds are known
    seconds: float = 0.0
    peak: float | None = None  # bytes per second of the fastest one

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of one copy on average; None if none was timed."""
        return self.timed_bytes / self.seconds if self.seconds else None
