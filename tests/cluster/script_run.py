"""A user's script: its training loop is a function of ``__main__``. Run by tests in a process of its own.

``script_run.py STORAGE STEPS [PLACEMENT]``: STEPS steps, or until it is stopped when STEPS is 0; prints JSON lines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
from tiny import tiny_steps

from rayzero.cluster import run_actors
from rayzero.cluster.driver import ZeroTrainer
from rayzero.cluster.run import NAMESPACE, coordinator_name
from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
from rayzero.engine.context import get_context, report


def train_loop(config: dict[str, int]) -> None:
    ctx = get_context()
    try:
        for step, (loss, _, _) in enumerate(tiny_steps()):
            report({"step": step, "loss": loss})
            if step + 1 == config["steps"]:
                return
    finally:
        (Path(str(ctx.run_dir)) / f"ended-{ctx.rank}").write_text("")


def nodes(run: str) -> dict[str, Any]:
    """The Ray nodes of this process and of the run's coordinator, and the role of each by its label."""
    coordinator = ray.get_actor(coordinator_name(run), namespace=NAMESPACE)
    there = ray.get(coordinator.hello.remote(), timeout=60)
    roles = {node["NodeID"]: node["Labels"].get("rayzero.io/role") for node in ray.nodes()}
    return {"driver": ray.get_runtime_context().get_node_id(), "coordinator": there.node, "roles": roles}


def main() -> None:
    run_actors.STOP_S = 60.0  # for loops on a loaded machine to end by themselves
    result = ZeroTrainer(
        train_loop,
        train_loop_config={"steps": int(sys.argv[2])},
        zero_config=ZeroConfig(placement=sys.argv[3] if len(sys.argv) > 3 else "beside_rank"),
        scaling_config=ScalingConfig(num_workers=2, num_optimizers=1, threads_per_worker=1, threads_per_optimizer=1),
        run_config=RunConfig(name="script", storage_path=sys.argv[1]),
        on_start=lambda record: print(json.dumps(nodes(record["run"])), flush=True),
        on_report=lambda one: print(json.dumps({"rank": one.rank, **one.metrics}), flush=True),
    ).fit()
    print(json.dumps({"result": result.metrics, "transfers": result.transfers}), flush=True)


if __name__ == "__main__":
    main()
