"""Measures how fast the kernels update, against the memory limit of the same run: bf16 gradients in, bf16 parameters
out.

    python -m lab adam [--mparams 64] [--threads 2] [--rounds 15] [--patience 60] [--all-isas] [--json]

For the limit, the same threads read, scale and write three fp32 arrays in place (24 bytes a parameter). An update moves
28 bytes: gradient 2, master and two moments 8 each, parameter 2; 26 if the parameter is one half of the master, as
owners have it. Every path has its own memory and runs once a round,
in turn, so that a disturbance hits all of them; a ratio is the median over rounds of path / limit within a round. A
round in which others took more than 5 % of the machine is repeated while ``--patience`` (seconds) lasts.
DeepSpeedCPUAdam is measured if it is installed; it compiles its extension first.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lab.bench.figures import Busy, Spread, about, at_least_one, plain, timed
from rayzero.errors import UnsupportedError
from rayzero.kernels import AdamMemory, AdamOptions, Kernel, Segment, adam_states, native
from rayzero.kernels.moments import BLOCK, CODED, CodedMoment, Moment, PlainMoment, moment_bytes
from rayzero.kernels.native import NativeKernel, NativeLibrary, Team
from rayzero.kernels.torch_kernel import TorchKernel
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.memory.mapping import host_zeros
from rayzero.owner.memory import HostMemory
from rayzero.owner.rules import AdamRule
from rayzero.owner.shard import OwnedShard, ShardWork, allocate
from rayzero.protocol.messages import Hyper, ModelSpec

HYPER: Hyper = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
OPTIONS = AdamOptions.from_hyper(HYPER, decoupled=True)
SHARD = 1 << 21  # elements: the size of a shard by default
LIMIT, ONE_BLOCK, SHARDS = "limit", "native, one block", "native, 2M-element shards by AdamRule"
CODED_BLOCK = "native, moments {}"
TORCH, TORCH_OPTIM = "torch kernel, one block", "torch.optim.AdamW(fused=True)"
MOST_DISTURBED = 0.05  # share of the machine that others may take in a round


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library's optimizer, which this benchmark runs where it is installed."""

    name: str
    module: str
    attribute: str
    param_bytes: float  # least memory traffic per parameter
    over: str  # our path that it is compared with

    def find(self) -> Callable[..., torch.optim.Optimizer] | None:
        """The class, after its first use, which may compile an extension or a graph; None if it is not installed."""
        with contextlib.redirect_stdout(sys.stderr):  # they print
            try:
                found: Callable[..., torch.optim.Optimizer] = getattr(
                    importlib.import_module(self.module), self.attribute
                )
            except ImportError:
                return None
            parameter = torch.nn.Parameter(torch.zeros(8192, dtype=torch.float32, device="cpu"))
            parameter.grad = torch.zeros(8192, dtype=torch.float32, device="cpu")
            found([parameter], **HYPER).step()
        return found


