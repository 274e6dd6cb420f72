"""Where the bytes of a model of about 7 billion parameters are, as the planner of a run counts them."""

from __future__ import annotations

import torch

from docs.pictures.svg import Drawing
from rayzero.config import ZeroConfig
from rayzero.engine.units.partition import build_layout
from rayzero.layout.shard_map import shard_map_for
from rayzero.memory.planner import OwnerPlan, plan_owner
from rayzero.recipes.model import GPT
from rayzero.recipes.recipe import GPTConfig

RANKS, OWNERS = 8, 4
GIB = 1 << 30


def plan() -> tuple[int, list[OwnerPlan]]:
    """The model's parameters, and the bytes of each owner, for ranks that share memory with their owners."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=32_000, seq_len=2048, num_layers=32, num_heads=32, dim=4096))
    layout = build_layout(model, compute_dtype=torch.bfloat16).layout
    owners = shard_map_for(layout, OWNERS, "balanced")
    plans = [plan_owner(layout, owners, index, RANKS, 1, splits=True, own_gradients=True) for index in range(OWNERS)]
    return sum(param.numel() for param in model.parameters()), plans


def draw() -> str:
    """A bar for each place: what one GPU would need without sharding, what it holds here, what the owners hold."""
    params, plans = plan()
    parts = {"parameters": (2, "a"), "gradients": (2, "d"), "masters": (4, "b"), "moments": (8, "c")}
    whole = [(name, params * size, kind) for name, (size, kind) in parts.items()]
    here = [("gathered parameters", ZeroConfig().gpu_param_memory_budget, "a")]
    kept = [
        ("parameters", sum(one.params for one in plans), "a"),
        ("gradients", sum(one.gradients for one in plans), "d"),
        ("masters", sum(one.master for one in plans), "b"),
        ("moments", sum(one.moments for one in plans), "c"),
    ]
    made = Drawing(760, 282, "Bytes of a model of seven billion parameters by place")
    made.text(
        10, 22, f"GPT of {params / 1e9:.2f} billion parameters in bf16, AdamW, {RANKS} ranks, {OWNERS} owners", "strong"
    )
    rows = (
        ("each GPU, nothing sharded", whole),
        ("each GPU here, at most", here),
        (f"host memory of {OWNERS} owners, together", kept),
    )
    scale = 720 / max(sum(size for _, size, _ in row) for _, row in rows)
    for number, (title, row) in enumerate(rows):
        y, x = 48 + 70 * number, 10.0
        made.text(10, y + 12, f"{title}: {sum(size for _, size, _ in row) / GIB:,.1f} GiB")
        for _, size, kind in row:
            made.box(x, y + 22, max(size * scale - 1, 2), 26, kind, 2)
            if size * scale > 40:
                made.text(x + size * scale / 2, y + 39, f"{size / GIB:,.1f}", "small on", "middle")
            x += size * scale
    for place, (name, (_, kind)) in enumerate(parts.items()):
        made.box(10 + 130 * place, 258, 12, 12, kind, 2)
        made.text(28 + 130 * place, 269, name, "small")
    made.text(530, 269, "activations and gradients on their way", "small soft")
    return made.svg()
