"""Measures one step's fetches of a host's two ranks over gRPC, each for itself and once for the host.

    python -m lab host_fetch [--mib 16] [--units 4] [--steps 5] [--rounds 2]

Two owners in one process, without shared memory with the ranks, have ``--units`` bf16 units of ``--mib``. A step's
fetches begin in a rank once every unit is published; the slower rank counts. ``never``: each rank fetches for itself
(host_fetch="never"). ``copied``: once for the host, and each rank copies it into memory of its own, as for a GPU.
``mapped``: once, and each rank waits until it can compute with it in the host's memory. They take turns. ``wire_mib``:
over gRPC, of both ranks and all steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lab.bench.store import HYPER, spec_of
from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.protocol.messages import COMPUTE, Contribution, FinishReport, StepInputs
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.telemetry.names import TRANSFER_BYTES
from rayzero.testing import run_ranks

MIB = 1 << 20
WAYS = ("never", "copied", "mapped")


def rank(context: RankContext, mib: int, units: int, steps: int, way: str) -> dict[str, Any]:
    """Train without computing. Returns the seconds of every step's fetches but the first, this process's processor
    seconds in them, and the bytes that it fetched over gRPC."""
    torch.set_num_threads(1)
    spec = replace(spec_of([mib * MIB] * units), world_size=2, run=context.run)
    assert context.connect is not None
    store: Any = context.connect(0)
    store.attach(spec)
    layouts = spec.layout.units
    if context.rank == 0:
        for unit in layouts:
            store.load(unit.index, torch.randn(unit.numel)).result()
    outs = [torch.zeros(unit.numel, dtype=unit.dtype) for unit in layouts]
    grads = [torch.randn(unit.numel).to(unit.dtype) for unit in layouts]
    seconds, processor = [], []
    for step in range(steps + 1):
        for unit in layouts:  # the owners' update is not part of it
            for transfers, shards in store._routes[unit.index].parts:
                getattr(transfers, "_wire", transfers).published(unit.name, shards, step).result()
        began, busy = time.perf_counter(), time.process_time()
        if way == "mapped":
            asked: list[Future[Any]] = [store.published(unit.index, step) for unit in layouts]
        else:
            asked = [store.fetch(unit.index, step, COMPUTE, outs[unit.index]) for unit in layouts]
        for future in asked:
            future.result()
        if step:
            seconds.append(time.perf_counter() - began)
            processor.append(time.process_time() - busy)
        for unit in layouts:
            header = Contribution(step=step, attempt=0, rank=context.rank, unit=unit.index, seq=0, presence=b"\1")
            store.push(header, grads[unit.index]).result()
        report = FinishReport(step=step, attempt=0, rank=context.rank, counts=(1,) * units)
        store.finish(report, StepInputs(edits=(), hyper=HYPER)).result()
        store.decision(step).result()
    wire = context.recorder.total(TRANSFER_BYTES, direction="fetch", transport="grpc")  # type: ignore[attr-defined]
    store.close()
    return {"seconds": seconds, "processor": processor, "wire": wire}


def play(way: str, mib: int, units: int, steps: int) -> dict[str, Any]:
    """One turn of a way."""
    config = ZeroConfig(host_fetch="never" if way == "never" else "auto")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="owners-") as elsewhere:
        hosts = {f"optimizer {owner}": Path(elsewhere) for owner in range(2)}
        loop = functools.partial(rank, mib=mib, units=units, steps=steps, way=way)
        one, other = run_ranks(loop, 2, 2, "shm", True, config=config, hosts=hosts)
    slower = [max(pair) for pair in zip(one["seconds"], other["seconds"], strict=True)]
    both = [sum(pair) for pair in zip(one["processor"], other["processor"], strict=True)]
    return {
        "way": way,
        "seconds": round(statistics.median(slower), 4),
        "range": [round(min(slower), 4), round(max(slower), 4)],
        "processor_seconds": round(statistics.median(both), 4),
        "wire_mib": round((one["wire"] + other["wire"]) / MIB),
    }


def main() -> None:
    """Print a line of JSON a turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("mib", 16), ("units", 4), ("steps", 5), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    for _ in range(given.rounds):
        for way in WAYS:
            print(json.dumps(play(way, given.mib, given.units, given.steps)), flush=True)
