"""A training on Ray that is killed or rescaled in one run and left alone in another, and what both must have equal."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import rayzero
from rayzero.cluster.files.metrics_log import read_log
from rayzero.engine import full_state_dict, get_context, report

from .tiny import MAX_NORM, batch, make

STEPS = 40


def train(config: Any, before_step: Callable[[int], None] = lambda _: None) -> None:
    """Train to STEPS from wherever this life of the rank begins."""
    context = get_context()
    model, plain = make()
    model, optimizer = rayzero.prepare(model, plain)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    rayzero.track(scheduler=scheduler)
    for step in range(context.step, STEPS):
        before_step(step)
        loss = model(batch(step, context.rank)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        report({"done": step + 1, "loss": loss.item(), "pid": os.getpid()})  # after step(), a death may lose a row
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    weights = full_state_dict(model)
    if context.rank == 0:
        assert context.run_dir is not None
        save_file(weights, Path(context.run_dir) / "weights.safetensors")


def train_undisturbed(folder: Path) -> Path:
    """Train with two ranks and two optimizers. Returns the run's folder."""
    scaling = rayzero.ScalingConfig(num_workers=2, num_optimizers=2, threads_per_worker=1, threads_per_optimizer=1)
    rayzero.ZeroTrainer(
        train, scaling_config=scaling, run_config=rayzero.RunConfig(name="demo", storage_path=str(folder))
    ).fit()
    return folder / "demo"


def same(ours: Path, theirs: Path) -> bool:
    mine, other = load_file(ours / "weights.safetensors"), load_file(theirs / "weights.safetensors")
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def losses(run_dir: Path) -> dict[tuple[int, int], float]:
    return {(row["rank"], row["done"]): row["loss"] for row in read_log(run_dir)}
