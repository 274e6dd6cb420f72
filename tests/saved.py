"""A complete checkpoint of any parameters, without a run that wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from rayzero.checkpoint import (
    checkpoint_name,
    commit_checkpoint,
    owner_file_name,
    staging_path,
    write_rank_state,
    write_tensors,
)
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.protocol.messages import MASTER, ModelSpec


def save_checkpoint(run_dir: Path, step: int, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Zeros of these shapes, by one owner and one rank, as the run in ``run_dir`` would have saved them."""
    directory = run_dir / "checkpoints" / checkpoint_name(step)
    unit = lay_out_unit(0, "model", torch.float32, True, list(shapes.items()))
    layout = ModelLayout(units=(unit,), shard_numel=1 << 20)
    spec = ModelSpec(
        run=run_dir.name,
        layout=layout,
        world_size=1,
        optimizer="torch.optim.adamw:AdamW",
        hyper=({"lr": 1e-3},),
        group_of=(tuple(0 for _ in unit.slots),),
    )
    cuts = {  # a tensor's name -> what it holds
        f"{unit.slots[part.slot].name}/{MASTER}/{part.param_start}": {
            "param": unit.slots[part.slot].name,
            "kind": MASTER,
            "start": part.param_start,
            "stop": part.param_start + part.numel,
            "shape": list(unit.slots[part.slot].shape),
            "step": step,
        }
        for shard in layout.shards
        for part in layout.slices(shard)
    }
    staging = staging_path(directory)
    zeros = {name: torch.zeros(cut["stop"] - cut["start"]) for name, cut in cuts.items()}
    owner = write_tensors(staging, owner_file_name(0), zeros, cuts)
    rank = write_rank_state(staging, 0, {"step": step}, {})
    commit_checkpoint(
        directory, step=step, spec=spec, hyper=spec.hyper, slot_steps={}, owner_files=[owner], rank_files=[rank]
    )
    return directory
