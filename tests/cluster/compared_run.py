"""A training on Ray that is killed or rescaled in one run and left alone in another, and what both must have equal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import rayzero
from rayzero.cluster.files.metrics_log import read_log
from rayzero.engine import full_state_dict, get_context, report
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

from .processes import until_killed
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


def train_from_checkpoints(config: dict[str, Any]) -> None:
    """Train to ``config["steps"]`` by a loop that tracks nothing: no rank of it can repeat a step alone. Rank 0 keeps
    its weights after each step. ``config``: "saves", the steps after which there is a checkpoint; "kills", those at
    which ``Kills`` kills; "pause", seconds after each step."""
    context = get_context()
    model, plain = make()
    model, optimizer = rayzero.prepare(model, plain)
    folder = Path(context.run_dir or "")
    for step in range(context.step, config["steps"]):
        until_killed(folder, config["kills"], step)
        loss = model(batch(step, context.rank)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        report({"done": step + 1, "loss": loss.item()})
        weights = full_state_dict(model)
        if context.rank == 0:
            save_file(weights, folder / f"weights-{step + 1}.safetensors")
        if step + 1 in config["saves"]:
            rayzero.save_checkpoint(optimizer, folder / "checkpoints" / f"step-{step + 1}")
        time.sleep(config["pause"])


Losses = dict[tuple[int, int], float]  # by rank and number of steps done


@dataclass(frozen=True)
class Undisturbed:
    """What the training comes to that nothing disturbs. It needs no Ray."""

    folder: Path
    losses: Losses


def train_undisturbed(folder: Path) -> Undisturbed:
    """Train with two ranks and two optimizers. Ranks are processes: threads of one share its count of MKL's threads,
    by which products round."""
    first, second = run_ranks(_undisturbed, 2, 2, "shm", True, run_dir=folder)
    return Undisturbed(folder, first | second)


def _undisturbed(context: RankContext) -> Losses:
    train(None)
    return {(context.rank, row["done"]): row["loss"] for row in context.reports}


def same(ours: Path, undisturbed: Undisturbed) -> bool:
    mine, other = (load_file(each / "weights.safetensors") for each in (ours, undisturbed.folder))
    return mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def losses(run_dir: Path) -> Losses:
    return {(row["rank"], row["done"]): row["loss"] for row in read_log(run_dir)}
