"""A training run over real sockets whose links break at random moments. Alone, it tries many seeds:

scripts/soak links --seed 0 --count 300
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rayzero.checkpoint.writer import staging_path, write_rank_state
from rayzero.protocol.messages import COMPUTE, MASTER, STEP, MeanInput, ModelSpec
from rayzero.protocol.ownership import owner_map
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import OwnerServer, serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.shm.signals import why_no_sharing
from rayzero.store.wire import tensor_streams
from rayzero.telemetry.recorder import MemoryRecorder
from store.proxy import Proxy, all_of
from store.stores import TOKEN
from store.toy import WAIT, Rank, random_grads, start
from store.toy import make_spec as toy_spec

FAULTS = ("cut", "reset", "refuse", "black_hole")
LINKS = ("rank-owner", "rank-lead", "lead-owner", "all")
WAYS = ("grpc", *(["mixed"] if why_no_sharing() is None else []))
"""mixed: owner 0 shares memory, and copies what the others publish"""
STEPS, RANKS, OWNERS = 4, 2, 3


@dataclass
class Net:
    """Owners, and a proxy in front of each for the ranks and one for the lead."""

    servers: list[OwnerServer]
    for_ranks: list[Proxy]
    for_lead: list[Proxy]
    for_tensors: list[Proxy]
    lead: int
    at_owners: MemoryRecorder
    recorder: MemoryRecorder = field(default_factory=MemoryRecorder)  # of the ranks

    def links(self, which: str) -> list[Proxy]:
        others = [owner for owner in range(OWNERS) if owner != self.lead]
        return {
            "rank-owner": [each[owner] for each in (self.for_ranks, self.for_tensors) for owner in others],
            "rank-lead": [self.for_ranks[self.lead], self.for_tensors[self.lead]],
            "lead-owner": [self.for_lead[owner] for owner in others],
            "all": [*self.for_ranks, *self.for_tensors, *(self.for_lead[owner] for owner in others)],
        }[which]

    def connect(self, host: str, port: int) -> socket.socket:
        """What ranks have in place of ``tensor_streams.connect``."""
        proxy = next(proxy for proxy in self.for_tensors if proxy.target == (host, port))
        return socket.create_connection((host, proxy.port), timeout=5)


@contextmanager
def net(
    spec: ModelSpec,
    shares: Sequence[int] = (),
    proxy: Callable[[str], Proxy] = Proxy,
    beside: Callable[[str], Proxy] = Proxy,
    **options: Any,
) -> Iterator[Net]:
    """Servers and their proxies. ``shares``: owners that share memory. ``proxy``, ``beside``: make what is before an
    address of calls, and of tensors. ``options``: of the servers."""
    with ExitStack() as stack:
        servers, recorder = [], MemoryRecorder()
        for owner in range(OWNERS):
            share = SHARED_MEMORY if owner in shares else None
            models = HostedModels(owner, OWNERS, share=share, recorder=recorder)
            stack.callback(models.close)
            servers.append(stack.enter_context(serve_models(models, token=TOKEN, **options)))
        for_ranks = [stack.enter_context(proxy(server.address)) for server in servers]
        for_lead = [stack.enter_context(proxy(server.address)) for server in servers]
        for_tensors = [stack.enter_context(beside(server.tensor_address(server.address))) for server in servers]
        for server in servers:
            server.connect_peers([proxy.address for proxy in for_lead])
        made = Net(servers, for_ranks, for_lead, for_tensors, owner_map(spec, OWNERS).owner(0), recorder)
        with patch.object(tensor_streams, "connect", made.connect):
            yield made


def sharing(way: str) -> list[int]:
    """The owners that share memory with the ranks."""
    return [] if way == "grpc" else [0]


@contextmanager
def ranks_of(made: Net, spec: ModelSpec, way: str = "grpc", **options: Any) -> Iterator[list[Rank]]:
    """Ranks that have attached through the proxies."""
    addresses = [proxy.address for proxy in made.for_ranks]
    terms = {"token": TOKEN, "stall_timeout": 60.0, "recorder": made.recorder}
    terms |= {"grpc": {}, "mixed": {"share": SHARED_MEMORY}}[way]
    with ExitStack() as stack:
        stores = [RankStore(RemoteConnection(rank, addresses, RankTerms(**terms | options))) for rank in range(RANKS)]
        for store in stores:
            stack.callback(store.close)
        yield start(stores, spec)


def make_spec() -> ModelSpec:
    return toy_spec(RANKS, accumulation_steps=2)


def loop(rank: Rank, folder: Path) -> list[Any]:
    """A rank's run: accumulation, clipping, a discarded attempt, a write, a save and means. Returns its losses."""
    losses: list[Any] = []
    for step in range(STEPS):
        asked = [rank.fetch_unit(unit.index) for unit in rank.spec.layout.units]
        for future, out in asked:
            future.result(WAIT)
            losses.append(float(torch.nan_to_num(out).double().sum()))
        for micro in range(2):
            pushes = [
                rank.push_unit(unit.index, random_grads(rank.spec, 100 * step + 10 * micro + rank.rank))
                for unit in rank.spec.layout.units
            ]
            for push in pushes:
                push.result(WAIT)
        given = MeanInput(values=(losses[-1], float(step)), weight=1.0 + rank.rank)
        losses.append(rank.store.mean(given).result(WAIT))
        if step == 1:
            rank.ask_norm().result(WAIT)
            rank.discard().result(WAIT)
            rank.push(random_grads(rank.spec, 1000 + rank.rank))
        if step == 2:
            unit = rank.spec.layout.units[1]
            future, out = rank.fetch_unit(unit.index)
            future.result(WAIT)
            rank.store.write(unit.index, rank.step, COMPUTE, out * 0.5).result(WAIT)
            directory = folder / f"step-{step}"
            file = write_rank_state(staging_path(directory), rank.rank, {"at": step}, {})
            losses.append(rank.store.save(rank.step, directory, (file,)).result(WAIT).digest)
            directory = folder / f"step-{step}-beside"
            files = (write_rank_state(staging_path(directory), rank.rank, {"at": step}, {}),)
            rank.store.begin_save(rank.step, directory, files).result(WAIT)
            losses.append(rank.store.save(rank.step, directory, files, begun=True).result(WAIT).digest)
        if step % 2:
            losses.append(rank.ask_norm().result(WAIT).total)
            losses.append(rank.commit(0.5).result(WAIT).norm)
        else:
            losses.append(rank.finish(0.5).result(WAIT).total)
    return losses