_EIGHT_BITS = 2 * (4 + 2 * (1 + 4 / 256)) + 4  # a scale for each 256 codes
PEERS = (
    Peer("DeepSpeedCPUAdam", "deepspeed.ops.adam", "DeepSpeedCPUAdam", 28, ONE_BLOCK),
    Peer("torchao AdamW8bit", "torchao.optim", "AdamW8bit", _EIGHT_BITS, CODED_BLOCK.format("int8")),
    Peer("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit", _EIGHT_BITS, CODED_BLOCK.format("int8")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One way to do the update."""

    name: str
    param_bytes: float  # least memory traffic per parameter
    run: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one path."""

    name: str
    mparams_per_s: Spread
    gb_per_s: float  # median
    of_limit: Spread  # bytes per second over the limit's, per round


# ---- paths ------------------------------------------------------------------------------------------------------


def make_memory(count: int, moments: str = "fp32") -> AdamMemory:
    """Adam's memory of ``count`` elements, fp32 with bf16 parameters; all pages are touched."""

    def state(kind: str) -> Moment:
        values = _touched(count, CODED.get(moments, torch.float32))
        scales = _touched(count // BLOCK, torch.float32)
        return CodedMoment(values, scales, kind == "exp_avg_sq") if moments in CODED else PlainMoment(values)

    return AdamMemory(
        master=_touched(count, torch.float32).normal_(),
        states={kind: state(kind) for kind in adam_states(amsgrad=False)},
        params=_touched(count, torch.bfloat16),
    )


def _touched(count: int, dtype: torch.dtype) -> Tensor:
    """Zeroed memory with the pages that owners have."""
    return host_zeros(count, dtype, pinned_for=None).zero_()


def limit_path(library: NativeLibrary, count: int, threads: int) -> Path:
    """The path of the limit: rewrite three arrays in place."""
    arrays, team = [_touched(count, torch.float32).normal_() for _ in range(3)], Team(library, threads)

    def run() -> None:
        library.rewrite(team.address, *(array.data_ptr() for array in arrays), count, 1.0, native.TILE)

    return Path(name=LIMIT, param_bytes=24, run=run)


def kernel_path(name: str, kernel: Kernel, memory: AdamMemory, gradient: Tensor, moments: str = "fp32") -> Path:
    """The path of a kernel that updates everything in one call. ``gradient``: 1D, bf16."""
    kept = 4 + 2 * moment_bytes(moments)  # master and moments, read and written
    segments = [Segment(offset=0, length=gradient.numel(), ranks=(0,), options=OPTIONS, step=10)]
    return Path(name=name, param_bytes=2 * kept + 4, run=partial(kernel.update, memory, [gradient], segments, 1.0))


def shards_path(gradient: Tensor) -> Path:
    """The path of an owner, which updates shard after shard with its rule. ``gradient``: 1D, bf16."""
    rows = gradient.numel() // 1024
    unit = lay_out_unit(0, "all", torch.bfloat16, True, [(f"{i}.weight", (1024, 1024)) for i in range(rows // 1024)])
    layout = ModelLayout(units=(unit,), shard_numel=SHARD)
    spec = ModelSpec(
        run="bench",
        layout=layout,
        world_size=1,
        optimizer="torch.optim.adamw:AdamW",
        hyper=(HYPER,),
        group_of=((0,) * len(unit.slots),),
        kernel=NativeKernel.name,
    )
    rule = AdamRule(spec, decoupled=True)
    owned = allocate(spec, range(len(layout.shards)), rule.state_kinds, HostMemory(), room=None, splits=rule.splits)
    work = [(shard, shard_work(shard, gradient, spec)) for shard in owned.values()]

    def run() -> None:
        for shard, todo in work:
            rule.update(shard, todo)

    return Path(name=SHARDS, param_bytes=26, run=run)


def shard_work(owned: OwnedShard, gradient: Tensor, spec: ModelSpec) -> ShardWork:
    """The work of a decision that updates a whole shard with one rank's gradient."""
    return ShardWork(
        version=1,
        gradients=[gradient[owned.shard.start : owned.shard.stop]],
        contributors=((0,),) * len(owned.slices),
        scale=1.0,
        hyper=spec.hyper,
    )


def optimizer_path(
    name: str, make: Callable[..., torch.optim.Optimizer], memory: AdamMemory, gradient: Tensor, param_bytes: float = 28
) -> Path:
    """The path of an optimizer that needs whole fp32 gradients: upcast, step, downcast."""
    assert memory.params is not None
    params, parameter = memory.params, torch.nn.Parameter(memory.master)
    optimizer = make([parameter], **HYPER)
    parameter.grad = wide = torch.zeros(gradient.numel(), dtype=torch.float32, device="cpu")

    def run() -> None:
        wide.copy_(gradient)
        optimizer.step()
        params.copy_(parameter.detach())

    return Path(name=name, param_bytes=param_bytes, run=run)


def make_paths(library: NativeLibrary, count: int, threads: int, *, all_isas: bool) -> list[Path]:
    """All paths that this machine can run, the limit first."""
    gradient = torch.randn(count, dtype=torch.float32, device="cpu").to(torch.bfloat16)
    isas = [native.ISAS[isa] for isa in library.isas[:-1]] if all_isas else []
    block = make_memory(count)
    return [
        limit_path(library, count, threads),
        kernel_path(ONE_BLOCK, NativeKernel(threads=threads), block, gradient),
        shards_path(gradient),
        *(
            kernel_path(
                CODED_BLOCK.format(kept), NativeKernel(threads=threads), make_memory(count, kept), gradient, kept
            )
            for kept in CODED
        ),
        *(kernel_path(f"native {isa}", NativeKernel(threads=threads, isa=isa), block, gradient) for isa in isas),
        kernel_path(TORCH, TorchKernel(threads=threads), make_memory(count), gradient),
        optimizer_path(TORCH_OPTIM, partial(torch.optim.AdamW, fused=True), make_memory(count), gradient),
        *(
            optimizer_path(peer.name, make, make_memory(count), gradient, peer.param_bytes)
            for peer in PEERS
            if (make := peer.find()) is not None
        ),
    ]


# ---- rounds -----------------------------------------------------------------------------------------------------


def play(paths: Sequence[Path], rounds: int, patience_s: float) -> tuple[list[dict[str, float]], list[float]]:
    """(seconds by path, of each round; the share of the machine that others took in each)."""
    one_round(paths)  # warms up
    kept, taken, deadline = list[dict[str, float]](), list[float](), perf_counter() + patience_s
    while len(kept) < rounds:
        seconds, others = one_round(paths)
        if others <= MOST_DISTURBED or perf_counter() > deadline:
            kept.append(seconds)
            taken.append(others)
    return kept, taken


def one_round(paths: Sequence[Path]) -> tuple[dict[str, float], float]:
    """Run every path once; returns seconds by path, and the share of the machine that others took."""
    before = Busy.now(())
    seconds = {path.name: timed(path.run) for path in paths}
    return seconds, Busy.now(()).others_since(before)


def row_of(path: Path, limit: Path, count: int, rounds: Sequence[dict[str, float]]) -> Row:
    """A path's figures over the rounds."""
    rates = [count / seconds[path.name] for seconds in rounds]
    most = [limit.param_bytes * count / seconds[LIMIT] for seconds in rounds]
    speed = Spread.of(rate / 1e6 for rate in rates)
    return Row(
        name=path.name,
        mparams_per_s=speed,
        gb_per_s=speed.median * path.param_bytes / 1e3,
        of_limit=Spread.of(rate * path.param_bytes / bytes_s for rate, bytes_s in zip(rates, most, strict=True)),
    )


def measure(
    *, mparams: int = 64, threads: int = 2, rounds: int = 15, patience_s: float = 60.0, all_isas: bool = False
) -> dict[str, Any]:
    """Measure on this machine; returns all figures and facts as plain values. ``mparams``: in units of 2^20 parameters.

    Raises UnsupportedError if the native kernel, which has the limit's loop, is missing."""
    library = native.load()
    if isinstance(library, str):
        raise UnsupportedError(f"there is no native kernel, so there is no limit to measure against: {library}")
    facts, before, count = about(), torch.get_num_threads(), mparams << 20
    torch.set_num_threads(threads)
    try:
        paths = make_paths(library, count, threads, all_isas=all_isas)
        seconds, others = play(paths, rounds, patience_s)
    finally:
        torch.set_num_threads(before)
    names, compared = {path.name for path in paths}, {TORCH_OPTIM: ONE_BLOCK} | {peer.name: peer.over for peer in PEERS}
    found: dict[str, Any] = plain(
        facts
        | {"mparams": mparams, "threads": threads, "rounds": rounds, "isa": NativeKernel().isa}
        | {"others": Spread.of(others), "rows": [row_of(path, paths[0], count, seconds) for path in paths]}
        | {"absent": {peer.name: "not installed" for peer in PEERS if peer.name not in names}}
        | {
            "ours_over": {
                name: Spread.of(times[name] / times[ours] for times in seconds)
                for name, ours in compared.items()
                if name in names
            }
        }
    )
    return found


# ---- the command ------------------------------------------------------------------------------------------------


def text_of(found: dict[str, Any]) -> str:
    """The figures as a table for people."""
    apart = ("rows", "absent", "ours_over", "others")
    lines = [", ".join(f"{name} {value}" for name, value in found.items() if name not in apart)]
    lines.append(f"others took {Spread(**found['others']).text(100, 0)} % of the machine")
    for row in found["rows"]:
        rate, part = Spread(**row["mparams_per_s"]), Spread(**row["of_limit"])
        lines.append(
            f"  {row['name']:38} {rate.text(digits=0):>18} Mparam/s {row['gb_per_s']:6.1f} GB/s   "
            f"{part.text()} of the limit"
        )
    lines += [f"  {name:38} {why}" for name, why in found["absent"].items()]
    lines += [f"  ours is {Spread(**r).text()} x as fast as {name}" for name, r in found["ours_over"].items()]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog="python -m lab adam", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--mparams", type=at_least_one, default=64, help="2^20 parameters; an even number")
    made.add_argument("--threads", type=at_least_one, default=2)
    made.add_argument("--rounds", type=at_least_one, default=15)
    made.add_argument("--patience", type=float, default=60.0, help="seconds to wait for undisturbed rounds")
    made.add_argument("--all-isas", action="store_true", help="every instruction set, not only the best")
    made.add_argument("--json", action="store_true")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: measure and print."""
    args = parser().parse_args(argv)
    found = measure(
        mparams=args.mparams,
        threads=args.threads,
        rounds=args.rounds,
        patience_s=args.patience,
        all_isas=args.all_isas,
    )
    print(json.dumps(found, indent=1) if args.json else text_of(found))
