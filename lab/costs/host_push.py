"""Measures one step's pushes of a host's ranks over gRPC, each its own and one sum for the host.

    python -m lab host_push [--ranks 4] [--mib 16] [--units 4] [--steps 5] [--rounds 2]

Two owners in one process, without shared memory with the ranks, have ``--units`` bf16 units of ``--mib``. A step's
pushes begin in a rank once every unit is published, and end when the rank has the norm, for which owners need every
gradient and sum their squares; the slower rank counts. ``each``: each rank pushes its own (host_push="never"). ``sum``:
one fp32 sum of all ranks. They take turns. ``wire_mib``: over gRPC, of all ranks and a step.
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
from typing import Any

import torch

from lab.bench.store import HYPER, spec_of
from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.protocol.messages import Contribution, FinishReport, StepInputs
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.telemetry.names import TRANSFER_BYTES
from rayzero.testing import run_ranks

MIB = 1 << 20
WAYS = {"each": "never", "sum": "always"}


def rank(context: RankContext, ranks: int, mib: int, units: int, steps: int) -> dict[str, Any]:
    """Train without computing. Returns the seconds of every step's pushes but the first, this process's processor
    seconds in them, and the bytes that it pushed over gRPC."""
    torch.set_num_threads(1)
    spec = replace(spec_of([mib * MIB] * units), world_size=ranks, run=context.run)
    assert context.connect is not None
    store: Any = context.connect(0)
    store.attach(spec)
    layouts = spec.layout.units
    if context.rank == 0:
        for unit in layouts:
            store.load(unit.index, torch.randn(unit.numel)).result()
    grads = [torch.randn(unit.numel).to(unit.dtype) for unit in layouts]
    seconds, processor = [], []
    for step in range(steps + 1):
        for unit in layouts:  # the owners' update is not part of it
            for transfers, shards in store._routes[unit.index].parts:
                getattr(transfers, "_wire", transfers).published(unit.name, shards, step).result()
        began, busy = time.perf_counter(), time.process_time()
        pushes = []
        for unit in reversed(layouts):
            header = Contribution(step=step, attempt=0, rank=context.rank, unit=unit.index, seq=0, presence=b"\1")
            pushes.append(store.push(header, grads[unit.index]))
        for push in pushes:
            push.result()
        report = FinishReport(step=step, attempt=0, rank=context.rank, counts=(1,) * units)
        store.finish(report, StepInputs(edits=(), hyper=HYPER)).result()
        if step:
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - busy)
        store.decision(step).result()
    wire = context.recorder.total(TRANSFER_BYTES, direction="push", transport="grpc")  # type: ignore[attr-defined]
    store.close()
    return {"seconds": seconds, "processor": processor, "wire": wire / (steps + 1)}


def play(way: str, ranks: int, mib: int, units: int, steps: int) -> dict[str, Any]:
    """One turn of a way."""
    config = ZeroConfig(host_push=WAYS[way])  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="owners-") as elsewhere:
        hosts = {f"optimizer {owner}": Path(elsewhere) for owner in range(2)}
        loop = functools.partial(rank, ranks=ranks, mib=mib, units=units, steps=steps)
        found = run_ranks(loop, ranks, 2, "shm", True, config=config, hosts=hosts)
    slower = [max(each) for each in zip(*(one["seconds"] for one in found), strict=True)]
    all_of = [sum(each) for each in zip(*(one["processor"] for one in found), strict=True)]
    return {
        "way": way,
        "ranks": ranks,
        "seconds": round(statistics.median(slower), 4),
        "range": [round(min(slower), 4), round(max(slower), 4)],
        "processor_seconds": round(statistics.median(all_of), 4),
        "wire_mib": round(sum(one["wire"] for one in found) / MIB, 1),
    }


def main() -> None:
    """Print a line of JSON a turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 4), ("mib", 16), ("units", 4), ("steps", 5), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    for _ in range(given.rounds):
        for way in WAYS:
            print(json.dumps(play(way, given.ranks, given.mib, given.units, given.steps)), flush=True)
