"""Measures a step's bytes of a host's ranks whose owners are partly on another host.

    python -m lab door [--ranks 8] [--mib 16] [--units 8] [--steps 6] [--rounds 2]

Three owners are processes; owner 0 is on the ranks' host and is its door. ``--units`` bf16 units of ``--mib``.
``fetch``: seconds from a step's decision until the slowest rank has the next version, updates included; ``mapped``: in
the host's memory, as on a CPU, ``copied``: in memory of its own, as for a GPU. ``push``: seconds from the first push
until the decision. Two hosts are two directories of shared memory here, so the network is loopback.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from lab.bench.store import HYPER, spec_of
from rayzero.engine.context import RankContext
from rayzero.protocol.messages import COMPUTE, Contribution, FinishReport, StepInputs
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.testing import run_ranks

MIB = 1 << 20
OWNERS = 3
WAYS = ("mapped", "copied")

Seconds = tuple[list[float], list[float]]


def rank(context: RankContext, ranks: int, mib: int, units: int, steps: int, way: str) -> Seconds:
    """Train without computing. Returns the seconds of every step's fetches and pushes but the first ones."""
    torch.set_num_threads(1)
    spec = replace(spec_of([mib * MIB] * units), world_size=ranks, run=context.run)
    assert context.connect is not None
    store = context.connect(0)
    store.attach(spec)
    layouts = spec.layout.units
    if context.rank == 0:
        for unit in layouts:
            store.load(unit.index, torch.randn(unit.numel)).result()
    outs = [torch.zeros(unit.numel, dtype=unit.dtype) for unit in layouts] if way == "copied" else []
    grads = [torch.randn(unit.numel).to(unit.dtype) for unit in layouts]
    fetches, pushes, decided = list[float](), list[float](), time.perf_counter()
    for step in range(steps + 1):
        if way == "mapped":
            for asked in [store.published(unit.index, step) for unit in layouts]:
                asked.result()
        else:
            for fetched in [store.fetch(unit.index, step, COMPUTE, outs[unit.index]) for unit in layouts]:
                fetched.result()
        began = time.perf_counter()
        fetches.append(began - decided)
        for unit in layouts:
            header = Contribution(step=step, attempt=0, rank=context.rank, unit=unit.index, seq=0, presence=b"\1")
            store.push(header, grads[unit.index]).result()
        report = FinishReport(step=step, attempt=0, rank=context.rank, counts=(1,) * units)
        store.finish(report, StepInputs(edits=(), hyper=HYPER)).result()
        store.decision(step).result()
        decided = time.perf_counter()
        pushes.append(decided - began)
    store.close()
    return fetches[1:], pushes[1:]


def play(way: str, ranks: int, mib: int, units: int, steps: int) -> dict[str, object]:
    """One turn of a way."""
    loop = functools.partial(rank, ranks=ranks, mib=mib, units=units, steps=steps, way=way)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="owners-") as other:
        hosts = {f"optimizer {owner}": Path(other) for owner in range(1, OWNERS)}
        found = run_ranks(loop, ranks, OWNERS, "shm", True, hosts=hosts, max_failures=1)
    fetch, push = ([max(each) for each in zip(*seconds, strict=True)] for seconds in zip(*found, strict=True))
    return {
        "way": way,
        "fetch": round(statistics.median(fetch), 4),
        "push": round(statistics.median(push), 4),
        "ranges": [[round(min(each), 4), round(max(each), 4)] for each in (fetch, push)],
    }


def main() -> None:
    """Print a line of JSON a turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 8), ("mib", 16), ("units", 8), ("steps", 6), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    for _ in range(given.rounds):
        for way in WAYS:
            print(json.dumps(play(way, given.ranks, given.mib, given.units, given.steps)), flush=True)
