"""Shards of whole parameters."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.records import parse_record

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
