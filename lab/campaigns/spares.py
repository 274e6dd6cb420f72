"""Measures how long an optimizer actor's replacement takes on Ray, without and with a warm spare.

python -m lab spares [KILLS]
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

import rayzero
from rayzero.cluster.files.run_record import read_record

SETTLED_S = 4.0  # between a recovery and the next death


class Enough(Exception):
    """Every death has been outlived."""


def train() -> None:
    """Train until the run is ended."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    model, optimizer = rayzero.prepare(plain, torch.optim.AdamW(plain.parameters()))
    rayzero.track()
    while True:
        model(torch.ones(4, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rayzero.report({})
        time.sleep(0.1)


class Kills:
    """Kills optimizer 1 again and again, once the last death is over and a spare is up, if there is to be one."""

    def __init__(self, run_dir: Path, kills: int, warm: int) -> None:
        self._run_dir, self._kills, self._warm = run_dir, kills, warm
        self._killed = 0

    def __call__(self, one: Any) -> None:
        record = read_record(self._run_dir)
        assert record is not None
        done = record["recoveries"]
        if len(done) == self._kills:
            raise Enough
        quiet = not done or time.time() - done[-1]["time"] > SETTLED_S
        if one.step > 5 and len(done) == self._killed and quiet and len(record["spares"]) == self._warm:
            self._killed += 1
            os.kill(next(m["pid"] for m in record["members"] if m["who"] == "optimizer 1"), signal.SIGKILL)


def measure(kills: int, warm: int) -> list[dict[str, Any]]:
    """The recoveries of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run = rayzero.RunConfig(name="spares", storage_path=folder, max_failures=kills, warm_spares=warm)
        scaling = rayzero.ScalingConfig(num_workers=2, num_optimizers=2, threads_per_worker=1, threads_per_optimizer=1)
        killing = Kills(run.path, kills, warm)
        trainer = rayzero.ZeroTrainer(train, scaling_config=scaling, run_config=run, on_report=killing)
        try:
            trainer.fit()
        except Enough:
            record = read_record(run.path)
            assert record is not None
            found: list[dict[str, Any]] = record["recoveries"]
            return found
    raise AssertionError("the run has ended by itself")


def main() -> None:
    """Print the seconds of each recovery."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level=logging.ERROR)
    for warm in (0, 1):
        found = measure(kills, warm)
        seconds = sorted(one["seconds"] for one in found)
        phases = {name: median(one["phases"][name] for one in found) for name in ("detect", "start", "re-form")}
        print(f"warm_spares={warm}: {', '.join(f'{each:.2f}' for each in seconds)} s; median of phases: ", end="")
        print(", ".join(f"{name} {each:.2f}" for name, each in phases.items()))
