"""A user's script that can be killed and run again. Run by tests in a process of its own.

``killed_run.py STORAGE STEPS SLAB_DIR [resume] [rescale]``: two ranks and two optimizers train to STEPS; prints a JSON
line for each report. "resume": it continues the run. "rescale": it goes on with fewer if it has lost a host.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import rayzero
from cluster.tiny import MAX_NORM, batch, make


def train(config: dict[str, Any]) -> None:
    context = rayzero.get_context()
    model, plain = make()
    model, optimizer = rayzero.prepare(model, plain)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=config["steps"])
    rayzero.track(scheduler=scheduler)
    for step in range(context.step, config["steps"]):
        loss = model(batch(step, context.rank)).square().mean()
        time.sleep(0.05)  # a killed driver's ranks go on until Ray ends them: not to the last step
        loss.backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        mean = rayzero.mean_over_ranks(loss.item())
        rayzero.report({"done": step + 1, "loss": loss.item(), "mean": mean})
        if (step + 1) % 20 == 0:
            rayzero.save_checkpoint(optimizer, Path(config["storage"]) / "demo" / "checkpoints" / f"step-{step + 1}")
    weights = rayzero.full_state_dict(model)
    if context.rank == 0:
        save_file(weights, Path(config["storage"]) / "weights.safetensors")


def main() -> None:
    storage, steps, slab_dir, *more = sys.argv[1:]
    result = rayzero.ZeroTrainer(
        train,
        train_loop_config={"steps": int(steps), "storage": storage},
        zero_config=rayzero.ZeroConfig(slab_dir=slab_dir),
        scaling_config=rayzero.ScalingConfig(
            num_workers=2,
            num_optimizers=2,
            threads_per_worker=1,
            threads_per_optimizer=1,
            placement_timeout=10.0,
            cpus_per_worker=1.0 if "rescale" in more else None,
            cpus_per_optimizer=1.0 if "rescale" in more else None,
            rescale_on_failure="rescale" in more,
        ),
        run_config=rayzero.RunConfig(name="demo", storage_path=storage, resume="resume" in more),
        on_report=lambda one: print(json.dumps({"rank": one.rank, **one.metrics}), flush=True),
    ).fit()
    print(json.dumps({"result": result.metrics}), flush=True)


if __name__ == "__main__":
    main()