def outcome(ranks: Sequence[Rank], folder: Path) -> tuple[list[Any], dict[str, Tensor]]:
    """Run every rank's loop in a thread of its own: their losses, and masters, moments and step counts at the end."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        losses = [running.result() for running in [threads.submit(loop, rank, folder) for rank in ranks]]
    state = {}
    for unit in ranks[0].spec.layout.units:
        for kind in (MASTER, "exp_avg", "exp_avg_sq", STEP):
            future, out = ranks[0].fetch_unit(unit.index, kind=kind)
            future.result(WAIT)
            state[f"{unit.name} {kind}"] = out
    return losses, state


def difference(found: tuple[list[Any], dict[str, Tensor]], expected: tuple[list[Any], dict[str, Tensor]]) -> list[str]:
    """What two runs do not have in common, bit by bit."""
    differs = [name for name in expected[1] if not torch.equal(found[1][name], expected[1][name])]
    return differs + [f"losses of rank {r}" for r in range(RANKS) if found[0][r] != expected[0][r]]


@cache
def undisturbed(way: str) -> tuple[tuple[list[Any], dict[str, Tensor]], dict[str, list[int]]]:
    """What a run without faults ends with, and the bytes that pass each link in it, by ``LINKS``."""
    spec = make_spec()
    with tempfile.TemporaryDirectory() as folder, net(spec, sharing(way)) as made, ranks_of(made, spec, way) as ranks:
        found = outcome(ranks, Path(folder))
        return found, {which: [proxy.passed for proxy in made.links(which)] for which in LINKS}


def run(seed: int, fault: str | None = None, which: str | None = None, way: str | None = None) -> list[str]:
    """A run with one to four faults of a kind, each after a random number of bytes; what differs from the undisturbed
    run. Raises what the run raises."""
    rng, spec = random.Random(seed), make_spec()
    fault, which, way = fault or rng.choice(FAULTS), which or rng.choice(LINKS), way or rng.choice(WAYS)
    expected, bytes_of = undisturbed(way)
    with tempfile.TemporaryDirectory() as folder, net(spec, sharing(way)) as made:
        proxies = made.links(which)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(proxies))
            seconds = rng.uniform(0.01, 0.4)
            acts = {
                "cut": Proxy.cut,
                "reset": Proxy.reset,
                "refuse": partial(Proxy.refuse, seconds=seconds),
                "black_hole": partial(Proxy.black_hole, seconds=seconds),
            }
            proxies[at].at(rng.randrange(max(1, bytes_of[which][at])), all_of(proxies, acts[fault]))
        with ranks_of(made, spec, way) as ranks:
            return difference(outcome(ranks, Path(folder)), expected)


def main() -> None:
    """Try seeds; print those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    failed, began = 0, time.monotonic()
    for seed in range(options.seed, options.seed + options.count):
        try:
            what = ", ".join(run(seed))
        except Exception:
            what = traceback.format_exc()
        if what:
            failed += 1
            replay = f"scripts/soak links --seed {seed} --count 1"
            print(f"FAILED {replay}: {what}", flush=True)
    print(f"{options.count} runs, {failed} failed, {time.monotonic() - began:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
