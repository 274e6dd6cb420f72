"""Measures how fast an owner takes shards over from one on another host.

    python -m lab give_shards [--mib 32] [--rounds 5]

Two processes on loopback, with and without mutual TLS. One is an owner that stands still: it has a bf16 unit of
``--mib`` in shards of 4 MiB, each with its fp32 master and Adam's two moments, so seven times as many bytes. This one
takes all of them into its memory, as an owner does between two epochs. ``socket``: as many bytes over a bare TCP
socket, from a tensor into a tensor. All take turns, and the first round does not count. CPU seconds are of both
processes together.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection

import torch

from lab.bench.figures import Cost, Spread, about, at_least_one
from lab.bench.raw_stream import build_raw
from lab.bench.store import spec_of
from lab.bench.turns import Seat, Turn
from rayzero.security.authority import Authority
from rayzero.security.credentials import OWNER, Identity, name_of_rank
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.owner.shard_source import RemoteShards
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.wire.rpc import CallTerms

MIB = 1 << 20
TOKEN = "benchmark"


def own(pipe: Connection, mib: int, shown: Identity | None) -> None:
    """Be an owner that stands still: send its address, and the sizes of its shards' tensors; end when told to."""
    torch.set_num_threads(1)
    models, spec = HostedModels(0, 1, share=SHARED_MEMORY), spec_of([mib * MIB])
    with serve_models(models, token=TOKEN, tls=shown) as server:
        server.connect_peers([server.address])
        store = RankStore(RemoteConnection(0, [server.address], RankTerms(token=TOKEN, tls=shown, share=SHARED_MEMORY)))
        store.attach(spec)
        store.load(0, torch.randn(spec.layout.units[0].numel)).result()
        server.hold()
        server.settle()
        service, shared = models[0]
        assert shared is not None
        sizes = {s.index: [t.nbytes for t in shared.carried(service.shard(s.index))] for s in spec.layout.shards}
        pipe.send((server.address, sizes))
        pipe.recv()
        store.close()
    models.close()


@contextmanager
def owner(mib: int, shown: Identity | None) -> Iterator[tuple[int, str, dict[int, list[int]]]]:
    """The process of an owner, its address, and the sizes of its shards' tensors."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=own, args=(theirs, mib, shown))
    process.start()
    try:
        assert process.pid is not None
        yield process.pid, *ours.recv()
    finally:
        ours.send(None)
        process.join()


def take(address: str, shown: Identity | None, into: dict[int, list[torch.Tensor]]) -> None:
    """Take all shards over."""
    source = RemoteShards(
        0,
        address,
        CallTerms(token=TOKEN, tls=shown),
        taker=1,
        timeout_s=60.0,
        given_up=threading.Event(),
    )
    source.give(into)


def measure(mib: int, rounds: int) -> dict[str, list[Cost]]:
    """What every turn cost, by way."""
    issued = Authority("benchmark", on_loopback=True).issue("both", [OWNER, name_of_rank(0)])
    costs = defaultdict[str, list[Cost]](list)
    turns: dict[str, Callable[[], Cost]] = {}
    with owner(mib, None) as plain, owner(mib, Identity(issued)) as protected:
        into = {shard: [torch.zeros(size, dtype=torch.uint8) for size in sizes] for shard, sizes in plain[2].items()}
        size = sum(tensor.nbytes for tensors in into.values() for tensor in tensors)
        for (pid, address, _), shown in ((plain, None), (protected, Identity(issued))):
            turns["TLS" if shown else "plain"] = partial(Cost.of, partial(take, address, shown, into), [pid])
        bare = build_raw(size, (), False, Seat(rank=0, world_size=1, threads=1, pipe=multiprocessing.Pipe()[0]))
        turns["socket"] = lambda: bare.play(Turn())["costs"]["down into a tensor, a socket"][0]
        for round_ in range(rounds + 1):
            for name, turn in turns.items():
                cost = turn()
                if round_:
                    costs[name].append(Cost(cost.seconds / size * 1e9, cost.cpu_seconds / size * 1e9))
    return costs


def main() -> None:
    """Print a line of JSON a way, and the machine's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("mib", 32), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=at_least_one, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(about()))
    for way, costs in measure(given.mib, given.rounds).items():
        speed, used = Spread.of(1 / cost.seconds for cost in costs), Spread.of(cost.cpu_seconds for cost in costs)
        print(json.dumps({"way": way, "GB/s": asdict(speed), "CPU s/GB": asdict(used)}))
