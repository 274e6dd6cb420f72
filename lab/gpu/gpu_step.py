"""Measures a training step on a GPU: RayZero in each overlap mode, FSDP2 and DeepSpeed with CPU offload, and AdamW on
the GPU as the ceiling.

    python -m lab gpu_step [--sizes 1.3b largest] [--tokens 8192 16384 32768 65536] [--rounds 3] [--json]
    python -m lab gpu_step --device cpu --sizes tiny --tokens 128      # the same code path, without a GPU

Needs torch and this package, but neither Ray nor grpc: owners are spawned processes that use shared memory, or threads
of the rank's process if this version has none. It first measures the limits (host memory, PCIe both ways), then
compares losses with plain PyTorch's at a small size, and only then takes the time of one contestant after the other,
because they would not fit side by side: bf16 with fp32 masters, blocks recomputed in backward, clip 1.0.

Limits of a row, from its N parameters: H2D 2 x 2N bytes (forward and backward), D2H 2N bytes, Adam 28N bytes of host
memory. ``bound``: the seconds of Adam that cannot hide under the forward (a quarter of the ceiling's step).
``exposed``: seconds a step beyond the ceiling's.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil
import torch

from lab.bench.contestants import OursOptions, Overlap, ours, plain
from lab.bench.figures import Spread, about, timed
from lab.bench.peers import peers
from lab.bench.step import PLAIN, Rules, Score, hold, play_rounds
from lab.bench.turns import Entry, Turn, contest
from lab.bench.work import Work

SIZES = {  # dim, layers, vocab, seq
    "tiny": (64, 2, 256, 64),
    "small": (512, 8, 8192, 512),
    "1.3b": (2048, 24, 32768, 2048),
    "3b": (2560, 32, 32768, 2048),
    "7b": (4096, 32, 32768, 2048),
    "13b": (5120, 40, 32768, 2048),
}
HOST_BYTES = 20  # per parameter: master, moments, parameters, gradients and a reserve
OVERLAPS: tuple[Overlap, ...] = ("none", "forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Measured limits in bytes per second."""

    host: float  # of a = b + s * c, which counts as 12 bytes an element
    h2d: float
    d2h: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contestant at one size and number of tokens. Times are seconds a step; None if the ceiling did not fit."""

    name: str
    size: str
    params: int
    tokens: int
    step_s: Spread
    tokens_per_s: float
    of_ceiling: float | None
    exposed_s: float | None
    bound_s: float | None
    h2d_limit_s: float
    d2h_limit_s: float
    adam_limit_s: float
    waits_s: dict[str, float]
    device_bytes: int
    host_bytes: int


# ---- limits -----------------------------------------------------------------------------------------------------


def measure_limits(device: str, mib: int = 1024) -> Limits:
    """Measure the limits as medians of 7, with page-locked memory on CUDA. ``mib``: MiB of each fp32 tensor."""
    count, pinned = mib << 18, device != "cpu"
    a, b, c = (torch.ones(count) for _ in range(3))
    host = torch.ones(count, pin_memory=pinned)
    there = torch.ones(count, device=device)
    return Limits(
        host=12 * count / _median(lambda: torch.add(b, c, alpha=2.0, out=a), device),
        h2d=4 * count / _median(lambda: there.copy_(host), device),
        d2h=4 * count / _median(lambda: host.copy_(there), device),
    )


def _median(work, device: str) -> float:
    def settled() -> None:
        work()
        if device != "cpu":
            torch.cuda.synchronize()

    settled()
    return Spread.of(timed(settled) for _ in range(7)).median


# ---- contests ---------------------------------------------------------------------------------------------------


def entries_of(work: Work, without: Sequence[str]) -> list[Entry]:
    """The entries of all contestants but those left out, the ceiling first."""
    mine = [ours(work, OursOptions(overlap=overlap), f"rayzero-{overlap}") for overlap in OVERLAPS]
    return [entry for entry in (plain(work), *mine, *peers(work)) if entry.name not in without]


def work_of(size: str, tokens: int) -> Work:
    """The work at a size, in bf16, with ``tokens`` a step in one batch."""
    dim, layers, vocab, seq = SIZES[size]
    seq = min(seq, tokens)
    return Work(
        dim=dim,
        layers=layers,
        vocab=vocab,
        seq=seq,
        batch=max(1, tokens // seq),
        precision="bf16",
        checkpointing=True,
    )


def largest() -> str:
    """The largest size whose states fit in the host memory that is free now."""
    free = psutil.virtual_memory().available * 0.9
    fitting = [size for size in SIZES if work_of(size, 2048).count_params() * HOST_BYTES < free]
    return fitting[-1]


def check(device: str, size: str, threads: int, without: Sequence[str]) -> dict[str, float]:
    """The largest relative difference of each contestant's losses from plain PyTorch's, or the reason why it cannot
    take part. Raises RunFailedError beyond the tolerance."""
    work = work_of(size, 4 * SIZES[size][3])
    cell = hold(entries_of(work, without), work, 1, threads, Rules(rounds=2, steps=3, patience_s=0.0), device)
    return {name: result.loss_apart for name, result in cell.results.items()} | dict(cell.absent)


def alone(entry: Entry, rules: Rules, device: str, threads: int) -> tuple[Score, int] | str:
    """(a contestant's score, its host bytes), or the reason why there is none: usually it ran out of memory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contest([entry], 1, threads, folder=folder, device=device) as (there, absent),
    ):
        if absent:
            return absent[entry.name]
        scores, _, step = play_rounds(there, rules)
        peak = sum(there[0].peak_bytes(Turn(first=step, steps=rules.steps)))
        return scores[entry.name], peak - there[0].base_bytes


