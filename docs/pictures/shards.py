"""Units, shards and owners of the model that ``rayzero train`` trains without arguments: its real layout."""

from __future__ import annotations

import torch

from docs.pictures.svg import Drawing
from rayzero.engine.units.partition import build_layout
from rayzero.layout.model_layout import ModelLayout
from rayzero.layout.shard_map import ShardMap, shard_map_for
from rayzero.quantities import format_bytes
from rayzero.recipes.model import GPT
from rayzero.recipes.recipe import GPTConfig

SHARD_BYTES, OWNERS = 1 << 20, 2
COLOURS = "ab"


def layout() -> tuple[ModelLayout, ShardMap]:
    """The layout of the default model in shards of 1 MiB (the default of 8 MiB would make one shard a unit)."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, seq_len=128, num_layers=4, num_heads=4, dim=256))
    made = build_layout(model, shard_bytes=SHARD_BYTES).layout
    return made, shard_map_for(made, OWNERS, "balanced")


def draw() -> str:
    """A row for each unit, its shards in the colours of their owners."""
    cut, owners = layout()
    made = Drawing(760, 96 + 40 * len(cut.units), "The units of a small GPT, cut into shards that two owners share")
    made.text(10, 24, "unit", "strong")
    made.text(170, 24, "shards of at most 1 MiB of fp32 master, in the colour of their owner", "strong")
    scale = 560 / max(unit.numel for unit in cut.units)
    for row, unit in enumerate(cut.units):
        y = 44 + 40 * row
        made.text(10, y + 19, unit.name or "root", "")
        made.text(158, y + 19, format_bytes(4 * unit.numel), "small soft", "end")
        x = 170.0
        for index, shard in enumerate(cut.shards):
            if cut.units[shard.unit] is unit:
                width = shard.numel * scale
                made.box(x + 1, y, max(width - 2, 2), 28, COLOURS[owners.owners[index]])
                if width > 24:
                    made.text(x + width / 2, y + 18, str(index), "small on", "middle")
                x += width
    y = 64 + 40 * len(cut.units)
    for owner in range(OWNERS):
        held = sum(4 * cut.shards[index].numel for index in owners.shards_of(owner))
        made.box(170 + 300 * owner, y, 14, 14, COLOURS[owner], 3)
        made.text(192 + 300 * owner, y + 12, f"optimizer actor {owner}: {format_bytes(held)} of masters")
    return made.svg()
