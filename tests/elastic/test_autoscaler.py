"""How many owners the autoscaler wants: written-out histories, and simulated runs with recorded noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayzero.elastic.scaling import Bounds, History, Resize, StepWindow, enough, look

BOUNDS = Bounds(fewest=1, most=8, target_exposed=0.05)
NOISE: list[float] = json.loads((Path(__file__).parent / "step_noise.json").read_text())  # step over median, 600 steps
Machine = Callable[[int], StepWindow]


def looks(machine: Machine, owners: int, times: int, bounds: Bounds = BOUNDS) -> tuple[list[int], list[str]]:
    """The number of owners after each window, and the reasons for changes."""
    history, numbers, reasons = History(), [], []
    for _ in range(times):
        history, resize = look(history, bounds, owners, machine(owners))
        if resize is not None:
            owners = resize.owners
            reasons.append(resize.why)
        numbers.append(owners)
    return numbers, reasons


def hosts(*, work_s: float, hides_s: float, rest_s: float, noise: list[float] | None = None) -> Machine:
    """Each owner has a host of its own: an update takes ``work_s`` / owners, of which ``hides_s`` are hidden."""
    factors = iter(noise or [])

    def window(owners: int) -> StepWindow:
        at = next(factors, 1.0)
        busy = work_s / owners * at
        exposed = max(0.0, busy - hides_s * at)
        return StepWindow(step_s=rest_s * at + exposed, exposed_s=exposed, busy_s=busy)

    return window


def test_it_grows_to_what_hides_the_update_and_stays() -> None:
    numbers, reasons = looks(hosts(work_s=1.0, hides_s=0.25, rest_s=1.0), 1, 40)
    assert numbers == [1] * 4 + [2] * 5 + [4] * 31  # 75 % of the update waited for, then 25 %, then nothing
    assert reasons[0] == "ranks wait 43% of a step for updates, above the target of 5%"


def test_owners_that_share_a_memory_are_taken_back_and_not_tried_again() -> None:
    def one_host(owners: int) -> StepWindow:
        return StepWindow(step_s=1.5, exposed_s=0.5, busy_s=0.75)

    numbers, reasons = looks(one_host, 2, 200)
    assert numbers == [2] * 4 + [4] * 5 + [2] * 191
    assert reasons[1].startswith("4 owners update for 0.75 s a step, 2 did for 0.75 s: they share")


def test_idle_owners_go() -> None:
    numbers, reasons = looks(hosts(work_s=0.4, hides_s=0.3, rest_s=1.0), 8, 40)
    assert numbers == [8] * 4 + [2] * 36  # 0.4 s / 2 are within a quarter of a step
    assert reasons == ["owners update for 5% of a step, and ranks wait for 0.0% of it"]


def test_a_number_that_was_too_few_is_left_alone_longer_each_time() -> None:
    """Hidden by little: what idles in one phase of a training waits in the next."""
    numbers, _ = looks(hosts(work_s=0.24, hides_s=0.1, rest_s=1.0), 2, 1000)
    changes = [at for at, (before, after) in enumerate(pairwise(numbers)) if after < before]
    gaps = [later - earlier for earlier, later in pairwise(changes)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 8 * gaps[0]


@pytest.mark.parametrize(("work_s", "hides_s"), [(0.9, 0.25), (0.3, 0.25), (0.24, 0.3), (4.0, 0.3)])
def test_noise_changes_nothing_once_the_number_is_right(work_s: float, hides_s: float) -> None:
    noise = [sum(NOISE[at : at + 3]) / 3 for at in range(0, len(NOISE) - 3)]  # windows of three steps: far too short
    numbers, _ = looks(hosts(work_s=work_s, hides_s=hides_s, rest_s=1.0, noise=noise), 1, len(noise))
    calm, _ = looks(hosts(work_s=work_s, hides_s=hides_s, rest_s=1.0), 1, len(noise))
    assert numbers[-1] == calm[-1]
    assert sum(before != after for before, after in pairwise(numbers)) <= 3


@given(
    st.floats(0.01, 10),
    st.floats(0.0, 1.0),
    st.floats(0.1, 2.0),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 8),
)
@example(work_s=0.140625, hides_s=0.02, rest_s=0.140625, start=1, fewest=1, more=5)  # 6 -> 4 -> 6 -> 5 -> 6 and again
def test_it_stays_within_its_bounds_and_ends_somewhere(
    work_s: float, hides_s: float, rest_s: float, start: int, fewest: int, more: int
) -> None:
    bounds = Bounds(fewest=fewest, most=fewest + more, target_exposed=0.05)
    start = min(max(start, bounds.fewest), bounds.most)
    numbers, _ = looks(hosts(work_s=work_s, hides_s=hides_s, rest_s=rest_s), start, 3000, bounds)
    assert all(bounds.fewest <= owners <= bounds.most for owners in numbers)
    assert sum(before != after for before, after in pairwise(numbers)) <= 24
    assert sum(before != after for before, after in pairwise(numbers[-600:])) <= 2


@given(st.floats(0.1, 5), st.floats(0.01, 1), st.floats(0.5, 2), st.integers(1, 16))
def test_the_predicted_number_is_the_fewest_that_reaches_the_target(
    work_s: float, hides_s: float, rest_s: float, owners: int
) -> None:
    machine = hosts(work_s=work_s, hides_s=hides_s, rest_s=rest_s)
    if machine(owners).exposed > 0.05:
        wanted = enough(owners, machine(owners), 0.05)
        assert machine(wanted).exposed <= 0.05 + 1e-9
        assert wanted == 1 or machine(wanted - 1).exposed > 0.05 - 1e-9


def test_a_change_is_told_with_its_reason_once() -> None:
    history, window = History(), StepWindow(step_s=1.0, exposed_s=0.2, busy_s=0.5)
    told = []
    for _ in range(5):
        history, resize = look(history, BOUNDS, 2, window)
        told.append(resize)
    assert told == [None] * 4 + [Resize(3, "ranks wait 20% of a step for updates, above the target of 5%")]
