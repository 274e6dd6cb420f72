"""Counts whose bytes units are made of, where ranks of a host bring them up together (zero.host_gather).

    python -m lab host_gather [--ranks 2 3 4] [--layers 6] [--width 512] [--steps 4]

Ranks are processes on the CPU, which gather over gloo; two owners share memory with them, and the budget holds a third
of the model, so that every unit comes up in forward and most again in backward. ``own``: MiB that each rank has copied
of what was gathered; ``ranks``: of the other ranks; ``whole``: copied alone. ``copied``: own and whole, over what it
copies without host_gather. Says nothing about speed: there is no link between host and device here.
"""

from __future__ import annotations

import argparse
import functools
import json
from typing import Any

import torch
from torch import nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.telemetry.names import HOST_GATHER_BYTES
from rayzero.testing import run_ranks

MIB = 1 << 20


def train(context: RankContext, layers: int, width: int, steps: int, budget: int) -> dict[str, float]:
    """Train some steps; returns MiB by source."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    config = rayzero.ZeroConfig(host_gather=True, gpu_param_memory_budget=budget, prefetch_buffer_size=1)
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()), config)
    for _ in range(steps):
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder: Any = context.recorder
    return {each: recorder.total(HOST_GATHER_BYTES, source=each) / MIB for each in ("own", "ranks", "whole")}


def main() -> None:
    """Print a line of JSON for each rank of each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    for name, default in (("layers", 6), ("width", 512), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    unit = 4 * given.width * (given.width + 1)
    loop = functools.partial(
        train, layers=given.layers, width=given.width, steps=given.steps, budget=unit * max(3, given.layers // 3)
    )
    for ranks in given.ranks:
        for rank, found in enumerate(run_ranks(loop, ranks, 2, "shm", processes=True)):
            copied = (found["own"] + found["whole"]) / sum(found.values())
            sizes = {source: round(size, 2) for source, size in found.items()}
            print(json.dumps({"of": ranks, "rank": rank, **sizes, "copied": round(copied, 3)}), flush=True)
