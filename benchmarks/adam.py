"""How fast the kernels update, against the memory limit of the same run: bf16 gradients in, bf16 parameters out.

    python benchmarks/adam.py [--mparams 64] [--ranks 1] [--threads 2] [--rounds 15] [--patience 60]
                              [--all-isas] [--json]

The limit is three fp32 arrays read, scaled and written in place (24 B/param) by the same threads; a path moves at least
26 + 2 x ranks bytes a parameter. All paths run once a round, in turn, so that what the machine does meanwhile hits
them alike; a ratio is the median over rounds of path / limit within a round. A round in which other processes took
more than 5 % of the CPUs is run again, for as long as --patience (seconds) lasts. DeepSpeed is measured where it is
installed; it builds its extension first.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from rayzero.kernels import native
from rayzero.kernels.base import AdamMemory, AdamOptions, Kernel, Segment
from rayzero.kernels.native import NativeKernel, NativeLibrary, NativeSquareSum, ThreadTeam
from rayzero.kernels.reference import ReferenceKernel
from rayzero.kernels.torch_kernel import TorchKernel
from rayzero.optimizer.norm import Squares, SquareSum

OPTIONS = AdamOptions(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
SMALL = 1 << 14  # elements the reference kernel gets: it is plain Python
LIMIT = "limit"
MOST_DISTURBED = 0.05  # of the CPUs, by other processes


@dataclass(frozen=True, kw_only=True)
class Path:
    """One way to do the work."""

    name: str
    params: int  # elements a call works on
    param_bytes: int  # least traffic per element
    run: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one path: medians, and the least and the most."""

    name: str
    mparams_per_s: float
    mparams_per_s_min: float
    mparams_per_s_max: float
    gb_per_s: float
    of_limit: float  # bytes per second against the limit's, per round
    of_limit_min: float
    of_limit_max: float


def make_memory(count: int) -> AdamMemory:
    """A shard of ``count`` elements, all pages touched."""
    return AdamMemory(
        master=torch.randn(count),
        exp_avg=torch.zeros(count),
        exp_avg_sq=torch.zeros(count),
        max_exp_avg_sq=None,
        params=torch.zeros(count, dtype=torch.bfloat16),
    )


def update_path(name: str, kernel: Kernel, memory: AdamMemory, gradients: list[Tensor]) -> Path:
    """One update of the whole shard by ``kernel``."""
    count, ranks = memory.master.numel(), tuple(range(len(gradients)))
    segments = [Segment(offset=0, length=count, ranks=ranks, options=OPTIONS, step=10)]

    def run() -> None:
        kernel.update(memory, gradients, segments, 0.5, lambda done, total: None)

    return Path(name=name, params=count, param_bytes=26 + 2 * len(ranks), run=run)


def deepspeed_path(memory: AdamMemory, gradients: list[Tensor]) -> list[Path]:
    """The same work in DeepSpeed's way, where it is installed: gradients to fp32, its fused step, then to bf16."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # it talks on import
            cpu_adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
            parameter = torch.nn.Parameter(memory.master)
            step = OPTIONS.lr, (OPTIONS.beta1, OPTIONS.beta2), OPTIONS.eps, OPTIONS.weight_decay
            optimizer = cpu_adam([parameter], lr=step[0], betas=step[1], eps=step[2], weight_decay=step[3])
    except ImportError:
        return []
    parameter.grad = torch.zeros(memory.master.numel())

    def run() -> None:
        grad = parameter.grad
        assert grad is not None
        assert memory.params is not None
        grad.copy_(gradients[0])
        for gradient in gradients[1:]:
            grad.add_(gradient)
        optimizer.step()
        with torch.no_grad():
            memory.params.copy_(parameter)

    run()  # builds its extension
    bytes_moved = 26 + 2 * len(gradients)
    return [Path(name="DeepSpeedCPUAdam", params=memory.master.numel(), param_bytes=bytes_moved, run=run)]


def limit_path(library: NativeLibrary, memory: AdamMemory, threads: int) -> Path:
    """Three arrays in place."""
    team, count = ThreadTeam(threads), memory.master.numel()
    arrays = [tensor.data_ptr() for tensor in (memory.master, memory.exp_avg, memory.exp_avg_sq)]

    def run() -> None:
        claimed = ctypes.c_int64(0)
        team.run(lambda: library.rewrite(*arrays, count, 1.0, native.TILE, ctypes.byref(claimed)))

    return Path(name=LIMIT, params=count, param_bytes=24, run=run)


def squares_path(name: str, square_sum: Squares, gradients: list[Tensor]) -> Path:
    """The norm part of the whole shard."""
    count, ranks = gradients[0].numel(), range(len(gradients))
    run = partial(square_sum.part, gradients, ranks, 0, count)
    return Path(name=name, params=count, param_bytes=2 * len(ranks), run=run)


def make_paths(library: NativeLibrary, count: int, num_ranks: int, threads: int, *, all_isas: bool) -> list[Path]:
    """Every path of this machine, the limit first."""
    memory = make_memory(count)
    gradients = [torch.randn(count).to(torch.bfloat16) for _ in range(num_ranks)]
    small = [gradient[:SMALL] for gradient in gradients]
    isas = [native.ISAS[isa] for isa in (library.isas if all_isas else library.isas[-1:])]
    return [
        limit_path(library, memory, threads),
        *(
            update_path(f"native {isa}, {t} threads", NativeKernel(threads=t, isa=isa), memory, gradients)
            for isa in isas
            for t in sorted({1, threads})
        ),
        update_path(f"torch, {threads} threads", TorchKernel(), memory, gradients),
        *deepspeed_path(memory, gradients),
        update_path("reference", ReferenceKernel(), make_memory(SMALL), small),
        squares_path(f"squares native, {threads} threads", NativeSquareSum(threads=threads), gradients),
        squares_path(f"squares torch, {threads} threads", SquareSum(), gradients),
    ]


def busy_seconds() -> float:
    """CPU seconds that processes other than this one have used since boot."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(int, stat.readline().split()[1:])
    used = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return used - own.user - own.system


