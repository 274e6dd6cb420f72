"""What hooks cost: a step of a model with 2,000 parameters in 100 units beside plain PyTorch's, in one process.

    python benchmarks/hooks.py [--width 128] [--rows 64] [--rounds 7] [--steps 3] [--profile]

One rank, the in-process store, all units up; fused AdamW on both sides. Both take turns A B A B ...; a turn is a step
that is not timed and ``--steps`` that are. Three ratios to plain, each the median over rounds: wall time; processor
time of the whole process, owners included, which a loaded machine disturbs less; and that of the training thread.
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
    """Blocks, one unit each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stepper(width: int, rows: int, *, prepared: bool) -> Step:
    """One training step, plain or under RayZero."""
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
    """Play one turn."""
    step()
    before = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(steps):
        step()
    after = time.perf_counter(), time.process_time(), time.thread_time()
    wall, process, thread = ((late - early) / steps for early, late in zip(before, after, strict=True))
    return wall, process, thread


def main() -> None:
    """Hold the contest and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where RayZero's training thread spends its time")
    options = parser.parse_args()
    with running_in(RankContext()):
        plain = stepper(options.width, options.rows, prepared=False)
        ours = stepper(options.width, options.rows, prepared=True)
        rounds = [(turn(plain, options.steps), turn(ours, options.steps)) for _ in range(options.rounds)]
        print(
            f"{UNITS} units, {2 * LINEARS * UNITS:,} parameters, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
        )
        for i, what in enumerate(("wall", "process", "thread")):
            base = statistics.median(a[i] for a, _ in rounds)
            ratios = sorted(b[i] / a[i] for a, b in rounds)
            middle = statistics.median(ratios)
            spread = f"({ratios[0]:.2f}-{ratios[-1]:.2f})"
            print(f"{what:8s} plain {base * 1e3:7.1f} ms   ours {middle:.2f} times that {spread}")
        if options.profile:
            with cProfile.Profile() as profile:
                turn(ours, options.steps)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
