"""Simulates steps from 8 to 1,000 ranks and from 8 to 256 owners on described hosts: how long they take and what binds.

    python -m lab scale_simulation [--here here.json] [--picture FILE.png] [--json FILE] [--quick]

``here.json`` is from ``python -m lab simulation --lead ... --save``: what RayZero's code costs for each unit, shard,
message and byte, and the speeds of its kernels, on one core of the machine that measured them. Hosts are described by
options; their defaults are what makers state for 8 H100 with one 400 Gb/s card, and for two-socket CPU hosts with the
same card, one for each owner. ``--efficiency`` is the share of a GPU's peak that a model reaches; it was not measured
here.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.work import Work
from lab.simulation.cluster import Run, Simulated, simulate
from lab.simulation.machines import Measured, Options
from lab.simulation.ranks import Compute
from rayzero.config import ZeroConfig
from rayzero.engine.prepare import plan_units
from rayzero.engine.units.partition import UnitPlan
from rayzero.kernels import splits_masters
from rayzero.layout.shard_map import shard_map_for
from rayzero.memory.planner import plan_owner

MODELS = {"7B": (4096, 32), "66B": (8192, 80), "1T": (25600, 128)}  # width, blocks
RANKS = {8: 8, 32: 8, 128: 32, 512: 128, 1000: 256}  # ranks -> owners
OWNERS = (8, 32, 64, 128, 256)


PLAIN, RELAY, BOTH = "each rank by itself", "fetched once a host", "as by default"
APART = Options(transport="shm", encrypted=True)
ONCE = replace(APART, fetch_once_per_host=True, push_once_per_host=True, ask_once_per_host=True)
WAYS = {
    PLAIN: APART,
    RELAY: replace(APART, fetch_once_per_host=True),
    BOTH: ONCE,
}
MESSAGES = {
    f"{BOTH}, each rank asks and hears": replace(ONCE, ask_once_per_host=False),
    f"{BOTH}, a tree of 16": replace(ONCE, fan_out=16),
}
SHARDS = {f"{BOTH}, shards of 2 MiB": WAYS[BOTH]}
HERE = Path(__file__).with_suffix(".json")  # as measured for docs/scale_simulation.md
_KIND = re.compile(r" of (host kind|owner group|rank group) \d+")
RESOLUTION = 1e-4  # of a forward: works that end closer than this end together


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One simulated run."""

    model: str
    params: int
    ranks: int
    owners: int
    way: str
    tokens: int  # of one rank's micro-batch
    found: Simulated
    owner_bytes: int  # host memory of the largest owner, by the plan of its process
    took: float  # seconds to simulate

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"found": self.found.to_json()}

    def row(self) -> str:
        """As a line of a table."""
        waits = ", ".join(f"{cause} {seconds:.3g}" for cause, seconds in self.found.waits.items() if seconds > 1e-3)
        return (
            f"| {self.model} | {self.ranks:,} | {self.owners} | {self.way} | {self.found.seconds:.3g} | "
            f"{self.found.of_bound:.2f} | {_KIND.sub('', self.found.binds)} | {waits or 'none'} | "
            f"{self.found.lead:.1%} | {self.owner_bytes / 2**30:,.0f} |"
        )


HEAD = (
    "| model | ranks | owners | bytes travel | step, s | x bound | binds | waits, s | lead busy | GiB an owner |\n"
    "|---|--:|--:|---|--:|--:|---|---|--:|--:|"
)


def layout_of(model: str, shard_bytes: str = "8MiB") -> tuple[UnitPlan, ZeroConfig]:
    """The real unit plan of a GPT of that size, in bf16."""
    width, blocks = MODELS[model]
    zero = ZeroConfig(
        precision="bf16",
        prefetch_buffer_size=1,
        gpu_param_memory_budget="60GiB",
        max_grad_norm=1.0,
        shard_bytes=shard_bytes,
    )
    return plan_units(Work(dim=width, layers=blocks, vocab=65536, precision="bf16").model("meta"), zero), zero


