"""Stats of ranks: they merge in any grouping, travel as JSON, and print as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import ConfigError
from rayzero.telemetry.stats import (
    Copies,
    CopyTally,
    Durations,
    Freed,
    LayerStats,
    LinkStats,
    PrefetchStats,
    Stats,
    StrategyStats,
    Tally,
)

NUMBERS = st.integers(0, 1 << 30)  # as floats too: their sums are exact, so that grouping cannot show in rounding


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation."""
    if is_dataclass(kind):
        return st.builds(kind, **{name: values(one) for name, one in hints(kind).items()})
    if get_origin(kind) is UnionType:
        return st.none() | values(next(one for one in get_args(kind) if one is not type(None)))
    if get_origin(kind) is Mapping:
        return st.dictionaries(st.sampled_from("abc"), values(get_args(kind)[1]), max_size=3)
    return {int: NUMBERS, float: NUMBERS.map(float), str: st.sampled_from(("balanced", "extreme"))}[kind]


def hints(kind: Any) -> dict[str, Any]:
    found = get_type_hints(kind)
    return {one.name: found[one.name] for one in fields(kind)}


@given(values(Stats), values(Stats), values(Stats))
def test_merging_does_not_depend_on_grouping(a: Stats, b: Stats, c: Stats) -> None:
    assert a.merged(b).merged(c) == a.merged(b.merged(c)) == a.merged(b, c)


@given(values(Stats))
def test_stats_travel_as_json(stats: Stats) -> None:
    assert Stats.from_json(json.loads(json.dumps(stats.to_json()))) == stats


def test_what_is_no_stats_is_refused_in_a_line() -> None:
    whole = Stats().to_json()
    wrong: list[Any] = [None, 3, [1], "{}", json.dumps(whole), {**whole, "more": 1}, {**whole, "steps": 3}]
    for found in wrong:
        with pytest.raises(ConfigError, match=r"from_json\(\) takes the dict that to_json\(\) returned") as said:
            Stats.from_json(found)
        assert "\n" not in str(said.value)
    others: list[Any] = [None, [Stats()], whole, LayerStats()]
    for other in others:
        with pytest.raises(ConfigError, match=r"merged\(\) takes Stats, one argument each, got "):
            Stats().merged(other)


def test_sums_add_up_and_extremes_stay_extremes() -> None:
    a = Durations(count=2, total=3.0, shortest=1.0, longest=2.0)
    b = Durations(count=1, total=0.5, shortest=0.5, longest=0.5)
    assert a.merged(b) == b.merged(a) == Durations(count=3, total=3.5, shortest=0.5, longest=2.0)
    assert a.merged(Durations()) == a
    assert (a.mean, Durations().mean) == (1.5, None)
    merged = Stats(layers={"x": LayerStats(forward=a)}, prefetch=PrefetchStats(depth=3, hits=1, late=1)).merged(
        Stats(layers={"x": LayerStats(forward=b), "y": LayerStats()}, prefetch=PrefetchStats(depth=2, hits=2))
    )
    assert merged.ranks == 2
    assert merged.layers == {"x": LayerStats(forward=a.merged(b)), "y": LayerStats()}
    assert (merged.prefetch.depth, merged.prefetch.hits, merged.prefetch.hit_ratio) == (3, 3, 0.75)
    mixed = StrategyStats(strategy="balanced").merged(StrategyStats(strategy="extreme"))
    assert mixed.strategy == "mixed"


def test_a_copys_speed_and_the_links_share() -> None:
    """The documented vectors: 1000 bytes in 1 s and in 0.1 s."""
    tally = CopyTally()
    assert tally.value == Copies()
    tally.add(1000, 1.0)
    assert tally.value.bandwidth == 1000
    tally.restart()
    tally.add(1000, 0.1)
    assert tally.value.bandwidth == tally.value.peak == 10_000
    tally.add(3000, None)  # a device made it: nobody knows when it ended
    assert tally.value == Copies(count=2, bytes=4000, timed_bytes=1000, seconds=0.1, peak=10_000)
    assert LinkStats(copies=tally.value, limit=40_000).limit_share == 0.25
    assert LinkStats(copies=tally.value).limit_share is None
    assert LinkStats(sent_bytes=2, original_bytes=4).stored_ratio == 0.5


def test_what_was_not_measured_is_none() -> None:
    empty = Stats()
    assert (empty.overlap_ratio, empty.prefetch.hit_ratio, empty.to_host.stored_ratio) == (None, None, None)
    assert (empty.strategy.mean_pressure, empty.to_device.copies.bandwidth, empty.steps.shortest) == (None, None, None)


@pytest.mark.parametrize("seconds", [(2.0,), (2.0, 1.0, 3.0)])
def test_a_tally_is_what_was_added(seconds: tuple[float, ...]) -> None:
    tally = Tally()
    for one in seconds:
        tally.add(one)
    assert tally.value == Durations(count=len(seconds), total=sum(seconds), shortest=min(seconds), longest=max(seconds))
    tally.restart()
    assert tally.value == Durations()


def test_the_table_has_a_row_for_every_layer_and_action() -> None:
    layer = LayerStats(forward=Durations(count=2, total=3.0, shortest=1.0, longest=2.0))
    freed = {"buffers": Freed(count=1, bytes=3 << 20, seconds=0.25)}
    shown = str(Stats(layers={"layers.0": layer, "head": LayerStats()}, strategy=StrategyStats(freed=freed)))
    lines = shown.splitlines()
    row = next(line.split() for line in lines if line.startswith("layers.0"))
    assert row == ["layers.0", "2", "1.5", "s", "1", "s", "2", "s", "0", "-", "-", "-"]
    assert "freed      buffers: 3 MiB in 250 ms (1)" in lines
    assert "None" not in shown
