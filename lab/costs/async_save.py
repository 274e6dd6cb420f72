"""What a checkpoint every ten steps costs, written beside the training and waited for.

    python -m lab async_save [--width 1408] [--rows 128] [--ranks 1] [--owners 1] [--rounds 3] [--steps 10]

``--ranks`` and ``--owners`` are processes with one thread each on this host, over shared memory, with default settings.
One training loop takes blocks of ``--steps`` steps: none (no checkpoint), beside (``begin_checkpoint`` after the
block's first step), none, blocking (``save_checkpoint`` there), and so on for ``--rounds`` rounds. A block ends once
its checkpoint is complete, so that nothing of it is in the next block. A ratio is a block over the mean of the two
blocks without a checkpoint around it. "stopped" is what the loop's own call took. Each checkpoint replaces the one
before, in ``--folder``.
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

LAYERS = 16
BYTES_A_PARAMETER = 12  # fp32: the master, which is also what is published, and two moments
WARM_UP = 3  # steps
ROUND = ("none", "beside", "none", "blocking")


@dataclass(frozen=True)
class Block:
    """Some steps, and the checkpoint among them."""

    kind: str
    seconds: float
    stopped: float  # in the call that saves
    tail: float  # from the last step until the checkpoint was complete
    processor: float  # seconds of all ranks and owners, which a loaded machine disturbs less


def processor_seconds() -> float:
    """Of all ranks and owners so far: they are started by one process."""
    times = [process.cpu_times() for process in psutil.Process(os.getppid()).children()]
    return sum(each.user + each.system for each in times)


def train(context: RankContext, settings: argparse.Namespace, folder: Path) -> list[Block]:
    """Every block, as this rank has seen it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(settings.width, settings.width) for _ in range(LAYERS)))
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
    x = torch.randn(settings.rows, settings.width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        float(rayzero.mean_over_ranks(0.0))  # as a loop that logs a loss: ranks go on together

    for _ in range(WARM_UP):
        step()
    blocks = []
    for number, kind in enumerate([*ROUND * settings.rounds, "none"]):
        began, stopped, opened, used = time.perf_counter(), 0.0, None, processor_seconds()
        for index in range(settings.steps):
            step()
            if index or kind == "none":
                continue
            called = time.perf_counter()
            save = rayzero.begin_checkpoint if kind == "beside" else rayzero.save_checkpoint
            opened = save(optimizer, folder / f"step-{number}", keep_last=1)
            stopped = time.perf_counter() - called
        last = time.perf_counter()
        if kind == "beside":
            opened.result()
        ended = time.perf_counter()
        blocks.append(Block(kind, ended - began, stopped, ended - last, processor_seconds() - used))
        if context.rank == 0:
            print(blocks[-1], flush=True)
    return blocks


def table(blocks: list[Block], steps: int) -> str:
    """The result, as markdown."""
    found = [
        "| checkpoint | s a step | over none | processor s a step | over none | the call, s | after the last step, s |",
        "|---|--:|---|--:|---|--:|--:|",
    ]
    for kind in ("none", "beside", "blocking"):
        mine = [block for block in blocks if block.kind == kind]
        seconds, processor, stopped, tail = (
            median(getattr(block, name) for block in mine) for name in ("seconds", "processor", "stopped", "tail")
        )
        wall, used = (over_none(blocks, kind, name) for name in ("seconds", "processor"))
        cells = (f"{seconds / steps:.3f}", wall, f"{processor / steps:.3f}", used, f"{stopped:.3f}", f"{tail:.3f}")
        found.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(found)


def over_none(blocks: list[Block], kind: str, name: str) -> str:
    """Blocks of a kind over the two blocks around each that save nothing: the median and the range."""
    ratios = [
        2 * getattr(block, name) / (getattr(blocks[index - 1], name) + getattr(blocks[index + 1], name))
        for index, block in enumerate(blocks)
        if block.kind == kind != "none"
    ]
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 1408), ("rows", 128), ("ranks", 1), ("owners", 1), ("rounds", 3), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written; default: a temporary folder")
    settings = parser.parse_args()
    states = LAYERS * (settings.width + 1) * settings.width * BYTES_A_PARAMETER
    with tempfile.TemporaryDirectory(dir=settings.folder) as folder:
        one = functools.partial(train, settings=settings, folder=Path(folder))
        ranks = run_ranks(one, settings.ranks, settings.owners, "shm", True, max_failures=1)
    print(
        f"states {states / 1e6:.0f} MB, {settings.ranks} x {settings.owners}, a checkpoint every {settings.steps} steps"
    )
    print(table(ranks[0], settings.steps))