def one_round(paths: Sequence[Path]) -> tuple[dict[str, float], float]:
    """Seconds of each path, and the part of the CPUs that others took."""
    began, others = time.perf_counter(), busy_seconds()
    seconds = {}
    for path in paths:
        start = time.perf_counter()
        path.run()
        seconds[path.name] = time.perf_counter() - start
    taken = (busy_seconds() - others) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    return seconds, max(taken, 0.0)


def measure(paths: Sequence[Path], rounds: int, patience: float) -> tuple[list[dict[str, float]], int]:
    """Seconds per path of each round, and how many rounds were disturbed and kept for want of patience."""
    one_round(paths)  # warm
    kept: list[dict[str, float]] = []
    disturbed, deadline = 0, time.perf_counter() + patience
    while len(kept) < rounds:
        seconds, taken = one_round(paths)
        if taken > MOST_DISTURBED and time.perf_counter() < deadline:
            continue
        disturbed += taken > MOST_DISTURBED
        kept.append(seconds)
    return kept, disturbed


def rows_of(paths: Sequence[Path], rounds: Sequence[dict[str, float]]) -> list[Row]:
    """Medians over the rounds."""
    limit = next(path for path in paths if path.name == LIMIT)
    rows = []
    for path in paths:
        rates = [path.params / seconds[path.name] / 1e6 for seconds in rounds]
        limits = [limit.params * limit.param_bytes / seconds[LIMIT] / 1e6 for seconds in rounds]
        ratios = [rate * path.param_bytes / most for rate, most in zip(rates, limits, strict=True)]
        rows.append(
            Row(
                name=path.name,
                mparams_per_s=statistics.median(rates),
                mparams_per_s_min=min(rates),
                mparams_per_s_max=max(rates),
                gb_per_s=statistics.median(rates) * path.param_bytes / 1e3,
                of_limit=statistics.median(ratios),
                of_limit_min=min(ratios),
                of_limit_max=max(ratios),
            )
        )
    return rows


def processor() -> str:
    """Model name, where the system says it."""
    with open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        names = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mparams", type=int, default=64, help="2^20 parameters")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for undisturbed rounds")
    parser.add_argument("--all-isas", action="store_true", help="every instruction set, not the best alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    library = native.load()
    if isinstance(library, str):
        raise SystemExit(f"no native kernel, and so no limit to measure against: {library}")
    torch.set_num_threads(options.threads)
    paths = make_paths(library, options.mparams << 20, options.ranks, options.threads, all_isas=options.all_isas)
    rounds, disturbed = measure(paths, options.rounds, options.patience)
    rows = rows_of(paths, rounds)
    about = {
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="minutes"),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "mparams": options.mparams,
        "ranks": options.ranks,
        "threads": options.threads,
        "rounds": options.rounds,
        "rounds_disturbed": disturbed,
    }
    if options.json:
        print(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1))
        return
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    for row in rows:
        print(
            f"{row.name:28}{row.mparams_per_s:9.1f} Mparam/s ({row.mparams_per_s_min:.1f}-{row.mparams_per_s_max:.1f})"
            f"{row.gb_per_s:7.1f} GB/s  {row.of_limit:.2f} of the limit ({row.of_limit_min:.2f}-{row.of_limit_max:.2f})"
        )


if __name__ == "__main__":
    main()