def compute_of(plan: UnitPlan, args: argparse.Namespace) -> Compute:
    """Seconds of each unit: two operations a weight and token, and attention over whole squares; twice that backward.
    An embedding looks up."""
    speed = args.flops * 1e12 * args.efficiency

    def forward(index: int) -> float:
        name, unit = plan.modules[index], plan.layout.units[index]
        if name == "embed":
            return 0.0
        width = unit.slots[0].shape[-1] if name.startswith("blocks.") else 0
        return (2 * unit.numel * args.tokens + 4 * args.tokens * min(args.tokens, args.seq) * width) / speed

    seconds = tuple(forward(index) for index in range(len(plan.layout.units)))
    return Compute(forward=seconds, backward=tuple(2 * each for each in seconds))


def run_of(plan: UnitPlan, zero: ZeroConfig, here: Measured, args: argparse.Namespace, ranks: int, owners: int) -> Run:
    """Ranks fill hosts of 8 GPUs; each owner has a host."""
    hosts = -(-ranks // 8)
    machine = replace(
        here.machine,
        cores=args.cores,
        memory=args.memory * 1e9,
        network=args.network * 1e9,
        link=args.link * 1e9,
        owner_threads=args.owner_threads,
        gpus=True,
    )
    return Run(
        layout=plan.layout,
        root=frozenset(plan.units_of_module[""]),
        unread=frozenset(i for i, name in enumerate(plan.modules) if name == "embed"),
        zero=zero,
        compute=compute_of(plan, args),
        rank_hosts=tuple(rank // 8 for rank in range(ranks)),
        owner_hosts=tuple(hosts + owner for owner in range(owners)),
        machine=machine,
        costs=here.costs["grpc"],
        options=WAYS[PLAIN],
        part_s=here.part_s,
    )


def point(run: Run, plan: UnitPlan, model: str, way: str, tokens: int) -> Point:
    """Simulate one run."""
    run = replace(run, options=(WAYS | MESSAGES | SHARDS)[way])
    ranks, owners = len(run.rank_hosts), len(run.owner_hosts)
    shards = shard_map_for(plan.layout, owners, run.zero.shard_map)
    largest = max(range(owners), key=shards.weight_of)
    began = time.perf_counter()
    owner = plan_owner(plan.layout, shards, largest, ranks, 1, splits=splits_masters(run.zero.kernel, run.zero.moments))
    found = simulate(run, steps=3, resolution=RESOLUTION * sum(run.compute.forward))
    return Point(
        model=model,
        params=sum(unit.numel for unit in plan.layout.units),
        ranks=ranks,
        owners=owners,
        way=way,
        tokens=tokens,
        found=found,
        owner_bytes=owner.total,
        took=time.perf_counter() - began,
    )


def points(here: Measured, args: argparse.Namespace) -> Iterator[Point]:
    """All runs: more ranks and owners together, then more owners for the most ranks, then the largest model."""
    for model in ["7B"] if args.quick else ["7B", "66B"]:
        plan, zero = layout_of(model)
        for ranks, owners in list(RANKS.items())[: 2 if args.quick else None : 1 if model == "7B" else 2]:
            run = run_of(plan, zero, here, args, ranks, owners)
            for way in WAYS:
                yield point(run, plan, model, way, args.tokens)
    if args.quick:
        return
    plan, zero = layout_of("7B")
    for owners in OWNERS[:-1]:
        yield point(run_of(plan, zero, here, args, 1000, owners), plan, "7B", BOTH, args.tokens)
    for way in MESSAGES:
        yield point(run_of(plan, zero, here, args, 1000, 256), plan, "7B", way, args.tokens)
    plan, zero = layout_of("7B", "2MiB")
    for way in SHARDS:
        yield point(run_of(plan, zero, here, args, 1000, 256), plan, "7B", way, args.tokens)
    plan, zero = layout_of("1T")
    run = run_of(plan, zero, here, args, 1000, 256)
    yield point(run, plan, "1T", BOTH, args.tokens)


def draw(found: Sequence[Point], path: Path) -> None:
    """Four panels: the step by ranks, what it waits for, the step by owners, lead and memory."""
    # imported here: only a picture needs it
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((step, share), (owners, load)) = plt.subplots(2, 2, figsize=(11, 8))
    for model in ("7B", "66B"):
        for way, style in ((PLAIN, "-"), (RELAY, "--"), (BOTH, "-.")):
            line = [p for p in found if (p.model, p.way) == (model, way) and RANKS.get(p.ranks) == p.owners]
            line = list({p.ranks: p for p in line}.values())
            step.plot(
                [p.ranks for p in line], [p.found.seconds for p in line], style, marker="o", label=f"{model}, {way}"
            )
            share.plot([p.ranks for p in line], [p.found.of_bound for p in line], style, marker="o")
    many = list({p.owners: p for p in found if (p.model, p.way, p.ranks) == ("7B", BOTH, 1000)}.values())
    many.sort(key=lambda p: p.owners)
    owners.plot([p.owners for p in many], [p.found.seconds for p in many], marker="o", label="step")
    owners.plot([p.owners for p in many], [p.found.bound for p in many], "--", marker=".", label="its bound")
    for way, style in ((PLAIN, "-"), (BOTH, ":")):
        line = list({p.ranks: p for p in found if (p.model, p.way) == ("66B", way)}.values())
        load.plot(
            [p.ranks for p in line], [p.owner_bytes / 2**30 for p in line], style, marker="o", label=f"66B, {way}"
        )
    for axes, title, x, y in (
        (step, "A step", "ranks (owners: a fourth, at least 8)", "seconds"),
        (share, "over its bound", "ranks", "step / bound"),
        (owners, "7B, 1,000 ranks", "owners", "seconds"),
        (load, "Host memory of the largest owner", "ranks", "GiB"),
    ):
        axes.set(title=title, xlabel=x, ylabel=y, xscale="log")
        axes.grid(visible=True, alpha=0.3)
    step.set_yscale("log")
    share.set_ylim(bottom=1.0)
    owners.set_yscale("log")
    load.set_yscale("log")
    for axes in (owners, load):
        axes.legend(fontsize=7)
    figure.legend(*step.get_legend_handles_labels(), loc="lower center", ncols=2, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=110)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--here", type=Path, default=HERE, help="a file of python -m lab simulation --save")
    for name, default, text in (
        ("flops", 989.0, "peak TFLOP/s of one GPU in bf16"),
        ("efficiency", 0.4, "share of it that the model reaches"),
        ("link", 55.0, "GB/s between a host and one GPU, each way"),
        ("network", 50.0, "GB/s of one host, each way"),
        ("memory", 600.0, "GB/s of one host's memory, reads plus writes"),
        ("cores", 96.0, "of one host"),
    ):
        found.add_argument(f"--{name}", type=float, default=default, help=f"{text} ({default:g})")
    found.add_argument("--owner-threads", type=int, default=64, help="(64)")
    found.add_argument("--tokens", type=int, default=16384, help="of one rank's step (16384)")
    found.add_argument("--seq", type=int, default=4096, help="tokens of one sequence (4096)")
    found.add_argument("--quick", action="store_true", help="a few small runs only")
    found.add_argument("--picture", type=Path)
    found.add_argument("--json", type=Path, help="write all figures")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Simulate, print a table, draw."""
    args = parser().parse_args(argv)
    here = Measured.read(args.here)
    print(HEAD)
    found = []
    for each in points(here, args):
        found.append(each)
        print(each.row(), flush=True)
    print(
        f"{sum(each.took for each in found):.0f} s for {len(found)} points, at most {max(p.took for p in found):.0f} s"
    )
    if args.json:
        args.json.write_text(json.dumps([each.to_json() for each in found], indent=1) + "\n")
    if args.picture:
        draw(found, args.picture)
