"""Measures where the memory of a script alone is between two steps, against plain PyTorch's.

    python -m lab at_rest [--precisions fp32 bf16] [--dim 512] [--layers 8]

Each contestant trains the GPT of ``python -m lab step`` in a process of its own. After four steps it gives freed memory
back (malloc_trim), so that only what lives is left, and reads its share (PSS) of anonymous and shared memory.
Bytes are those beyond what the process held before it built anything, over the model's parameters: code that is
imported or made on first use counts too, and weighs less the larger the model is.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
from collections import Counter
from typing import get_args

import torch
from torch import nn

import rayzero
from lab.bench.contestants import build_plain
from lab.bench.figures import at_least_one, resident_bytes
from lab.bench.turns import Seat, Turn
from lab.bench.work import ADAMW, CLIP, Precision, Work, loss_of
from rayzero.engine.context import RankContext, running_in
from rayzero.memory.process_memory import give_back_freed
from rayzero.telemetry.recorder import MemoryRecorder

STEPS = 4
KINDS = {"params": "published parameters", "state": "masters and moments", "heap": "malloc", "": "other mappings"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", choices=get_args(Precision), default=["fp32", "bf16"])
    for name, default in (("dim", 512), ("layers", 8)):
        parser.add_argument(f"--{name}", type=at_least_one, default=default)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for precision in args.precisions:
        work = Work(precision=precision, dim=args.dim, layers=args.layers)
        for contestant in ("plain", "rayzero"):
            with context.Pool(1) as pool:
                print(pool.apply(measure, (contestant, work)))


def measure(contestant: str, work: Work) -> str:
    """Train in this process; one line of bytes a parameter."""
    torch.set_num_threads(os.cpu_count() or 1)
    torch.ones(8, 8) @ torch.ones(8, 8)  # starts the threads
    count, before, base = work.count_params(), resident_bytes(os.getpid()), by_kind()
    keeps = train_plain(work) if contestant == "plain" else train(work)
    gc.collect()
    kept = resident_bytes(os.getpid()) - before
    give_back_freed()
    live, parts = resident_bytes(os.getpid()) - before, by_kind()
    del keeps
    found = ", ".join(f"{name} {(parts[kind] - base[kind]) / count:.2f}" for kind, name in KINDS.items() if parts[kind])
    return (
        f"{contestant:8} {work.precision}  {count / 1e6:.1f}M parameters  {live / count:5.2f} B/param live ({found}), "
        f"{kept / count:5.2f} with what malloc keeps"
    )


def train_plain(work: Work) -> object:
    """Returns what holds the states."""
    pipe, _ = multiprocessing.Pipe()
    player = build_plain(work, Seat(rank=0, world_size=1, threads=os.cpu_count() or 1, pipe=pipe))
    with running_in(RankContext(recorder=MemoryRecorder())):
        player.play(Turn(first=0, steps=STEPS - 1))  # and one before
    return player


def train(work: Work) -> object:
    """The same with RayZero, alone."""
    model: nn.Module = work.model()
    adamw = torch.optim.AdamW(model.parameters(), **ADAMW)  # type: ignore[arg-type]
    model, optimizer = rayzero.prepare(model, adamw, rayzero.ZeroConfig(precision=work.precision))
    for step in range(STEPS):
        loss_of(model, work.batch_of(step, 0)).backward()
        optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def by_kind() -> Counter[str]:
    """This process's bytes (PSS) of memory that is no file's, by what it is for: keys of KINDS."""
    found, kind = Counter[str](), None
    with open("/proc/self/smaps", encoding="utf-8") as smaps:
        for line in smaps:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                kind = _kind_of(line.split(maxsplit=5)[5:])
            elif line.startswith("Pss:") and kind is not None:
                found[kind] += int(line.split()[1]) << 10
    return found


def _kind_of(name: list[str]) -> str | None:
    """``name``: of a mapping, if it has one. None: a file's."""
    path = name[0].strip() if name else ""
    slab = re.match(r"/memfd:rayzero-.*-(params|state)-", path)
    if slab is not None:
        return slab[1]
    return "heap" if path == "[heap]" else None if path.startswith("/") else ""
