"""A user's script whose optimizers move to a node that joins, and back. Run by tests in a process of its own.

``moved_run.py STORAGE``: two ranks and two optimizers train as in compared_run.py, with half of the states on devices.
Before step 2 it waits for a second node, and asks for them there; before step 8 for three beside the ranks, before step
14 for one that is not there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray

import rayzero
from cluster import compared_run
from rayzero.cluster.files.run_record import read_record
from rayzero.elastic.scaling import ScaleRequest, ask


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


def train() -> None:
    context = rayzero.get_context()

    def before(step: int) -> None:
        if context.rank == 0:
            asks(Path(context.run_dir or ""), step)

    compared_run.train(None, before)


def main() -> None:
    storage, _ = sys.argv[1:]
    rayzero.ZeroTrainer(
        train,
        zero_config=rayzero.ZeroConfig(shard_bytes="1KiB", offload_fraction=0.5),
        scaling_config=rayzero.ScalingConfig(
            num_workers=2, num_optimizers=2, threads_per_worker=1, threads_per_optimizer=1
        ),
        run_config=rayzero.RunConfig(name="demo", storage_path=storage),
        on_report=lambda one: print(json.dumps({"rank": one.rank, **one.metrics}), flush=True),
    ).fit()


if __name__ == "__main__":
    main()
