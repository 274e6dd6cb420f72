"""A fit of Ray Train: two workers on a host without an owner, whose door the first of them kills. Run on the head's
host by test_ray_train.py (argument: a folder that all hosts share)."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store.owner.memory.slabs import is_control

WORKERS, STEPS = 2, 8
KILL, SAVE, WAIT = 2, 4, 5  # before these steps: the door is killed, a checkpoint saved, the test waited for


def train(context: RankContext, folder: Path | None = None) -> dict[str, torch.Tensor]:
    """The loop, as it is without Ray Train if there is no folder. Returns the last weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 1))
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), ZeroConfig())
    for step in range(context.step, STEPS):
        if folder is not None:
            reach(step, context, optimizer, folder)
        torch.manual_seed(1000 * step + context.rank)
        inputs = torch.randn(8, 16)
        (model(inputs) - inputs[:, :1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return rayzero.full_state_dict(model)


def reach(step: int, context: RankContext, optimizer: Any, folder: Path) -> None:
    """What happens before a step."""
    from ray.train import Checkpoint, report

    killed = folder / "killed"
    if step == KILL and context.rank == 0 and not killed.exists():
        [door] = owners_here()
        dead = owners_here()[door]
        killed.write_text(str(door))
        os.kill(dead, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while owners_here().get(door, dead) == dead:
            assert time.monotonic() < deadline, "no process has taken the place of the door"
            time.sleep(0.01)
    if step == SAVE:
        saved = rayzero.save_checkpoint(optimizer, folder / f"saved-{platform.node()}").path
        report({"step": step}, checkpoint=None if context.rank else Checkpoint.from_directory(saved))
    if step == WAIT:
        if context.rank == 0:
            there = folder / f"{platform.node()}.json"
            there.with_suffix(".part").write_text(json.dumps(sorted(owners_here())))
            there.with_suffix(".part").rename(there)
        while not (folder / "go").exists():
            time.sleep(0.05)


def owners_here() -> dict[int, int]:
    """The process ids of this host's owners, by number."""
    found = [slab.header for slab in list_slabs(SHARED_MEMORY) if slab.header is not None]
    return {each.facts.index: each.pid for each in found if is_control(each.facts, 0)}


def worker(config: dict[str, Any]) -> None:
    from ray.train import get_checkpoint

    saved, folder = get_checkpoint(), Path(config["folder"])
    with config["owners"].rank(resume=None if saved is None else saved.path) as context:
        weights = train(context, folder)
        if context.rank == 0:
            torch.save(weights, folder / "weights.pt")


def main(folder: str) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from rayzero.integrations.ray_train import optimizer_actors

    with optimizer_actors(cpus_per_optimizer=3) as owners:  # only the head's host has so many
        TorchTrainer(
            worker,
            train_loop_config={"owners": owners, "folder": folder},
            scaling_config=ScalingConfig(
                num_workers=WORKERS, resources_per_worker={"CPU": 1}, placement_strategy="STRICT_PACK"
            ),
            run_config=RunConfig(name="fit", storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
