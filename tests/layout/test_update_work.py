"""What an update costs: by formula, and balanced over the owners."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.layout.shard_map import Rescale, ShardMap, rescale, shard_map_for
from rayzero.protocol.products import newton_schulz, product_ranks, product_work, shard_work

MUON, ADAMW = {"lr": 0.1, "ns_steps": 5}, {"lr": 0.1}


def of(*shapes: tuple[int, ...], whole: bool = True) -> ModelLayout:
    """A unit for each shape, and a vector beside it."""
    units = tuple(
        lay_out_unit(at, f"u{at}", torch.bfloat16, True, [(f"u{at}.w", shape), (f"u{at}.b", (8,))])
        for at, shape in enumerate(shapes)
    )
    return ModelLayout(units=units, shard_numel=1 << 20, whole_parameters=whole)


def test_the_operations_of_an_iteration() -> None:
    """Two products of m x m x n and one of m x m x m, of two operations an element each."""
    assert newton_schulz(3, 7, steps=1) == 2 * (2 * 3 * 3 * 7 + 3**3)
    assert newton_schulz(7, 3, steps=1) == newton_schulz(3, 7, steps=1)
    assert newton_schulz(4096, 4096, steps=5) == 10 * 3 * 4096**3


def test_a_model_of_seven_billion_parameters_takes_what_is_said_of_it() -> None:
    """32 layers of width 4096 and 11008: 6.8e14 operations a step."""
    layer = 4 * newton_schulz(4096, 4096, 5) + 3 * newton_schulz(11008, 4096, 5)
    assert 32 * layer == pytest.approx(6.8e14, rel=0.01)


def test_matrices_cost_their_iterations_and_vectors_their_elements() -> None:
    layout = of((64, 32), (64, 4, 8))
    work = shard_work(layout, [MUON, ADAMW], [(0, 1), (0, 1)])
    each = 100 * (64 * 32 + 8) + newton_schulz(64, 32, 5)
    assert work == [each, each], "a stack counts as a matrix of its first dimension and the rest"
    assert shard_work(layout, [MUON, ADAMW], [(1, 1), (-1, -1)]) == [100 * (64 * 32 + 8), 0]


@pytest.mark.parametrize(("hyper", "whole"), [([ADAMW], True), ([MUON], False)])
def test_bytes_say_what_element_wise_updates_cost(hyper: list[dict[str, float]], whole: bool) -> None:
    assert shard_work(of((64, 32), whole=whole), hyper, [(0, 0)]) is None


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_owners_differ_by_at_most_the_dearest_shard(shapes: list[tuple[int, int]], num_owners: int, later: int) -> None:
    layout = of(*shapes)
    work = shard_work(layout, [MUON, ADAMW], [(0, 1)] * len(shapes))
    assert work is not None

    def check(owned: ShardMap) -> None:
        loads = [owned.weight_of(owner) for owner in range(owned.num_owners)]
        assert max(loads) - min(loads) <= max(work)
        assert sum(loads) == sum(work)

    first = shard_map_for(layout, num_owners, "balanced", work=work)
    check(first)
    check(rescale(first, Rescale.to(later, num_owners)))


def test_dear_matrices_are_spread_though_an_embedding_has_most_bytes() -> None:
    layout = of((1000, 64), *[(64, 64)] * 4)
    groups = [(1, 1), *[(0, 1)] * 4]
    by_work = shard_map_for(layout, 2, "balanced", work=shard_work(layout, [MUON, ADAMW], groups))
    by_bytes = shard_map_for(layout, 2, "balanced")
    assert sorted(by_bytes.num_shards_of(owner) for owner in range(2)) == [1, 4], (
        "the embedding is as large as the rest"
    )
    assert sorted(by_work.num_shards_of(owner) for owner in range(2)) == [2, 3]
    assert by_work.sizes == by_bytes.sizes


def test_products_go_to_the_rank_that_has_least_and_neighbours_to_different_ones() -> None:
    assert product_ranks([5, 0, 5, 5, 5], 2) == {0: 0, 2: 1, 3: 0, 4: 1}
    assert product_ranks([9, 2, 2, 2, 2], 2) == {0: 0, 1: 1, 2: 1, 3: 1, 4: 1}
    assert product_ranks([0, 0], 3) == {}


def test_products_are_the_part_of_the_work_that_is_no_pass_over_memory() -> None:
    layout = of((64, 32))
    hyper, groups = [MUON, ADAMW], [(0, 1)]
    products, work = product_work(layout, hyper, groups), shard_work(layout, hyper, groups)
    assert products == [newton_schulz(64, 32, 5)]
    assert work == [products[0] + 100 * (64 * 32 + 8)]
