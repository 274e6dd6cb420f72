"""Round-robin ownership: the documented vectors, and invariants for any numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import ConfigError
from rayzero.layout.shard_map import RankMapping


def test_documented_vectors() -> None:
    mapping = RankMapping(1, 4)
    assert [i for i in range(9) if mapping.owns_partition(i)] == [1, 5]
    assert (mapping.get_parameter_owner(5), mapping.get_parameter_owner(8)) == (1, 0)
    assert mapping.owned_partitions(10) == [1, 5, 9]
    assert (mapping.owned_partition_count(10), mapping.owned_partition_count(8)) == (3, 2)
    assert mapping.communication_group([0, 1, 4, 5, 8, 9]) == [0, 1]
    assert mapping.local_to_global_partition(2) == 9
    assert (mapping.global_to_local_partition(9), mapping.global_to_local_partition(8)) == (2, None)
    assert RankMapping(0, 4).owned_partitions(8) == [0, 4]


@given(st.integers(1, 9), st.integers(0, 40))
def test_every_partition_has_one_owner_and_the_maps_are_inverse(world_size: int, total: int) -> None:
    mappings = [RankMapping(rank, world_size) for rank in range(world_size)]
    owned = [mapping.owned_partitions(total) for mapping in mappings]
    assert sorted(i for partitions in owned for i in partitions) == list(range(total))
    for mapping, partitions in zip(mappings, owned, strict=True):
        assert mapping.owned_partition_count(total) == len(partitions)
        assert [mapping.global_to_local_partition(i) for i in partitions] == list(range(len(partitions)))
        assert [mapping.local_to_global_partition(i) for i in range(len(partitions))] == partitions
    assert mappings[0].communication_group(range(total)) == list(range(min(total, world_size)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RankMapping(4, 4),
        lambda: RankMapping(-1, 4),
        lambda: RankMapping(0, 0),
        lambda: RankMapping(0, 2).get_parameter_owner(-1),
        lambda: RankMapping(0, 2).owned_partition_count(-1),
        lambda: RankMapping(0, 2).local_to_global_partition(-1),
    ],
)
def test_out_of_range_is_a_config_error(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"must be"):
        make()
