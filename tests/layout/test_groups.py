"""Layer groups: every unit has one, there are no more than asked for, neighbours share."""

from __future__ import annotations

import pytest
import torch

from rayzero.layout.model_layout import ModelLayout, ParamSlot, UnitLayout, layer_groups


def layout_of(count: int) -> ModelLayout:
    units = tuple(
        UnitLayout(
            index=i,
            name=f"u{i}",
            dtype=torch.float32,
            trainable=True,
            slots=(ParamSlot(name=f"u{i}.w", shape=(64,), start=0),),
        )
        for i in range(count)
    )
    return ModelLayout(units=units, shard_numel=64)


def test_few_units_are_groups_of_their_own() -> None:
    assert layer_groups(layout_of(3).units, 3) == ("u0", "u1", "u2")


def test_neighbours_share_a_group_where_there_are_more() -> None:
    assert layer_groups(layout_of(5).units, 2) == ("u0..u1", "u0..u1", "u2..u4", "u2..u4", "u2..u4")


@pytest.mark.parametrize("count", [64, 65, 100, 1000])
def test_groups_are_as_many_as_allowed_in_order_and_even(count: int) -> None:
    groups = layer_groups(layout_of(count).units, 64)
    sizes = [groups.count(group) for group in dict.fromkeys(groups)]
    assert len(groups) == count
    assert len(sizes) == 64
    assert max(sizes) - min(sizes) <= 1
    assert list(groups) == sorted(groups, key=list(dict.fromkeys(groups)).index)
