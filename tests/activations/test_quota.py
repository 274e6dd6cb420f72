"""Shares in bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.activations.group import ChunkQuota
from rayzero.activations.policy import OffloadPolicy
from rayzero.errors import ConfigError


def run(policy: OffloadPolicy, groups: list[int], expected: list[int] | None, margin: int = 0) -> list[int]:
    quota = ChunkQuota(policy, expected, margin=margin)
    return [quota.take(nbytes, group=index) for index, nbytes in enumerate(groups)]


@pytest.mark.parametrize(
    ("policy", "groups", "taken"),
    [
        (OffloadPolicy(fraction=0.5), 7, [100, 100, 100, 50, 0, 0, 0]),
        (OffloadPolicy(fraction=0.8), 5, [100, 100, 100, 100, 0]),
        (OffloadPolicy(rank=2, delta_bytes=60), 4, [100, 100, 80, 0]),
    ],
)
def test_the_earliest_bytes_leave(policy: OffloadPolicy, groups: int, taken: list[int]) -> None:
    assert run(policy, [100] * groups, [100] * groups) == taken


@given(st.lists(st.integers(0, 10**9), max_size=20), st.floats(0, 1), st.integers(0, 3), st.integers(0, 3))
def test_the_share_is_exact_to_the_byte_when_the_chunk_is_known(groups, fraction, margin, rank):
    policy = OffloadPolicy(fraction=fraction, rank=rank, delta_bytes=1000)
    taken = run(policy, groups, groups, margin)
    movable = sum(groups[: max(0, len(groups) - margin)])
    assert sum(taken) == max(0, round(fraction * (movable - rank * 1000)))
    assert all(0 <= t <= n for t, n in zip(taken, groups, strict=True))
    assert margin == 0 or not any(taken[len(groups) - margin :])


@given(st.lists(st.integers(1, 10**6), max_size=20), st.floats(0, 1))
def test_an_unknown_chunk_is_never_more_than_one_tensor_off(groups, fraction):
    taken = run(OffloadPolicy(fraction=fraction), groups, None)
    for upto in range(1, len(groups) + 1):
        short = fraction * sum(groups[:upto]) - sum(taken[:upto])
        assert -1 <= short <= max(groups[:upto]) + 1


def test_a_chunk_that_grew_keeps_its_share():
    assert sum(run(OffloadPolicy(fraction=0.5), [100] * 10, [100] * 4)) == 500


@pytest.mark.parametrize(
    "wrong",
    [{"fraction": 1.1}, {"fraction": -0.1}, {"min_bytes": -1}, {"compress": "zip"}, {"max_in_flight": -1},
     {"view_coverage": 0.0}, {"delta_bytes": -5}],
)  # fmt: skip
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        OffloadPolicy(**wrong)
