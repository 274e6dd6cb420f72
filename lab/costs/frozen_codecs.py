"""What does ``cpu_compression`` save, and what does it cost? Trains adapters on a frozen base with each method.

The optimizer actor is in the rank's process, and the rank has room for little more than a quarter of the base, so every
pass fetches and decodes most of it. For each method: the bytes that the owner's plan says, that its metrics say, and by
which the kernel counts more shared memory; the base's bytes over those with "none"; bytes that a step fetches; and the
seconds of a step over those with "none" in the same round."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero.config import CpuCompressionMethod, ZeroConfig
from rayzero.config.zero import Precision
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.prepare import COMPUTE_DTYPES, plan_units
from rayzero.kernels import splits_masters
from rayzero.layout.shard_map import shard_map_for
from rayzero.memory.planner import plan_owner
from rayzero.memory.process_memory import process_memory
from rayzero.quantities import format_bytes
from rayzero.telemetry.names import MEMORY_BYTES, TRANSFER_BYTES

METHODS = [method.value for method in CpuCompressionMethod]
WARM = 2  # steps before the clock starts


class Block(nn.Module):
    """A frozen feed-forward layer, with a trained adapter beside it."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(4 * width, width, dtype=dtype).requires_grad_(False)
        self.into, self.out = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, width) -> the same."""
        return x + self.down(F.gelu(self.up(x))) + self.out(self.into(x))


@dataclass(frozen=True, kw_only=True)
class Found:
    """One run with one method."""

    planned: int  # bytes that the owner keeps
    told: float  # the same by its metrics
    counted: int  # shared memory of this process, by the kernel
    frozen: int  # bytes of the base, by metrics
    fetched: float  # bytes a step
    seconds: float  # of a step, median


def measure(method: str, precision: Precision, width: int, blocks: int, rows: int, steps: int) -> Found:
    """Train a new model with one method."""
    torch.manual_seed(0)
    dtype = COMPUTE_DTYPES[precision]
    model: nn.Module = nn.Sequential(*(Block(width, dtype) for _ in range(blocks)))
    trained = [param for param in model.parameters() if param.requires_grad]
    room = (blocks // 4 + 1) * 8 * width * width * dtype.itemsize  # a quarter of the blocks and one
    config = ZeroConfig(precision=precision, cpu_compression=method, gpu_param_memory_budget=room)
    layout = plan_units(model, config).layout
    splits = splits_masters(config.kernel, config.moments)
    plan = plan_owner(layout, shard_map_for(layout, 1, "balanced"), 0, 1, 1, splits=splits, own_gradients=True)
    gc.collect()  # the last run's memory
    with running_in(RankContext()) as context:
        before = process_memory().shm
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(trained, lr=1e-3), config)
        counted = process_memory().shm - before
        gauges = {kind: context.recorder.gauge(MEMORY_BYTES, kind=kind, tier="shm") for kind in KINDS}
        inputs, seconds, fetched = torch.randn(rows, width, dtype=dtype), [], 0.0
        for step in range(WARM + steps):
            if step == WARM:
                fetched = context.recorder.total(TRANSFER_BYTES, direction="fetch")
            began = time.perf_counter()
            model(inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        fetched = context.recorder.total(TRANSFER_BYTES, direction="fetch") - fetched
    published = sum(unit.size_bytes for unit in layout.units if unit.trainable and precision == "bf16")
    return Found(
        planned=plan.params + plan.master + plan.moments,
        told=sum(gauges.values()),
        counted=counted,
        frozen=int(gauges["param"]) - published,
        fetched=fetched / steps,
        seconds=median(seconds[WARM:]),
    )


KINDS = ("param", "master", "exp_avg", "exp_avg_sq")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=512, help="of a batch")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = [
        {
            method: measure(method, options.precision, options.width, options.blocks, options.rows, options.steps)
            for method in METHODS
        }
        for _ in range(options.rounds)
    ]
    for method in METHODS:
        found, ratios = rounds[-1][method], [one[method].seconds / one["none"].seconds for one in rounds]
        print(
            f"{method:<13} plan {format_bytes(found.planned):>9}  metrics {format_bytes(int(found.told)):>9}  kernel "
            f"{format_bytes(found.counted):>9}  base {found.frozen / rounds[-1]['none'].frozen:.3f}  fetched a step "
            f"{format_bytes(int(found.fetched)):>9}  seconds over none " + " ".join(f"{r:.2f}" for r in ratios)
        )
