"""Who owns which shard: documented vectors, exact cover, and the balance bound for any sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import ConfigError
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.layout.shard_map import POLICIES, RankMapping, ShardMap, resident_bytes, shard_map_for

sizes_lists = st.lists(st.integers(0, 1000), max_size=40)
owner_counts = st.integers(1, 9)
makers = st.sampled_from([ShardMap.round_robin, ShardMap.contiguous, ShardMap.balanced])


def loads(shard_map: ShardMap) -> list[int]:
    return [shard_map.weight_of(owner) for owner in range(shard_map.num_owners)]


# ---- documented vectors -----------------------------------------------------------------------------------------


def test_round_robin_24_over_4() -> None:
    shard_map = ShardMap.round_robin([1] * 24, 4)
    assert [shard_map.owner(i) for i in range(5)] == [0, 1, 2, 3, 0]
    assert shard_map.shards_of(0) == (0, 4, 8, 12, 16, 20)
    assert [shard_map.num_shards_of(owner) for owner in range(4)] == [6] * 4


def test_contiguous_gives_the_first_owners_one_more() -> None:
    assert [ShardMap.contiguous([1] * 24, 4).shards_of(k) for k in range(4)] == [
        tuple(range(6 * k, 6 * k + 6)) for k in range(4)
    ]
    assert [ShardMap.contiguous([1] * 10, 3).num_shards_of(k) for k in range(3)] == [4, 3, 3]
    twelve = ShardMap.contiguous([1] * 12, 3)
    assert [twelve.owner(0), twelve.owner(3), twelve.owner(4)] == [0, 0, 1]


def test_contiguous_is_the_floor_split_of_the_optimizer_shard() -> None:
    for total, world, bounds in [(100, 4, [25, 50, 75, 100]), (10, 3, [4, 7, 10])]:
        shard_map = ShardMap.contiguous([1] * total, world)
        assert [shard_map.shards_of(k)[-1] + 1 for k in range(world)] == bounds
    assert [ShardMap.contiguous([1] * 1003, 7).num_shards_of(k) for k in range(7)] == [144] * 2 + [143] * 5


def test_balanced_counts_bytes_where_counting_items_would_not_balance() -> None:
    sizes = [100, 1, 1, 1, 1, 100]
    assert loads(ShardMap.balanced(sizes, 2)) == [104, 100] or loads(ShardMap.balanced(sizes, 2)) == [100, 104]
    assert loads(ShardMap.contiguous(sizes, 2)) == [102, 102]
    assert loads(ShardMap.round_robin([100, 1] * 3, 2)) == [300, 3]
    assert max(loads(ShardMap.balanced([100, 1] * 3, 2))) <= 201


# ---- any sizes --------------------------------------------------------------------------------------------------


@given(makers, sizes_lists, owner_counts)
def test_every_item_has_one_owner(
    make: Callable[[list[int], int], ShardMap], sizes: list[int], num_owners: int
) -> None:
    shard_map = make(sizes, num_owners)
    owned = [shard_map.shards_of(owner) for owner in range(num_owners)]
    assert all(list(shards) == sorted(shards) for shards in owned)
    assert sorted(i for shards in owned for i in shards) == list(range(len(sizes)))
    assert all(i in shard_map.shards_of(shard_map.owner(i)) for i in range(len(sizes)))
    assert sum(loads(shard_map)) == sum(sizes)


@given(sizes_lists, owner_counts)
def test_balanced_differs_by_at_most_the_largest_item(sizes: list[int], num_owners: int) -> None:
    held = loads(ShardMap.balanced(sizes, num_owners))
    assert max(held) - min(held) <= max(sizes, default=0)


@given(makers, sizes_lists, owner_counts)
def test_the_same_items_give_the_same_map(
    make: Callable[[list[int], int], ShardMap], sizes: list[int], num_owners: int
) -> None:
    assert make(sizes, num_owners) == make(list(sizes), num_owners)


def units_of(shapes: list[tuple[int, bool, torch.dtype]], shard_numel: int) -> ModelLayout:
    units = tuple(
        lay_out_unit(i, f"u{i}", dtype, trainable, [(f"u{i}.w", (numel,))])
        for i, (numel, trainable, dtype) in enumerate(shapes)
    )
    return ModelLayout(units=units, shard_numel=shard_numel)


def whole_units(shapes: list[list[int]], shard_numel: int) -> ModelLayout:
    """Shards of whole parameters, which grow and shrink within a unit."""
    units = tuple(
        lay_out_unit(i, f"u{i}", torch.float32, True, [(f"u{i}.{at}", (numel,)) for at, numel in enumerate(sizes)])
        for i, sizes in enumerate(shapes)
    )
    return ModelLayout(units=units, shard_numel=shard_numel, whole_parameters=True)


whole_layouts = st.builds(
    whole_units, st.lists(st.lists(st.integers(0, 2000), max_size=6), max_size=6), st.sampled_from([64, 128, 512])
)
layouts = st.builds(
    units_of,
    st.lists(
        st.tuples(st.integers(0, 2000), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16])), max_size=12
    ),
    st.sampled_from([64, 128, 512]),
)


@given(layouts, owner_counts)
def test_a_balanced_unit_is_on_as_many_owners_as_it_can_be(layout: ModelLayout, num_owners: int) -> None:
    shard_map = shard_map_for(layout, num_owners, "balanced")
    for shards in layout.shards_by_unit:
        owners = [shard_map.owner(shard.index) for shard in shards]
        assert len(set(owners)) == min(num_owners, len(shards))
        assert num_owners == 1 or all(a != b for a, b in pairwise(owners))


@given(layouts | whole_layouts, owner_counts)
def test_a_balanced_layout_differs_by_at_most_the_largest_shard(layout: ModelLayout, num_owners: int) -> None:
    shard_map = shard_map_for(layout, num_owners, "balanced")
    held = loads(shard_map)
    assert max(held) - min(held) <= max(shard_map.sizes, default=0)


@given(whole_layouts, owner_counts)
def test_a_balanced_unit_of_whole_parameters_is_on_as_many_owners_as_it_can_be(
    layout: ModelLayout, num_owners: int
) -> None:
    shard_map = shard_map_for(layout, num_owners, "balanced")
    for shards in layout.shards_by_unit:
        owners = {shard_map.owner(shard.index) for shard in shards}
        assert len(owners) == min(num_owners, len(shards))


@given(layouts | whole_layouts, owner_counts, st.sampled_from(POLICIES))
def test_the_owner_of_shard_0_is_owner_0(layout: ModelLayout, num_owners: int, policy: str) -> None:
    shard_map = shard_map_for(layout, num_owners, policy)
    assert len(shard_map.owners) == len(layout.shards)
    assert not layout.shards or shard_map.owner(0) == 0


@given(layouts, owner_counts, st.integers(0, 3), st.integers(0, 2), st.sampled_from(POLICIES))
def test_doors_change_nothing_but_numbers(layout: ModelLayout, num: int, doors: int, beside: int, policy: str) -> None:
    given = {"num_device_owners": beside, "offload_fraction": 0.5}
    without = shard_map_for(layout, num + beside, policy, **given)
    shard_map = shard_map_for(layout, num + doors + beside, policy, num_doors=doors, **given)
    assert shard_map.owners == tuple(owner if owner < num else owner + doors for owner in without.owners)
    assert shard_map.num_owners == num + doors + beside


def test_single_shard_units_rotate_over_the_owners() -> None:
    layout = units_of([(64, True, torch.float32)] * 6, 64)
    assert shard_map_for(layout, 4, "balanced").owners == (0, 1, 2, 3, 0, 1)


def test_embedding_and_head_count_by_their_bytes() -> None:
    layout = units_of(
        [(6400, True, torch.float32), *[(640, True, torch.float32)] * 4, (6400, True, torch.float32)], 640
    )
    assert loads(shard_map_for(layout, 2, "balanced")) == [12 * 7680] * 2


def test_resident_bytes_of_an_element_under_adam() -> None:
    def unit(dtype: torch.dtype, trainable: bool, frozen_master: bool = False) -> int:
        return resident_bytes(lay_out_unit(0, "u", dtype, trainable, [], frozen_master=frozen_master))

    assert unit(torch.float32, True) == 12  # the master is what is published
    assert unit(torch.bfloat16, True) == 14
    assert (unit(torch.float32, False), unit(torch.bfloat16, False)) == (4, 2)
    assert unit(torch.bfloat16, False, frozen_master=True) == 6


# ---- edges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ShardMap.round_robin, ShardMap.contiguous, ShardMap.balanced])
def test_edges_are_defined(make: Callable[[list[int], int], ShardMap]) -> None:
    empty = make([], 3)
    assert (empty.owners, empty.shards_of(2), empty.weight_of(2)) == ((), (), 0)
    more_owners = make([5, 5], 4)
    assert sorted(more_owners.num_shards_of(k) for k in range(4)) == [0, 0, 1, 1]
    for wrong in (0, -1):
        with pytest.raises(ConfigError, match="at least 1 owner"):
            make([1], wrong)
    for ask in (more_owners.shards_of, more_owners.weight_of, more_owners.num_shards_of):
        for owner in (4, -1):
            with pytest.raises(ConfigError, match=r"owner must be in 0\.\.3"):
                ask(owner)
    with pytest.raises(ConfigError, match="shard 2 does not exist"):
        more_owners.owner(2)
    with pytest.raises(ConfigError, match="shard -1 does not exist"):
        more_owners.owner(-1)


def test_wrong_tables_and_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.\.1"):
        ShardMap((2,), (1,), 2)
    with pytest.raises(ConfigError, match="1 owner for 2 items"):
        ShardMap((0,), (1, 1), 2)
    with pytest.raises(ConfigError, match=">= 0 bytes"):
        ShardMap((0,), (-1,), 2)
    with pytest.raises(ConfigError, match="'fair' but must be one of balanced, round_robin, contiguous"):
        shard_map_for(units_of([], 64), 2, "fair")


# ---- round-robin ownership as a mapping: the documented vectors, and invariants for any numbers


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
