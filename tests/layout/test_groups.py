"""Layer groups: every unit has one, there are no more than asked for, neighbours share."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.layout.model_layout import ModelLayout, ParamSlot, UnitLayout, lay_out_unit, layer_groups
from rayzero.records import parse_record


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


# ---- shards of whole parameters


SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), max_size=8)


@given(SHAPES, st.sampled_from([64, 256, 4096]), st.booleans())
def test_no_shard_cuts_a_trained_parameter(shapes, shard_numel, trainable):
    """Together they are the unit; one that is larger than the others may be has one parameter."""
    unit = lay_out_unit(0, "unit", torch.float32, trainable, [(f"p{i}", shape) for i, shape in enumerate(shapes)])
    layout = ModelLayout(units=(unit,), shard_numel=shard_numel, whole_parameters=True)
    ends = [0, *(shard.stop for shard in layout.shards)]
    assert [shard.start for shard in layout.shards] == ends[:-1]
    assert ends[-1] == unit.numel
    assert all(shard.numel > 0 for shard in layout.shards)
    for shard in layout.shards if trainable else ():
        slices = layout.slices(shard)
        assert all(part.numel == unit.slots[part.slot].numel for part in slices)
        assert shard.numel <= shard_numel or len(slices) == 1
    same = parse_record(json.dumps(layout.to_json()), ModelLayout)
    assert (same.shards, same.digest) == (layout.shards, layout.digest)
