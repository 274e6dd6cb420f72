"""Which owners there are by epoch: doors are behind those with shards, and records tell of them."""

from __future__ import annotations

import json

import pytest

from rayzero.layout.rescale import Rescale
from rayzero.protocol.ownership import Ownership

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
