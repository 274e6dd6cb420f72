"""How fast parameters and gradients move through the gRPC store on loopback: one rank, K owner processes.

    python benchmarks/grpc_store.py [--owners 1] [--mib 256] [--rounds 7]

Prints median (min-max) GB/s of payload for fetch and push, per chunk size and size of unit, and the seconds of one
small unit (what an RPC costs). Compare with about 4 GB/s for a bare aio server stream of 4 MiB messages.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection

import torch

from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.messages import COMPUTE, Contribution, FinishReport, ModelSpec, StepInputs
from rayzero.optimizer.service import ShardService
from rayzero.store.grpc_client import GrpcStore
from rayzero.store.grpc_server import OwnerServer

TOKEN = "benchmark"
HYPER = ({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},)
SHARD = 2 << 20  # elements


def serve(owner: int, owners: int, pipe: Connection) -> None:
    """One owner's process: say where it listens, hear where all are, serve until told to end."""
    service = ShardService(owner, owners)
    with OwnerServer(service, token=TOKEN) as server:
        pipe.send(server.address)
        server.connect_peers(pipe.recv())
        pipe.send("connected")
        pipe.recv()
    service.close()


def spec_of(sizes: list[int]) -> ModelSpec:
    """One bf16 unit per size (elements)."""
    units = [lay_out_unit(i, f"u{i}", torch.bfloat16, True, [(f"u{i}.w", (n,))]) for i, n in enumerate(sizes)]
    layout = ModelLayout(units=tuple(units), shard_numel=SHARD)
    groups = tuple((0,) for _ in units)
    return ModelSpec(run="b", layout=layout, world_size=1, optimizer="torch.optim:AdamW", hyper=HYPER, group_of=groups)


def timed(rounds: int, work: Callable[[], object]) -> list[float]:
    """Seconds of each round, after one that is not counted."""
    work()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return seconds


def rates(size_bytes: int, seconds: list[float]) -> str:
    """Median (min-max) GB/s."""
    per_second = [size_bytes / s / 1e9 for s in seconds]
    return f"{statistics.median(per_second):5.2f} ({min(per_second):.2f}-{max(per_second):.2f}) GB/s"


def measure(addresses: list[str], sizes: list[int], chunk_bytes: int, rounds: int) -> None:
    """Attach, load, then fetch and push every unit ``rounds`` times."""
    spec = spec_of(sizes)
    store = GrpcStore(0, addresses, token=TOKEN, chunk_bytes=chunk_bytes)
    step = store.attach(spec).version
    loads = [store.load(u.index, torch.randn(u.numel)) for u in spec.layout.units]
    for load in loads:
        load.result()
    buffers = [torch.zeros(unit.numel, dtype=torch.bfloat16) for unit in spec.layout.units]
    for unit, buffer in zip(spec.layout.units, buffers, strict=True):
        fetches = timed(rounds, lambda u=unit.index, b=buffer: store.fetch(u, step, COMPUTE, b).result())
        print(f"  fetch {unit.size_bytes >> 10:7} KiB: {rates(unit.size_bytes, fetches)}  {min(fetches) * 1e3:.2f} ms")
    attempts = count(1)  # a higher one each time: a repeat would be dropped

    def push(unit: int, grads: torch.Tensor) -> None:
        header = Contribution(step=step, attempt=next(attempts), rank=0, unit=unit, seq=0, presence=b"\1")
        store.push(header, grads).result()

    for unit, buffer in zip(spec.layout.units, buffers, strict=True):
        pushes = timed(rounds, lambda u=unit.index, b=buffer: push(u, b))
        print(f"  push  {unit.size_bytes >> 10:7} KiB: {rates(unit.size_bytes, pushes)}  {min(pushes) * 1e3:.2f} ms")
    last = next(attempts)
    for unit, buffer in zip(spec.layout.units, buffers, strict=True):
        header = Contribution(step=step, attempt=last, rank=0, unit=unit.index, seq=0, presence=b"\1")
        store.push(header, buffer).result()
    counts = (1,) * len(sizes)
    start = time.perf_counter()
    report = FinishReport(step=step, attempt=last, rank=0, counts=counts)
    store.finish(report, StepInputs(max_norms=(), hyper=HYPER)).result()
    store.decision(step).result()
    print(f"  finish + decision: {(time.perf_counter() - start) * 1e3:.1f} ms (norm included)")
    store.close()


def main() -> None:
    """Start owners per chunk size, measure, end them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owners", type=int, default=1)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for chunk_mib in (1, 4):
        pairs = [context.Pipe() for _ in range(arguments.owners)]
        processes = [
            context.Process(target=serve, args=(i, arguments.owners, theirs)) for i, (_, theirs) in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        addresses = [ours.recv() for ours, _ in pairs]
        for ours, _ in pairs:
            ours.send(addresses)
        for ours, _ in pairs:
            ours.recv()
        print(f"chunks of {chunk_mib} MiB, {arguments.owners} owners")
        measure(addresses, [arguments.mib << 19, 1 << 20, 1 << 13], chunk_mib << 20, arguments.rounds)
        for ours, _ in pairs:
            ours.send("end")
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
