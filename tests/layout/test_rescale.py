"""Which shards move when owners come and go: a written-out case, the bound on bytes moved, and balance."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import ConfigError
from rayzero.layout.shard_map import Rescale, ShardMap, rescale
from rayzero.protocol.ownership import Ownership

from .test_shard_map import loads as loads_of

sizes_lists = st.lists(st.integers(0, 1000), max_size=40)
makers = st.sampled_from([ShardMap.round_robin, ShardMap.contiguous, ShardMap.balanced])


def changes(former: int) -> st.SearchStrategy[Rescale]:
    stays = st.lists(st.integers(0, former - 1), unique=True)
    return st.builds(
        lambda kept, new, order: Rescale(tuple(order.sample([*kept, *[None] * new], len(kept) + new))),
        stays,
        st.integers(1, 5),
        st.randoms(use_true_random=False),
    )


@st.composite
def scaled(draw: st.DrawFn) -> tuple[ShardMap, Rescale]:
    """A map that has been rescaled a few times, and one more change."""
    shard_map = draw(makers)(draw(sizes_lists), draw(st.integers(1, 6)))
    for _ in range(draw(st.integers(0, 3))):
        shard_map = rescale(shard_map, draw(changes(shard_map.num_owners)))
    return shard_map, draw(changes(shard_map.num_owners))


def test_two_owners_become_three_and_one_again() -> None:
    two = ShardMap.balanced([10] * 6, 2)
    assert two.owners == (0, 1, 0, 1, 0, 1)
    three = rescale(two, Rescale.to(3, 2))
    assert three.owners == (0, 1, 0, 1, 2, 2)
    assert rescale(three, Rescale((1,))).owners == (0,) * 6
    assert rescale(three, Rescale((2, None))).owners == (1, 1, 0, 1, 0, 0)  # owner 2 stays, as owner 0
    assert rescale(ShardMap.balanced([10] * 5, 2), Rescale.to(3, 2)).owners == (0, 1, 0, 1, 2)  # 20, 20, 10


@given(scaled())
def test_no_more_moves_than_balance_needs(case: tuple[ShardMap, Rescale]) -> None:
    before, change = case
    after = rescale(before, change)
    mean, largest = sum(before.sizes) / len(change.former), max(before.sizes, default=0)
    stays = {owner for owner in change.former if owner is not None}
    moved = sum(
        size
        for size, old, new in zip(before.sizes, before.owners, after.owners, strict=True)
        if change.former[new] != old
    )
    had, loads = loads_of(before), loads_of(after)
    leaving = sum(load for owner, load in enumerate(had) if owner not in stays)
    above = sum(max(0.0, had[owner] - mean) for owner in stays)
    assert moved <= leaving + above + largest * len(stays) + 1e-6
    assert max(loads) - min(loads) <= largest
    assert after.sizes == before.sizes


@given(scaled())
def test_what_is_balanced_stays(case: tuple[ShardMap, Rescale]) -> None:
    balanced = rescale(*case)
    assert rescale(balanced, Rescale.to(balanced.num_owners, balanced.num_owners)) == balanced


def test_owners_on_devices_keep_what_they_have() -> None:
    before = ShardMap((0, 1, 2, 3, 0, 1), (10,) * 6, 4, num_device_owners=2)
    after = rescale(before, Rescale.to(1, 2))
    assert (after.owners, after.num_owners, after.num_device_owners) == ((0, 0, 1, 2, 0, 0), 3, 2)
    assert rescale(after, Rescale.to(2, 1)).owners == (0, 0, 2, 3, 1, 1)


def test_what_is_on_devices_does_not_widen_the_bound_of_the_others() -> None:
    before = ShardMap((0, 0, 0, 0, 2), (10, 10, 10, 10, 1000), 3, num_device_owners=1)
    assert rescale(before, Rescale.to(2, 2)).owners == (0, 0, 1, 1, 2)


@pytest.mark.parametrize(("former", "said"), [((), "at least one"), ((1, 1), "nobody twice"), ((0, 2), "of 2 owners")])
def test_a_change_that_cannot_be_is_refused(former: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rescale(ShardMap.balanced([1, 2, 3], 2), Rescale(former))


def test_doors_get_no_shards() -> None:
    two = replace(ShardMap.balanced([10] * 6, 2), num_owners=3)
    scaled_in = rescale(two, Rescale((0, 1, 2), doors=2))
    assert (scaled_in.owners, scaled_in.num_owners) == ((0,) * 6, 3)  # owner 1 stays as a door
    scaled_out = rescale(scaled_in, Rescale((0, 1)))
    assert scaled_out.owners == (0, 0, 0, 1, 1, 1)  # and gets shards again


def test_doors_stand_before_owners_on_devices() -> None:
    before = ShardMap((0, 1, 3, 4, 0, 1), (10,) * 6, 5, num_device_owners=2)
    after = rescale(before, Rescale((0, 1, None, None), doors=2))
    assert (after.owners, after.num_owners) == ((0, 1, 4, 5, 0, 1), 6)
    assert [after.num_shards_of(owner) for owner in range(6)] == [2, 2, 0, 0, 1, 1]


@pytest.mark.parametrize("doors", [-1, 2])
def test_a_change_to_doors_alone_is_refused(doors: int) -> None:
    with pytest.raises(ConfigError, match=r"of 2 owners, -?[12] cannot be without shards"):
        Rescale((0, 1), doors)


# ---- which owners there are by epoch


CHANGED = Ownership(3, doors=1).then(Rescale((0, None, None, 3), doors=2)).then(Rescale((0, 1)))


def test_doors_are_counted_with_the_owners_of_their_epoch() -> None:
    found = []
    for ownership in (CHANGED.before.before, CHANGED.before, CHANGED):
        found.append((ownership.num_owners, ownership.num_optimizers, list(ownership.door_numbers)))
    assert found == [(3, 2, [2]), (4, 2, [2, 3]), (2, 2, [])]


def test_owners_on_devices_have_numbers_behind_doors() -> None:
    assert CHANGED.before.number_of(3) == 4  # of three owners and a first one on a device
    assert CHANGED.number_of(4) == 2


@pytest.mark.parametrize(
    "ownership", [Ownership(2), Ownership(2).then(Rescale((0, None))), Ownership(3, doors=1), CHANGED]
)
def test_a_record_of_the_owners_says_all(ownership: Ownership) -> None:
    assert Ownership.from_json(json.loads(json.dumps(ownership.to_json()))) == ownership


def test_a_record_from_before_there_were_doors_is_read() -> None:
    assert Ownership.from_json([2, [0, None, 1]]) == Ownership(2).then(Rescale((0, None, 1)))
    assert Ownership(2).then(Rescale((0, None, 1))).to_json() == [2, [0, None, 1]]


@pytest.mark.parametrize(
    "record", [[], [2, [0], {"doors": [0]}], [2, {"doors": ["a"]}], [2, [0, 1], {"doors": [0, "1"]}]]
)
def test_a_damaged_record_is_refused(record: list[object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Ownership.from_json(record)
