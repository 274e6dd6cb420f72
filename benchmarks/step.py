"""Step time against plain PyTorch on this machine, in turn, in one run, and where the time goes.

    python benchmarks/step.py [--rounds 3] [--steps 6] [--dim 384] [--layers 6] [--precision fp32] [--json]

Three pairs, each the same model, batches and optimizer (AdamW fused, gradient clipping), A B A B ..., ratio = ours
divided by plain, per pair, median (min-max):

* ``alone``      one rank, the store in the process, against plain PyTorch; both with all cores.
* ``overlapped`` the same with the loop itself using one core, so that the owner's update has a core of its own.
* ``grpc``       two rank processes of one thread and two owners over gRPC, against plain PyTorch with all cores on
                 the same global batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.recipes.gpt import GPT, GPTConfig
from rayzero.telemetry.names import EXPOSED_WAIT_SECONDS
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import run_ranks

CAUSES = ("fetch", "push", "norm", "optimizer")


@dataclass(frozen=True)
class Work:
    """What is trained: shapes, batch per rank, steps that count, precision."""

    dim: int
    layers: int
    seq: int
    batch: int
    steps: int
    precision: str

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        heads = self.dim // 64
        return GPT(GPTConfig(vocab_size=512, seq_len=self.seq, num_layers=self.layers, num_heads=heads, dim=self.dim))

    def batch_of(self, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randint(0, 512, (self.batch, self.seq + 1), generator=generator)


@dataclass(frozen=True)
class Timing:
    """One run: median seconds a step, and seconds a step that the loop stood still, by cause."""

    step: float
    waits: dict[str, float]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def plain(work: Work, world_size: int, threads: int) -> Timing:
    """Plain PyTorch: one process, the global batch of ``world_size`` ranks."""
    torch.set_num_threads(threads)
    model = work.model()
    if work.precision == "bf16":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for step in range(work.steps + 2):
        start = time.perf_counter()
        tokens = torch.cat([work.batch_of(step, rank) for rank in range(world_size)])
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds[2:]), {})


def train(work: Work, threads: int, overlap: str, ctx: RankContext) -> Timing:
    """Ours: the same loop on one rank."""
    torch.set_num_threads(threads)
    config = rayzero.ZeroConfig(precision=work.precision, overlap=overlap, max_grad_norm=1.0)
    model = work.model()
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4), config)
    recorder = ctx.recorder
    assert isinstance(recorder, MemoryRecorder)
    seconds, before = [], {}
    for step in range(work.steps + 2):
        if step == 2:
            before = {cause: recorder.total(EXPOSED_WAIT_SECONDS, cause=cause) for cause in CAUSES}
        start = time.perf_counter()
        loss_of(model, work.batch_of(step, ctx.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    waits = {c: (recorder.total(EXPOSED_WAIT_SECONDS, cause=c) - before[c]) / work.steps for c in CAUSES}
    return Timing(statistics.median(seconds[2:]), waits)


def alone(work: Work, threads: int) -> Timing:
    return run_ranks(partial(train, work, threads, "forward"), 1, 1, threads=os.cpu_count() or 1)[0]


def over_grpc(work: Work) -> Timing:
    timings = run_ranks(partial(train, work, 1, "forward"), 2, 2, "grpc", processes=True)
    return max(timings, key=lambda timing: timing.step)


def compare(ours: Callable[[], Timing], theirs: Callable[[], Timing], rounds: int) -> dict[str, object]:
    """A B A B ...: each side's seconds a step, the ratio pair by pair, and our waits (of the median run)."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratios = sorted(a.step / b.step for a, b in pairs)
    middle = sorted((a for a, _ in pairs), key=lambda timing: timing.step)[rounds // 2]
    return {
        "ours_s": statistics.median(a.step for a, _ in pairs),
        "plain_s": statistics.median(b.step for _, b in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "waits_s": middle.waits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 3), ("steps", 6), ("dim", 384), ("layers", 6), ("seq", 256), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    work = Work(args.dim, args.layers, args.seq, args.batch, args.steps, args.precision)
    cores = os.cpu_count() or 1
    results = {
        "alone": compare(lambda: alone(work, cores), lambda: plain(work, 1, cores), args.rounds),
        "overlapped": compare(lambda: alone(work, 1), lambda: plain(work, 1, 1), args.rounds),
        "grpc": compare(lambda: over_grpc(work), lambda: plain(work, 2, cores), args.rounds),
    }
    if args.json:
        print(json.dumps({"work": asdict(work), "cores": cores, "torch": torch.__version__, "results": results}))
        return
    params = sum(p.numel() for p in work.model().parameters())
    print(f"{params / 1e6:.1f}M parameters, {work.batch} x {work.seq} tokens a rank, {args.precision}, {cores} cores")
    for name, found in results.items():
        print(
            f"{name:11} ours {found['ours_s']:.3f} s  plain {found['plain_s']:.3f} s  "
            f"ratio {found['ratio']:.2f} ({found['ratio_min']:.2f}-{found['ratio_max']:.2f})  stood still: "
            + ", ".join(f"{cause} {seconds * 1e3:.1f} ms" for cause, seconds in found["waits_s"].items())
        )


if __name__ == "__main__":
    main()
