"""Counters, gauges and histograms by metric and labels, exact under threads; what is not named is refused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import rayzero
from rayzero.telemetry import names as all_names
from rayzero.telemetry.metric import Kind, Metric, Role
from rayzero.telemetry.names import METRICS, TARGET_LABELS
from rayzero.telemetry.recorder import MemoryRecorder, Reading, Timing, timed

BYTES = Metric(
    name="bytes", kind=Kind.COUNTER, unit="bytes", help="Some.", roles=(Role.RANK,), labels=("direction", "transport")
)
PLAIN = Metric(name="n", kind=Kind.COUNTER, unit="calls", help="Some.", roles=(Role.RANK,))
WAIT = Metric(
    name="wait",
    kind=Kind.HISTOGRAM,
    unit="s",
    help="Some.",
    roles=(Role.RANK,),
    labels=("rank",),
    buckets=(1.0, 2.0),
)
LEVEL = Metric(name="level", kind=Kind.GAUGE, unit="bytes", help="Some.", roles=(Role.RANK,), labels=("kind",))


def test_totals_sum_over_every_label_not_asked_for() -> None:
    recorder = MemoryRecorder()
    recorder.add(BYTES, 3, direction="fetch", transport="grpc")
    recorder.add(BYTES, 4, transport="inproc", direction="fetch")
    recorder.add(BYTES, 5, direction="push", transport="grpc")
    recorder.add(BYTES, 1, transport="grpc", direction="push")  # in another order: the same series
    assert recorder.total(BYTES) == 13
    assert recorder.total(BYTES, direction="fetch") == 7
    assert recorder.total(BYTES, transport="grpc", direction="push") == 6
    assert recorder.total(BYTES, direction="load") == recorder.total(PLAIN) == 0
    assert recorder.counters()[BYTES][(("direction", "push"), ("transport", "grpc"))] == 6
    assert len(recorder.counters()[BYTES]) == 3


def test_histograms_keep_count_sum_longest_and_buckets() -> None:
    recorder = MemoryRecorder()
    for seconds, rank in [(1.0, "0"), (3.0, "0"), (1.5, "1")]:
        recorder.observe(WAIT, seconds, rank=rank)
    assert recorder.timing(WAIT) == Timing(3, 5.5, 3.0, (1, 1, 1))
    assert recorder.timing(WAIT, rank="0") == Timing(2, 4.0, 3.0, (1, 0, 1))
    assert recorder.timing(WAIT, rank="2") == Timing()
    assert recorder.timings()[WAIT][(("rank", "1"),)] == Timing(1, 1.5, 1.5, (0, 1, 0))


def test_a_gauge_is_what_was_said_last_and_sources_are_asked_when_somebody_looks() -> None:
    recorder = MemoryRecorder()
    recorder.set(LEVEL, 5, kind="a")
    recorder.set(LEVEL, 7, kind="a")
    level = [1.0]
    end = recorder.watch(lambda: [Reading(LEVEL, level[0], {"kind": "b"})])
    other = recorder.watch(lambda: [Reading(LEVEL, 10, {"kind": "b"})])
    assert recorder.gauge(LEVEL) == 18
    level[0] = 2.0
    assert recorder.gauges() == {LEVEL: {(("kind", "a"),): 7, (("kind", "b"),): 12}}
    end()
    end()
    assert recorder.gauge(LEVEL, kind="b") == 10
    other()
    assert recorder.gauge(LEVEL) == 7


def test_threads_lose_nothing_also_when_they_have_ended() -> None:
    recorder = MemoryRecorder()

    def count() -> None:
        for _ in range(2000):
            recorder.add(PLAIN)
            recorder.observe(WAIT, 0.5, rank="0")

    for _ in range(2):
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert recorder.total(PLAIN) <= 16000
        for thread in threads:
            thread.join(30)
    assert recorder.total(PLAIN) == 16000
    assert recorder.timing(WAIT) == Timing(16000, 8000.0, 0.5, (16000, 0, 0))
    assert recorder.total(PLAIN) == 16000, "reading changes nothing"


def test_a_timed_block_is_noted_also_when_it_raises() -> None:
    recorder = MemoryRecorder()
    ticks = iter([10.0, 12.5])

    def fail() -> None:
        with timed(recorder, WAIT, clock=lambda: next(ticks), rank="1"):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert recorder.timing(WAIT, rank="1") == Timing(1, 2.5, 2.5, (0, 0, 1))


def test_other_labels_or_another_kind_than_the_metric_has_are_refused() -> None:
    recorder = MemoryRecorder()
    with pytest.raises(ValueError, match=r"bytes has labels \['direction', 'transport'\], got \['direction'\]"):
        recorder.add(BYTES, 1, direction="fetch")
    with pytest.raises(ValueError, match="n has labels"):
        recorder.add(PLAIN, 1, rank="0")
    with pytest.raises(ValueError, match="n is a counter, not a gauge"):
        recorder.set(PLAIN, 1)
    with pytest.raises(ValueError, match="level is a gauge, not a histogram"):
        recorder.observe(LEVEL, 1, kind="a")
    recorder.watch(lambda: [Reading(LEVEL, 1, {})])
    with pytest.raises(ValueError, match="level has labels"):
        recorder.gauges()
    assert recorder.counters() == recorder.timings() == {}


def test_names_follow_the_rules() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 50
    for metric in METRICS:
        assert metric.name.startswith("rayzero_")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.help.endswith("."), metric.name
        assert metric.roles, metric.name
        assert not set(metric.labels) & set(TARGET_LABELS), f"{metric.name}: discovery adds these"
        unit = {"s": "_seconds", "unix s": "_timestamp_seconds", "bytes": "_bytes"}.get(metric.unit, "")
        assert unit in metric.name, metric.name


def test_every_metric_is_named_in_names_and_fed_by_somebody_else() -> None:
    """No metric is made elsewhere, and none is there that no code outside ``names.py`` mentions."""
    root = Path(rayzero.__file__).parent
    sources = {path: path.read_text() for path in root.rglob("*.py")}
    makers = {path.name for path, text in sources.items() if " Metric(" in text or "partial(Metric" in text}
    assert makers == {"names.py"}
    names = {id(value): name for name, value in vars(all_names).items() if isinstance(value, Metric)}
    elsewhere = "\n".join(text for path, text in sources.items() if path.name != "names.py")
    assert [names[id(metric)] for metric in METRICS if names[id(metric)] not in elsewhere] == []