def rows_of(
    entries: Sequence[Entry], size: str, tokens: int, rules: Rules, device: str, threads: int, limits: Limits
) -> list[Row | str]:
    """Measure every contestant, one after the other. A text says why one has no row."""
    ceiling: float | None = None
    params, rows = work_of(size, tokens).count_params(), []
    for entry in entries:
        try:
            found = alone(entry, rules, device, threads)
        except RuntimeError as exc:  # the contestant ran out of memory during the turn
            found = str(exc)
        if isinstance(found, str):
            rows.append(f"{entry.name} at {size}, {tokens} tokens: {found}")
            continue
        score, host_bytes = found
        step_s = Spread.of(score.step_s)
        ceiling = step_s.median if entry.name == PLAIN else ceiling
        rows.append(row_of(entry.name, size, params, tokens, score, step_s, ceiling, host_bytes, limits))
    return rows


def row_of(
    name: str,
    size: str,
    params: int,
    tokens: int,
    score: Score,
    step_s: Spread,
    ceiling: float | None,
    host_bytes: int,
    limits: Limits,
) -> Row:
    """A measured row with its limits."""
    adam = 28 * params / limits.host
    return Row(
        name=name,
        size=size,
        params=params,
        tokens=tokens,
        step_s=step_s,
        tokens_per_s=tokens / step_s.median,
        of_ceiling=None if ceiling is None else ceiling / step_s.median,
        exposed_s=None if ceiling is None else step_s.median - ceiling,
        bound_s=None if ceiling is None else max(0.0, adam - ceiling / 4),
        h2d_limit_s=4 * params / limits.h2d,
        d2h_limit_s=2 * params / limits.d2h,
        adam_limit_s=adam,
        waits_s={cause: Spread.of(w[cause] for w in score.waits_s).median for cause in score.waits_s[0]},
        device_bytes=score.device_bytes,
        host_bytes=host_bytes,
    )


# ---- the command ------------------------------------------------------------------------------------------------


def text_of(row: Row | str) -> str:
    """The row as a line of text."""
    if isinstance(row, str):
        return f"  {row}"
    seen = "-" if row.of_ceiling is None else f"{row.of_ceiling:.2f} of the ceiling"
    exposed = "-" if row.exposed_s is None else f"{row.exposed_s:.3f} (bound {row.bound_s:.3f})"
    return (
        f"  {row.size:5} {row.tokens:6} tokens  {row.name:17} {row.step_s.text(1, 3):>20} s  {seen}  "
        f"exposed {exposed} s"
        f"  limits: H2D {row.h2d_limit_s:.3f} D2H {row.d2h_limit_s:.3f} Adam {row.adam_limit_s:.3f} s"
        f"  device {row.device_bytes / 1e9:.1f} GB  host {row.host_bytes / 1e9:.1f} GB"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command: measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, "largest"], default=["1.3b", "largest"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384, 32768, 65536])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--without", nargs="*", default=[], help="contestants to leave out")
    parser.add_argument("--only-limits", action="store_true", help="measure host memory and the link, and end")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here (torch.cuda.is_available() is False); --device cpu --sizes tiny tries it")
    rules = Rules(rounds=args.rounds, steps=args.steps, patience_s=0.0)
    limits = measure_limits(args.device, 1024 if args.device == "cuda" else 16)
    if args.only_limits:
        print(json.dumps(asdict(limits)))
        return
    apart = check(args.device, "small" if args.device == "cuda" else "tiny", args.threads, args.without)
    facts = about() | {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu"}
    facts |= {"threads": args.threads, "limits": asdict(limits), "loss_apart": apart, "rules": asdict(rules)}
    if not args.json:
        print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    rows = []
    for size in dict.fromkeys(largest() if size == "largest" else size for size in args.sizes):
        for tokens in args.tokens:
            entries = entries_of(work_of(size, tokens), args.without)
            found = rows_of(entries, size, tokens, rules, args.device, args.threads, limits)
            rows += found
            if not args.json:
                print("\n".join(map(text_of, found)), flush=True)
    if args.json:
        told = [{"absent": row} if isinstance(row, str) else asdict(row) for row in rows]
        print(json.dumps(facts | {"rows": told}, indent=1))
