"""Keep, offload or recompute by cost."""

from __future__ import annotations

import random
from itertools import product

import pytest

from rayzero.activations.cost import Choice, GroupCost, choose, extra_seconds, held_bytes
from rayzero.lanes.lane import LinkSpeed

K, O, R = Choice.KEEP, Choice.OFFLOAD, Choice.RECOMPUTE  # noqa: E741


def groups(count: int, nbytes: int = 100, **kwargs) -> list[GroupCost]:
    facts = {"forward_s": 1.0, "backward_s": 2.0, "can_recompute": True, "input_bytes": 10} | kwargs
    return [GroupCost(nbytes=nbytes, host_bytes=nbytes, **facts) for _ in range(count)]


def test_keeping_costs_nothing_and_recomputing_costs_its_forward():
    assert extra_seconds(groups(4), [K] * 4, LinkSpeed(to_host=1, to_device=1), 1) == 0
    assert extra_seconds(groups(4), [K, R, K, R], LinkSpeed(to_host=1, to_device=1), 1) == pytest.approx(2)


def test_a_fast_link_hides_all_but_the_last_groups_return():
    link = LinkSpeed(to_host=1000, to_device=1000)  # 0.1 s a group, hidden under 1 s and 2 s
    assert extra_seconds(groups(4), [O, O, O, K], link, 1) == pytest.approx(0)
    assert extra_seconds(groups(4), [O, O, O, O], link, 1) == pytest.approx(0.2)


def test_what_fits_is_kept():
    plan = choose(groups(4), 400, LinkSpeed(to_host=1, to_device=1))
    assert plan.choices == (K,) * 4
    assert (plan.held_bytes, plan.extra_s, plan.fits) == (400, 0, True)


def test_a_fast_link_offloads_the_earliest_and_a_slow_one_recomputes():
    assert choose(groups(4), 200, LinkSpeed(to_host=1000, to_device=1000)).choices == (O, O, K, K)
    slow = choose(groups(4), 220, LinkSpeed(to_host=1, to_device=1)).choices
    assert sorted(choice.value for choice in slow) == ["keep", "keep", "recompute", "recompute"]


def test_a_budget_below_the_least_is_said():
    plan = choose(groups(3, can_recompute=False), -1, LinkSpeed(to_host=1, to_device=1))
    assert plan.choices == (O, O, O)
    assert not plan.fits


def test_against_every_possible_choice():
    rng = random.Random(5)
    for _ in range(60):
        found = [
            GroupCost(
                nbytes=(size := rng.randint(10, 200)), host_bytes=size, forward_s=rng.uniform(0.1, 2),
                backward_s=rng.uniform(0.2, 4), can_recompute=rng.random() < 0.7, input_bytes=rng.randint(0, 10),
            )
            for _ in range(5)
        ]  # fmt: skip
        link = LinkSpeed(to_host=rng.uniform(20, 400), to_device=rng.uniform(20, 400))
        budget = rng.randint(60, 500)
        plan = choose(found, budget, link)
        best = min(
            extra_seconds(found, trial, link, 1)
            for trial in product(Choice, repeat=5)
            if held_bytes(found, trial) <= budget
            and all(c is not R or g.can_recompute for c, g in zip(trial, found, strict=True))
        )
        total = sum(g.forward_s + g.backward_s for g in found)
        assert plan.fits
        assert plan.held_bytes <= budget
        assert plan.extra_s <= best + 0.1 * total  # greedy: within a tenth of the step of the best of 243
