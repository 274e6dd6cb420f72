"""A user's script whose optimizers move to a node that joins, and back. Run by tests in a process of its own.

``moved_run.py STORAGE STEPS``: two ranks and two optimizers, with half of the states. Before step 2 it waits for a
second node, and asks for them there; before step 8 for three beside the ranks, before step 14 for one that is not
there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import save_file
from tiny import MAX_NORM, batch, make

import rayzero
from rayzero.cluster.files.run_record import read_record
from rayzero.elastic.requests import ScaleRequest, ask


def asks(run_dir: Path, step: int) -> None:
    """Ask for the next change, and wait for what comes of the one before it."""
    here = ray.get_runtime_context().get_node_id()
    wanted = {
        2: ScaleRequest(num_optimizers=2, placement="cpu_nodes"),
        8: ScaleRequest(num_optimizers=3, placement="beside_rank"),
        14: ScaleRequest(num_optimizers=1, avoid=(here,)),
    }
    if step == 2:
        until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2)
    if step in wanted:
        ask(run_dir, wanted[step])
    until(lambda: len(read_record(run_dir)["rescales"]) >= sum(step >= at + 4 for at in wanted))


def until(there: Any) -> None:
    deadline = time.monotonic() + 100
    while not there():
        assert time.monotonic() < deadline, "nothing came of a request"
        time.sleep(0.05)


def train(config: dict[str, Any]) -> None:
    context = rayzero.get_context()
    model, plain = make()
    model, optimizer = rayzero.prepare(model, plain)
    rayzero.track()
    for step in range(context.step, config["steps"]):
        if context.rank == 0:
            asks(Path(context.run_dir or ""), step)
        model(batch(step, context.rank)).square().mean().backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        rayzero.report({"done": step + 1})
    weights = rayzero.full_state_dict(model)
    if context.rank == 0:
        save_file(weights, Path(config["storage"]) / "weights.safetensors")


def main() -> None:
    storage, steps = sys.argv[1:]
    rayzero.ZeroTrainer(
        train,
        train_loop_config={"steps": int(steps), "storage": storage},
        zero_config=rayzero.ZeroConfig(shard_bytes="1KiB", offload_fraction=0.5),
        scaling_config=rayzero.ScalingConfig(
            num_workers=2, num_optimizers=2, threads_per_worker=1, threads_per_optimizer=1
        ),
        run_config=rayzero.RunConfig(name="demo", storage_path=storage),
        on_report=lambda one: print(json.dumps({"rank": one.rank, **one.metrics}), flush=True),
    ).fit()


if __name__ == "__main__":
    main()
