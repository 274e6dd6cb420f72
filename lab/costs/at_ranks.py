"""Measures how many bytes a parameter all processes of a run hold between two steps, with several ranks on one host.

    python -m lab at_ranks [--ranks 8] [--owners 2] [--precision bf16] [--accumulation 1] [--width 2048] [--layers 24]

Ranks compute next to nothing: one row goes through wide linear layers. Bytes are the processes' shares (PSS) of
anonymous and shared memory, less what they held before any rank built its model, over the model's parameters; at last
once more after ``rayzero.release``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from functools import partial
from threading import Barrier
from typing import get_args

import psutil
import torch
from torch import nn

import rayzero
from lab.bench.figures import at_least_one, resident_bytes
from lab.bench.work import Precision
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

STEPS = 3
GATE_S = 600.0  # after which the others no longer wait for one that has failed
QUIET_S = 1.0  # after which owners have published and ranks have given back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 8), ("owners", 2), ("accumulation", 1), ("width", 2048), ("layers", 24)):
        parser.add_argument(f"--{name}", type=at_least_one, default=default)
    parser.add_argument("--precision", choices=get_args(Precision), default="bf16")
    args = parser.parse_args()
    config = rayzero.ZeroConfig(
        precision=args.precision,
        gradient_accumulation_steps=args.accumulation,
        gpu_param_memory_budget=64 << 20,  # of a rank on a CPU: the windows that it may have open
    )
    with multiprocessing.Manager() as manager:
        gate, held = manager.Barrier(args.ranks + 1, timeout=GATE_S), list[int]()
        watcher = threading.Thread(target=watch, args=(gate, held))
        watcher.start()
        train = partial(take_steps, gate, args.width, args.layers, args.accumulation)
        ranks = run_ranks(train, args.ranks, args.owners, "shm", processes=True, config=config, stall_timeout=600)
        watcher.join()
    count = ranks[0][0]
    owns = [each[1] for each in ranks], [each[2] for each in ranks]
    for when, every, own in zip(("", " once released"), held[1:], owns, strict=True):
        print(
            f"{count / 1e6:.1f}M parameters  {(every - held[0]) / count:.2f} B/param of all processes{when}, "
            f"{sum(own) / len(own) / count:.2f} of each rank"
        )


def watch(gate: Barrier, held: list[int]) -> None:
    """Note what this process and its children hold, each time that all ranks stand at the gate; then let them go on."""
    for pause_s in (0.0, QUIET_S, QUIET_S):
        gate.wait()
        time.sleep(pause_s)
        me = psutil.Process()
        held.append(sum(resident_bytes(each.pid) for each in (me, *me.children(recursive=True))))
        gate.wait()


def take_steps(gate: Barrier, width: int, layers: int, accumulation: int, context: RankContext) -> tuple[int, int, int]:
    """A rank's loop; returns how many parameters its model has, and its own bytes between two steps and once it has
    released what it holds."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // context.world_size))
    stand_at(gate)
    before = resident_bytes(os.getpid())
    model: nn.Module = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    count = sum(each.numel() for each in model.parameters())
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    row = torch.ones(1, width)
    for _ in range(STEPS):
        for _ in range(accumulation):
            model(row).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(row)  # of the last version: all of it is published
    stand_at(gate)
    kept = resident_bytes(os.getpid())
    rayzero.release(model)
    stand_at(gate)
    return count, kept - before, resident_bytes(os.getpid()) - before


def stand_at(gate: Barrier) -> None:
    """Until all are there, and until they have been looked at."""
    gate.wait()
    gate.wait()
