"""Measures what hooks cost: a step of a model with 2,000 parameters in 100 units, against plain PyTorch in one process.

    python -m lab hooks [--sizes 128x64 256x128] [--rounds 7] [--steps 3] [--profile]

There is one rank with the in-process store and all units up; both sides use fused AdamW. They take turns A B A B ...; a
turn is a step that is not timed and ``--steps`` that are. A size is the model's width and the rows of a batch: 128
makes 16.5 million elements, 256 makes 65.8 million. The cost of hooks does not grow with the elements, so every size
has its ratio and its cost for each parameter. There are three ratios to plain PyTorch, each the median over rounds with
the range of the quartiles: of wall time, of the whole process's processor time, owners included, which a loaded machine
disturbs less, and of the training thread's processor time.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.context import RankContext, running_in

UNITS, LINEARS = 100, 10  # 20 parameters a unit
PARAMETERS = 2 * LINEARS * UNITS

Step = Callable[[], None]
Times = tuple[float, float, float]  # seconds a step: wall, process, thread


class Block(nn.Module):
    """Ten small linears with biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(LINEARS))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for linear in self.linears:
            y = torch.relu(linear(y))
        return x + y


class Net(nn.Module):
    """A stack of blocks; each is a unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stepper(width: int, rows: int, *, prepared: bool) -> Step:
    """Build a model and return its training step, plain or with RayZero."""
    torch.manual_seed(0)
    model, x = Net(width), torch.randn(rows, width)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if prepared:
        model, optimizer = rayzero.prepare(model, optimizer)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def turn(step: Step, steps: int) -> Times:
    """Play a turn; returns seconds a step."""
    step()
    before = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(steps):
        step()
    after = time.perf_counter(), time.process_time(), time.thread_time()
    wall, process, thread = ((late - early) / steps for early, late in zip(before, after, strict=True))
    return wall, process, thread


def main() -> None:
    """Run the command: measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=size, default=[(128, 64), (256, 128)], metavar="WIDTHxROWS")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="show where RayZero's training thread spends its time")
    options = parser.parse_args()
    print(f"{UNITS} units, {PARAMETERS:,} parameters, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    with running_in(RankContext()):
        for width, rows in options.sizes:
            contest(width, rows, options.rounds, options.steps, profile=options.profile)


def size(text: str) -> tuple[int, int]:
    """Parse a size such as ``128x64`` into width and rows."""
    width, _, rows = text.partition("x")
    return int(width), int(rows)


def contest(width: int, rows: int, rounds: int, steps: int, *, profile: bool) -> None:
    """Let both sides play at one size, and print the ratios."""
    plain, ours = stepper(width, rows, prepared=False), stepper(width, rows, prepared=True)
    played = [(turn(plain, steps), turn(ours, steps)) for _ in range(rounds)]
    print(f"{width} wide, {rows} rows, {UNITS * LINEARS * (width + 1) * width / 1e6:.1f} M elements")
    for i, what in enumerate(("wall", "process", "thread")):
        base = statistics.median(a[i] for a, _ in played)
        more = statistics.median(b[i] - a[i] for a, b in played) / PARAMETERS
        low, middle, high = statistics.quantiles((b[i] / a[i] for a, b in played), n=4)
        print(
            f"  {what:8s} plain {base * 1e3:7.1f} ms   ours {middle:.2f} times that ({low:.2f}-{high:.2f}), "
            f"{more * 1e6:+.1f} us a parameter"
        )
    if profile:
        with cProfile.Profile() as profiler:
            turn(ours, steps)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
