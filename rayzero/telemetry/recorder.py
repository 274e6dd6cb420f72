"""Records measurements: counters, gauges and histograms by metric and labels, in memory or nowhere.

Code that measures is given a ``Recorder`` and calls it; code that shows the values reads a ``MemoryRecorder`` (for
Prometheus: cluster/processes/process_exporter.py). The metrics are those of ``telemetry/names.py``.

[Note: one writer a cell] Each thread counts in its own cells, which no other thread writes, so a call takes no lock. A
reader adds up the threads' cells; a cell that is written at that moment counts with its old or its new value.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rayzero.telemetry.metric import Kind, Metric
from rayzero.telemetry.names import PARAM_VERSION, STEP_PHASE_SECONDS, STEP_SECONDS, VERSION_LAG
from rayzero.telemetry.spans import Recorded, SpanRing, Spans

Labels = tuple[tuple[str, str], ...]  # sorted by label name
Series = dict[Metric, dict[Labels, float]]
End = Callable[[], None]


class Reading(NamedTuple):
    """A value read at scrape time: of a gauge, or of a counter that is kept outside the recorder."""

    metric: Metric
    value: float
    labels: dict[str, str]


Source = Callable[[], Iterable[Reading]]


class Recorder:
    """Takes measurements from any thread and never blocks; this one keeps none. Those that keep some raise ValueError
    for labels that the metric does not have."""

    spans: Spans = Spans()  # for a trace

    @property
    def process(self) -> Recorder:
        """The recorder of all that the process measures, where this one is of a part."""
        return self

    def add(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Add ``value`` to a counter."""

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Add one value, usually a duration, to a histogram."""

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge."""

    def watch(self, source: Source) -> End:
        """Call ``source`` at every scrape, in the scraping thread, until the returned function is called.

        It must be quick and not wait, and may be called at any moment until then."""
        return lambda: None


NullRecorder = Recorder  # where nothing is to be kept


@dataclass(frozen=True, slots=True)
class Timing:
    """A histogram's values so far, in the metric's unit; all zero if there are none."""

    count: int = 0
    total: float = 0.0
    longest: float = 0.0
    buckets: tuple[int, ...] = ()  # values up to each of the metric's bounds and above the one before, then the rest

    def merged(self, other: Timing) -> Timing:
        """The union of both; associative."""
        longer, shorter = sorted((self.buckets, other.buckets), key=len, reverse=True)
        buckets = tuple(map(sum, zip(longer, shorter, strict=True))) if shorter else longer
        return Timing(self.count + other.count, self.total + other.total, max(self.longest, other.longest), buckets)


_Key = tuple[Any, ...]  # a metric, then its labels as the caller ordered them: pairs of texts
_Cell = list[float]  # a counter: [sum]; a histogram: [count, total, longest, *buckets]


class _Thread(threading.local):
    """The calling thread's cells."""

    def __init__(self, shelf: _Shelf) -> None:
        self.cells: dict[_Key, _Cell] = {}
        shelf.register(self.cells)


class _Shelf:
    """All threads' cells; those of threads that have ended are merged into one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: list[tuple[threading.Thread, dict[_Key, _Cell]]] = []
        self._ended: dict[_Key, _Cell] = {}

    def register(self, cells: dict[_Key, _Cell]) -> None:
        with self._lock:
            self._of.append((threading.current_thread(), cells))

    def read(self) -> Iterator[tuple[_Key, _Cell]]:
        """Every cell; several may have the same key."""
        with self._lock:
            over = [cells for thread, cells in self._of if not thread.is_alive()]
            self._of = [(thread, cells) for thread, cells in self._of if not any(cells is gone for gone in over)]
            for cells in over:
                for key, cell in cells.items():
                    _add_to(self._ended, key, cell)
            alive = [cells for _, cells in self._of]
            found = [(key, list(cell)) for key, cell in self._ended.items()]
        for cells in alive:
            found += [(key, list(cell)) for key, cell in _items(cells)]
        return iter(found)


def _add_to(sums: dict[_Key, _Cell], key: _Key, cell: _Cell) -> None:
    known = sums.get(key)
    if known is None:
        sums[key] = list(cell)
    elif len(cell) == 1:
        known[0] += cell[0]
    else:
        longest = max(known[2], cell[2])
        known[:] = [a + b for a, b in zip(known, cell, strict=True)]
        known[2] = longest


def _items(cells: dict[_Key, _Cell]) -> list[tuple[_Key, _Cell]]:
    """A dict's items while its thread may add some."""
    while True:
        try:
            return list(cells.items())
        except RuntimeError:  # it grew
            continue


