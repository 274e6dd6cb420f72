"""What is done about memory pressure: the documented table, monotone, and steady while pressure swings."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.config import AutoMemoryStrategy
from rayzero.engine.engine_memory import (
    MARGIN,
    Measures,
    Relief,
    Retry,
    held_pressure,
    held_pressures,
    measures,
    scaled_depth,
)
from rayzero.memory.pressure import Resource

A = AutoMemoryStrategy
ALL = frozenset(Resource)
EVERYWHERE = Relief(collect=ALL, prefetch=ALL, residency=ALL, activations=ALL)
SHARES = st.floats(0, 1)
DEPTH = 16


def at(strategy: AutoMemoryStrategy, pressure: float, relief: Relief = EVERYWHERE) -> Measures:
    return measures(strategy, {Resource.HOST: pressure}, DEPTH, relief)


# ---- the prefetch depth -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "pressure", "depth"),
    [
        (A.OFF, 1.0, 16),
        (A.CONSERVATIVE, 0.9, 16),
        (A.CONSERVATIVE, 1.0, 13),  # a fifth of 16 given up, rounded in favour of prefetching
        (A.BALANCED, 0.75, 16),
        (A.BALANCED, 0.875, 12),
        (A.BALANCED, 1.0, 8),
        (A.AGGRESSIVE, 0.6, 16),
        (A.AGGRESSIVE, 0.64, 15),
        (A.AGGRESSIVE, 0.8, 10),
        (A.AGGRESSIVE, 1.0, 4),
        (A.EXTREME, 0.4, 16),
        (A.EXTREME, 0.7, 8),
        (A.EXTREME, 1.0, 0),
    ],
)
def test_depth_16_under_pressure(strategy: AutoMemoryStrategy, pressure: float, depth: int) -> None:
    assert scaled_depth(16, pressure, strategy) == depth
    assert at(strategy, pressure).depth == depth


@given(st.integers(1, 64), st.floats(0, 2), st.floats(0, 2), st.sampled_from(A))
def test_more_pressure_never_means_more_depth(depth: int, p: float, q: float, strategy: AutoMemoryStrategy) -> None:
    low, high = sorted((p, q))
    assert depth >= scaled_depth(depth, low, strategy) >= scaled_depth(depth, high, strategy) >= 0
    assert strategy is A.EXTREME or scaled_depth(depth, high, strategy) >= 1


# ---- the documented table ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "collect", "residency"),
    [  # above which pressure; the share given up above each
        (A.CONSERVATIVE, 0.75, [(0.85, 0.3)]),
        (A.BALANCED, 0.6, [(0.65, 0.4), (0.8, 0.7)]),
        (A.AGGRESSIVE, 0.5, [(0.5, 0.6), (0.7, 0.9)]),
        (A.EXTREME, 0.3, [(0.3, 0.8), (0.5, 0.95)]),
    ],
)
def test_each_strategy_acts_above_the_documented_pressures(
    strategy: AutoMemoryStrategy, collect: float, residency: list[tuple[float, float]]
) -> None:
    assert not at(strategy, collect).collect
    assert at(strategy, math.nextafter(collect, 1)).collect
    before = 0.0
    for threshold, given_up in residency:
        assert at(strategy, threshold).residency == pytest.approx(1 - before)
        assert at(strategy, math.nextafter(threshold, 1)).residency == pytest.approx(1 - given_up)
        before = given_up
    dearest = [threshold for threshold, _ in residency][1:]
    assert at(strategy, 1.0).activations is bool(dearest)
    assert not any(at(strategy, threshold).activations for threshold in dearest)


@given(SHARES)
def test_off_leaves_everything_as_it_is(pressure: float) -> None:
    assert at(A.OFF, pressure) == Measures(depth=DEPTH)


@given(st.sampled_from(A), st.dictionaries(st.sampled_from(Resource), SHARES), st.data())
def test_more_pressure_never_asks_for_less(strategy: AutoMemoryStrategy, low: dict, data: st.DataObject) -> None:
    high = {one: data.draw(st.floats(share, 1)) for one, share in low.items()}
    for relief in (EVERYWHERE, Relief.of_rank(cuda=True, own_buffers=True), Relief()):
        less, more = (measures(strategy, shares, DEPTH, relief) for shares in (low, high))
        assert more.collect >= less.collect
        assert more.depth <= less.depth
        assert more.residency <= less.residency
        assert more.activations >= less.activations


@given(SHARES, SHARES)
def test_stricter_strategies_ask_for_no_less(p: float, q: float) -> None:
    """In the order of the config; OFF asks for nothing."""
    for less, more in itertools.pairwise(A):
        a, b = at(less, p), at(more, p)
        assert (b.collect >= a.collect, b.depth <= a.depth, b.residency <= a.residency) == (True, True, True)
        assert b.activations >= a.activations


# ---- what helps where -------------------------------------------------------------------------------------------


def asked(resource: Resource, relief: Relief) -> Measures:
    return measures(A.EXTREME, {resource: 1.0}, DEPTH, relief)


def test_an_action_follows_only_resources_that_it_can_empty() -> None:
    cuda, cpu = (Relief.of_rank(cuda=cuda, own_buffers=True) for cuda in (True, False))
    mapped = Relief.of_rank(cuda=False, own_buffers=False)
    nothing, cheap = Measures(depth=DEPTH), Measures(collect=True, depth=0)
    assert asked(Resource.DEVICE, cuda) == Measures(collect=True, depth=0, residency=1 - 0.95, activations=True)
    for host in (Resource.HOST, Resource.CGROUP):
        assert asked(host, cuda) == cheap, "what is gathered lies on the device, and activations would come to the host"
        assert asked(host, cpu) == dataclasses.replace(cheap, residency=1 - 0.95)
        assert asked(host, mapped) == cheap, "what is gathered is the owners' memory"
    for relief in (cuda, cpu, mapped):
        assert asked(Resource.SHM, relief) == nothing, "slabs have the size of the model"
        assert asked(Resource.MAX_CPU, relief) == asked(Resource.MAX_GPU, relief) == cheap


# ---- hysteresis -------------------------------------------------------------------------------------------------


def followed(readings: list[float]) -> list[float]:
    held, found = 0.0, []
    for reading in readings:
        held = held_pressure(held, reading)
        found.append(held)
    return found


@given(st.lists(SHARES, min_size=1))
def test_the_held_pressure_is_never_below_a_reading_and_at_most_the_margin_above_it(readings: list[float]) -> None:
    for held, reading in zip(followed(readings), readings, strict=True):
        assert reading <= held <= reading + MARGIN


@pytest.mark.parametrize("strategy", list(A))
@given(st.floats(0, 1 - MARGIN), st.lists(SHARES, min_size=2, max_size=50))
def test_pressure_that_swings_within_the_margin_changes_an_action_at_most_once(
    strategy: AutoMemoryStrategy, low: float, swings: list[float]
) -> None:
    asked_for = [at(strategy, held) for held in followed([low + MARGIN * swing for swing in swings])]
    for name in ("collect", "activations"):
        values = [getattr(one, name) for one in asked_for]
        assert sum(a != b for a, b in itertools.pairwise(values)) <= 1
        assert values == sorted(values)
    given_up = [(1 - one.residency, -one.depth) for one in asked_for]
    assert given_up == sorted(given_up), "only ever more"


def test_an_action_ends_a_margin_below_where_it_began() -> None:
    held: dict[Resource, float] = {}

    def collects(share: float) -> bool:
        held.update(held_pressures(held, {Resource.HOST: share}))
        return measures(A.BALANCED, held, DEPTH, EVERYWHERE).collect

    assert [collects(share) for share in (0.59, 0.61, 0.59, 0.56, 0.549, 0.59, 0.61)] == [
        *(False, True, True, True, False, False, True)
    ]


def test_a_resource_that_is_gone_is_forgotten() -> None:
    held = held_pressures({}, {Resource.HOST: 0.9, Resource.CGROUP: 0.9})
    assert held_pressures(held, {Resource.HOST: 0.9}).keys() == {Resource.HOST}


# ---- again ------------------------------------------------------------------------------------------------------


def test_what_freed_nothing_is_tried_again_after_a_minute_or_when_pressure_has_risen() -> None:
    retry = Retry()
    assert retry.due(0.0, 0.8)
    retry.done(0.0, helped=False)
    assert [retry.due(now, 0.8) for now in (1.0, 30.0, 59.9, 60.0)] == [False, False, False, True]
    assert retry.due(2.0, 0.85), "a fifth of the room that was left"
    retry.done(3.0, helped=False)
    assert [retry.due(4.0, share) for share in (0.83, 0.5, 0.59, 0.61)] == [False, False, False, True]
    retry.done(5.0, helped=False)
    assert [retry.due(6.0, share) for share in (0.97, 0.98, 0.992)] == [False, False, True], "at least 2 %"


def test_what_does_not_help_is_tried_ever_later_until_it_helps_again() -> None:
    retry, now, waits = Retry(), 0.0, []
    for helped in (False, False, False, True, False, *[False] * 9):
        began = now
        retry.done(now, helped=helped)
        while not retry.due(now, 0.8):
            now += 1.0
        waits.append(now - began)
    assert waits == [60, 120, 240, 60, 60, 120, 240, 480, 960, 1920, 3840, 3840, 3840, 3840]


def test_a_pressure_that_climbs_is_met_before_it_is_full() -> None:
    retry, reading, met = Retry(), 0.5, []
    for second in range(400):
        if retry.due(float(second), reading):
            met.append(reading)
            retry.done(float(second), helped=False)
        reading = min(1.0, reading + 0.01)
    assert len([share for share in met if share < 1]) >= 5
    assert met[1] == pytest.approx(0.62, abs=0.02)


@given(st.floats(0, 1 - 0.02), st.lists(st.floats(0, 0.0199), max_size=60))
def test_pressure_that_stands_is_acted_on_once_a_minute(low: float, swings: list[float]) -> None:
    retry = Retry()
    retry.done(0.0, helped=False)
    assert not any(retry.due(float(second), low + swing) for second, swing in enumerate(swings[:59]))
