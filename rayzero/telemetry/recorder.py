"""Where measurements go: counters and timings by name and labels, in memory or nowhere.

Whoever measures gets a ``Recorder`` handed in and calls it; who shows the numbers reads a ``MemoryRecorder``.
Names are those of ``telemetry/names.py``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

Labels = tuple[tuple[str, str], ...]  # sorted by label name


class Recorder(Protocol):
    """Takes measurements from any thread; never fails and never blocks on anything but itself."""

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add ``value`` to the counter ``name`` with these labels."""
        ...

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Note one duration under ``name`` with these labels."""
        ...


class NullRecorder:
    """Takes every measurement and keeps none."""

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Nothing."""

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations noted so far, in seconds; all zero when there are none."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0

    def with_one(self, seconds: float) -> Timing:
        """These and one more."""
        return Timing(self.count + 1, self.total + seconds, max(self.longest, seconds))

    def merged(self, other: Timing) -> Timing:
        """These and those; associative."""
        return Timing(self.count + other.count, self.total + other.total, max(self.longest, other.longest))


class MemoryRecorder:
    """Keeps counters and timings in memory; any thread may write or read.

    Knows names, labels and sums; not what they mean or who reads them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[Labels, float]] = {}
        self._timings: dict[str, dict[Labels, Timing]] = {}

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add ``value`` to the counter ``name`` with these labels."""
        key = _key(labels)
        with self._lock:
            series = self._counters.setdefault(name, {})
            series[key] = series.get(key, 0) + value

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Note one duration under ``name`` with these labels."""
        key = _key(labels)
        with self._lock:
            series = self._timings.setdefault(name, {})
            series[key] = series.get(key, Timing()).with_one(seconds)

    def total(self, name: str, **labels: str) -> float:
        """Sum of the counter ``name`` over every series that has all these labels; 0 when there is none."""
        wanted = set(labels.items())
        with self._lock:
            return sum(value for key, value in self._counters.get(name, {}).items() if wanted <= set(key))

    def timing(self, name: str, **labels: str) -> Timing:
        """The durations under ``name`` over every series that has all these labels."""
        wanted = set(labels.items())
        found = Timing()
        with self._lock:
            for key, timing in self._timings.get(name, {}).items():
                found = found.merged(timing) if wanted <= set(key) else found
        return found

    def counters(self) -> dict[str, dict[Labels, float]]:
        """A copy of every counter: name -> sorted labels -> sum."""
        with self._lock:
            return {name: dict(series) for name, series in self._counters.items()}

    def timings(self) -> dict[str, dict[Labels, Timing]]:
        """A copy of every timing: name -> sorted labels -> durations."""
        with self._lock:
            return {name: dict(series) for name, series in self._timings.items()}


@contextmanager
def timed(
    recorder: Recorder, name: str, *, clock: Callable[[], float] = time.perf_counter, **labels: str
) -> Iterator[None]:
    """Note how long the block took, also when it raises."""
    start = clock()
    try:
        yield
    finally:
        recorder.observe(name, clock() - start, **labels)


def _key(labels: dict[str, str]) -> Labels:
    return tuple(sorted(labels.items()))