class MemoryRecorder(Recorder):
    """Keeps measurements in memory; any thread may write or read. [Note: one writer a cell]

    Knows metrics, labels and sums; not who reads them."""

    def __init__(self) -> None:
        self.spans: SpanRing = SpanRing()
        self._shelf = _Shelf()
        self._mine = _Thread(self._shelf)
        self._gauges: dict[_Key, float] = {}
        self._sources: list[Source] = []
        self._changing = threading.Lock()  # the list of sources

    def add(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        key = (metric, *labels.items())
        try:
            self._mine.cells[key][0] += value
        except KeyError:
            self._mine.cells[_checked(metric, Kind.COUNTER, labels, key)] = [value]

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        key = (metric, *labels.items())
        cells = self._mine.cells
        cell = cells.get(key)
        if cell is None:
            cell = [0.0] * (3 + len(metric.buckets) + 1)
            cells[_checked(metric, Kind.HISTOGRAM, labels, key)] = cell
        cell[3 + bisect_left(metric.buckets, value)] += 1
        cell[0] += 1
        cell[1] += value
        if value > cell[2]:
            cell[2] = value

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        key = (metric, *labels.items())
        if key not in self._gauges:
            _checked(metric, Kind.GAUGE, labels, key)
        self._gauges[key] = value

    def watch(self, source: Source) -> End:
        """See :class:`Recorder`; the returned function does not wait: a call that has begun may outlast it."""
        with self._changing:
            self._sources = [*self._sources, source]

        def end() -> None:
            with self._changing:
                self._sources = [known for known in self._sources if known is not source]

        return end

    # ---- reading

    def total(self, metric: Metric, **labels: str) -> float:
        """Sum of a counter over every series that has all these labels; 0 when there is none."""
        return _sum(self.counters(metric).get(metric, {}), labels)

    def gauge(self, metric: Metric, **labels: str) -> float:
        """Sum of a gauge over every series that has all these labels; 0 when there is none."""
        return _sum(self.gauges().get(metric, {}), labels)

    def timing(self, metric: Metric, **labels: str) -> Timing:
        """The values of a histogram over every series that has all these labels."""
        found, wanted = Timing(), set(labels.items())
        for key, timing in self.timings().get(metric, {}).items():
            found = found.merged(timing) if wanted <= set(key) else found
        return found

    def counters(self, only: Metric | None = None) -> Series:
        """Every counter that was added to (or one): metric -> labels -> sum."""
        found: Series = {}
        for key, cell in self._shelf.read():
            metric, labels = _parts(key)
            if metric.kind is Kind.COUNTER and only in (None, metric):
                series = found.setdefault(metric, {})
                series[labels] = series.get(labels, 0) + cell[0]
        return found

    def timings(self) -> dict[Metric, dict[Labels, Timing]]:
        """Every histogram: metric -> labels -> values."""
        found: dict[Metric, dict[Labels, Timing]] = {}
        for key, cell in self._shelf.read():
            metric, labels = _parts(key)
            if metric.kind is Kind.HISTOGRAM:
                series = found.setdefault(metric, {})
                timing = Timing(int(cell[0]), cell[1], cell[2], tuple(map(int, cell[3:])))
                series[labels] = series.get(labels, Timing()).merged(timing)
        return found

    def gauges(self, *, without: Source | None = None) -> Series:
        """Every gauge that was set, and the sources' present values (their counters too); equal series are added.
        ``without``: a source to leave out."""
        found: Series = {}
        for key, value in list(self._gauges.items()):
            metric, labels = _parts(key)
            found.setdefault(metric, {})[labels] = value
        for source in self._sources:
            for reading in source() if source is not without else ():
                reading.metric.check(reading.labels)
                series, labels = found.setdefault(reading.metric, {}), tuple(sorted(reading.labels.items()))
                series[labels] = series.get(labels, 0) + reading.value
        return found


@dataclass(frozen=True, slots=True)
class Measurements:
    """A copy of a recorder's counters and timings, by the names of ``telemetry/names.py``, and of its spans: a value
    that travels to the driver and into ``run.json``."""

    counters: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    timings: Mapping[str, Mapping[Labels, Timing]] = field(default_factory=dict)
    trace: Recorded | None = None  # where spans were kept all along; not in ``run.json``

    @classmethod
    def of(cls, recorder: MemoryRecorder) -> Measurements:
        return cls(
            {metric.name: series for metric, series in recorder.counters().items()},
            {metric.name: series for metric, series in recorder.timings().items()},
            recorder.spans.recorded() if recorder.spans.kept else None,
        )

    def total(self, metric: Metric, **labels: str) -> float:
        """Sum of a counter over every series that has all these labels; 0 when there is none."""
        return _sum(self.counters.get(metric.name, {}), labels)

    def by_label(self, metric: Metric, label: str) -> dict[str, float]:
        """Sums of a counter by the values of one label."""
        sums: dict[str, float] = {}
        for key, value in self.counters.get(metric.name, {}).items():
            of = dict(key).get(label, "")
            sums[of] = sums.get(of, 0) + value
        return sums

    def to_json(self) -> dict[str, object]:
        """Counters as numbers and timings as {count, total, longest}, by series written as Prometheus does."""
        counts: dict[str, object] = {
            _series(name, key): value for name, found in self.counters.items() for key, value in found.items()
        }
        timings: dict[str, object] = {
            _series(name, key): {"count": timing.count, "total": timing.total, "longest": timing.longest}
            for name, found in self.timings.items()
            for key, timing in found.items()
        }
        return counts | timings


class Since:
    """What a recorder has counted since a moment, which ``restart`` moves to now.

    Knows sums only: the longest of a histogram's values cannot be told apart from those before."""

    def __init__(self, recorder: Recorder) -> None:
        """``recorder``: one that keeps what it takes; of another, nothing is known."""
        self.recorder = recorder if isinstance(recorder, MemoryRecorder) else MemoryRecorder()
        self.restart()

    def restart(self) -> None:
        self._before = self._counts()

    def read(self, *, restart: bool = False) -> Counts:
        """The counts until now. ``restart``: and count from this moment on."""
        now, before = self._counts(), self._before
        if restart:
            self._before = now
        return Counts(
            {
                metric: {key: value - before.get(metric, {}).get(key, 0) for key, value in series.items()}
                for metric, series in now.items()
            }
        )

    def _counts(self) -> Series:
        found = self.recorder.counters()
        for metric, series in self.recorder.timings().items():
            found[metric] = {key: timing.total for key, timing in series.items()}
        return found


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums of counters, and totals of histograms."""

    of: Series

    def total(self, metric: Metric, **labels: str) -> float:
        """The sum over every series that has all these labels; 0 when there is none."""
        return _sum(self.of.get(metric, {}), labels)


def _series(name: str, labels: Labels) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"{name}{{{inside}}}" if inside else name


_OF_THE_FIRST = frozenset({PARAM_VERSION, VERSION_LAG, STEP_SECONDS, STEP_PHASE_SECONDS})


class LaterModelRecorder(Recorder):
    """The recorder of a run's second and later models: passes on what adds up over models, such as bytes,
    counts and waits.

    Values that exist once per run (step, norm, learning rates, step time) are the first prepared model's; it drops them
    here."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self.spans = recorder, recorder.spans

    @property
    def process(self) -> Recorder:
        return self._recorder

    def add(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        self._recorder.add(metric, value, **labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        if metric not in _OF_THE_FIRST:
            self._recorder.observe(metric, value, **labels)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Nothing: a value now is the first model's."""

    def watch(self, source: Source) -> End:
        def added() -> Iterator[Reading]:
            return (reading for reading in source() if reading.metric not in _OF_THE_FIRST)

        return self._recorder.watch(added)


@contextmanager
def timed(
    recorder: Recorder, metric: Metric, *, clock: Callable[[], float] = time.perf_counter, **labels: str
) -> Iterator[None]:
    start = clock()
    try:
        yield
    finally:
        recorder.observe(metric, clock() - start, **labels)


def _checked(metric: Metric, kind: Kind, labels: dict[str, str], key: _Key) -> _Key:
    """``key``, after checking the metric's kind and labels."""
    metric.check(labels)
    if metric.kind is not kind:
        raise ValueError(f"{metric.name} is a {metric.kind}, not a {kind}")
    return key


def _parts(key: _Key) -> tuple[Metric, Labels]:
    metric, *labels = key
    assert isinstance(metric, Metric)
    return metric, tuple(sorted(labels))


def _sum(series: Mapping[Labels, float], labels: Mapping[str, str]) -> float:
    return sum(value for key, value in series.items() if labels.items() <= set(key))
