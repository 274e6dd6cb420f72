"""Simulated time: works alone, works that share, and what is conserved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation.fluid import Fluid, Line


def ends(capacities, works, resolution=0.0):
    """When each work ends. ``works``: (seconds, demands), all begun at 0."""
    fluid = Fluid(capacities, resolution=resolution)
    found = {}
    for i, (seconds, demands) in enumerate(works):
        fluid.work(seconds, demands, lambda i=i: found.setdefault(i, fluid.now))
    fluid.run()
    return [found[i] for i in range(len(works))], fluid


def test_work_alone_takes_its_seconds() -> None:
    assert ends([10.0], [(3.0, [(0, 10.0)])])[0] == [3.0]
    assert ends([10.0], [(3.0, [])])[0] == [3.0]


def test_work_that_wants_twice_what_there_is_takes_twice_as_long() -> None:
    assert ends([10.0], [(3.0, [(0, 20.0)])])[0] == [6.0]


def test_two_works_share_a_resource_until_the_shorter_one_ends() -> None:
    found, _ = ends([10.0], [(1.0, [(0, 10.0)]), (3.0, [(0, 10.0)])])
    assert found == pytest.approx([2.0, 4.0]), "half speed for 2 s; the longer one has 2 s left and then all of it"


def test_two_threads_get_twice_what_one_gets() -> None:
    """3 cores wanted, 2 there: each of the works runs at two thirds."""
    found, _ = ends([2.0], [(2.0, [(0, 2.0)]), (2.0, [(0, 1.0)])])
    assert found == pytest.approx([3.0, 3.0])


def test_what_a_slowed_work_leaves_goes_to_others() -> None:
    """The first two share resource 0 and so run at half; of resource 1 the second takes 4 then, and the third has 6."""
    works = [(1.0, [(0, 10.0)]), (1.0, [(0, 10.0), (1, 8.0)]), (1.0, [(1, 10.0)])]
    found, _ = ends([10.0, 10.0], works)
    assert found[0] == found[1] == pytest.approx(2.0)
    assert found[2] == pytest.approx(1 / 0.6)


def test_what_happens_at_one_moment_happens_in_the_order_of_the_calls() -> None:
    fluid, seen = Fluid([1.0]), []
    for i in (2, 0, 1):
        fluid.after(1.0, lambda i=i: seen.append(i))
    fluid.run()
    assert seen == [2, 0, 1]


def test_a_line_does_one_work_after_another() -> None:
    fluid, seen = Fluid([2.0]), []
    line = Line(fluid)
    for seconds in (1.0, 2.0, 0.0):
        line.add(seconds, [(0, 1.0)], lambda: seen.append(fluid.now))
    fluid.run()
    assert seen == [1.0, 3.0, 3.0]
    assert line.seconds == 3.0


def test_within_the_resolution_works_end_together_and_all_is_counted() -> None:
    works = [(1.0 + i * 1e-6, [(0, 1.0)]) for i in range(100)]
    exact, coarse = ends([1e3], works), ends([1e3], works, resolution=1e-3)
    assert max(coarse[0]) <= max(exact[0])
    assert max(coarse[0]) >= max(exact[0]) - 1e-3
    assert coarse[1].used[0] == pytest.approx(exact[1].used[0])
    assert len(set(coarse[0])) == 1


WORKS = st.lists(
    st.tuples(
        st.floats(0.01, 10),
        st.lists(st.tuples(st.integers(0, 2), st.floats(0.1, 20)), max_size=3, unique_by=lambda d: d[0]),
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(WORKS)
def test_what_is_used_is_what_was_asked_for_and_never_faster_than_there_is(works) -> None:
    capacities = [5.0, 10.0, 20.0]
    found, fluid = ends(capacities, works)
    for resource, capacity in enumerate(capacities):
        asked = sum(seconds * amount for seconds, demands in works for which, amount in demands if which == resource)
        assert fluid.used[resource] == pytest.approx(asked, rel=1e-6, abs=1e-9)
        assert max(found) >= asked / capacity * (1 - 1e-6)
    assert all(end >= seconds * (1 - 1e-6) for end, (seconds, _) in zip(found, works, strict=True))


@settings(deadline=None)
@given(WORKS)
def test_somebody_runs_at_full_speed_or_a_resource_of_his_is_exhausted(works) -> None:
    fluid = Fluid([5.0, 10.0, 20.0])
    for seconds, demands in works:
        fluid.work(seconds, demands, lambda: None)
    fluid._share()
    speed = fluid._speed[:64]
    taken = [0.0, 0.0, 0.0]
    for row, (_, demands) in zip(sorted(fluid._running), works, strict=True):
        for which, amount in demands:
            taken[which] += speed[row] * amount
    for row, (_, demands) in zip(sorted(fluid._running), works, strict=True):
        full = any(taken[which] >= [5.0, 10.0, 20.0][which] * (1 - 1e-6) for which, _ in demands)
        assert speed[row] == 1.0 or full
