"""Processes are killed at any moment of training; the owners' successors continue from what they left, bit for bit."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayzero.errors import HandshakeError
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.owner.owned_model import OwnerTerms
from rayzero.owner.service import ShardService
from rayzero.protocol.gradient_sum import GradientMemory
from rayzero.protocol.messages import ModelSpec
from rayzero.slabs.sweep import list_slabs, sweep
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import OwnerServer, serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.store.shm.shard_lines import ShardLines
from rayzero.testing.rank_processes import PRELOADED
from tests.support import needs

from .stores import TOKEN, inprocess
from .toy import WAIT, make_spec, random_grads, start, take_step

pytestmark = needs.signals_between_processes

RANKS, STEPS, CLIP = 2, 400, 0.5
KINDS = ("master", "exp_avg", "exp_avg_sq", "step")


def spec_of(run: str, **fields: Any) -> ModelSpec:
    """Three units of several tiles, in shards over both owners; one has parameters that miss every second step."""
    sizes = [("a", [("a.w", (700, 512))]), ("b", [("b.w", (300, 512)), ("b.odd", (130, 512))]), ("c", [("c.w", (9,))])]
    units = tuple(lay_out_unit(i, name, torch.bfloat16, True, slots) for i, (name, slots) in enumerate(sizes))
    layout = ModelLayout(units=units, shard_numel=1 << 17)
    group_of = tuple((0,) * len(unit.slots) for unit in units)
    return replace(make_spec(RANKS), run=run, layout=layout, group_of=group_of, kernel="native", **fields)


@cache
def gradients(step: int, rank: int) -> dict[str, Tensor]:
    """By parameter; ``b.odd`` has one at odd steps only."""
    found = random_grads(spec_of("any"), 10 * (step % 3) + rank)
    return found if step % 2 else {name: grad for name, grad in found.items() if name != "b.odd"}


def states(service: ShardService, shard: int, version: int) -> list[Tensor]:
    return [service.read(shard, version, kind).result(WAIT).clone() for kind in KINDS]


class Undisturbed:
    """The states that a run which nobody kills has at each version, by shard."""

    def __init__(self, **fields: Any) -> None:
        self._stack = ExitStack()
        stores = self._stack.enter_context(inprocess(RANKS, 1))
        self._ranks = start(list(stores), spec_of("undisturbed", **fields))
        self._service: ShardService = stores[0].connection.owners.services[0]  # type: ignore[attr-defined]
        self._at: dict[int, dict[int, list[Tensor]]] = {}

    def at(self, version: int) -> dict[int, list[Tensor]]:
        shards = range(len(self._ranks[0].spec.layout.shards))
        while version not in self._at:
            step = self._ranks[0].step
            self._at[step] = {shard: states(self._service, shard, step) for shard in shards}
            take_step(self._ranks, [gradients(step, rank) for rank in range(RANKS)], CLIP)
        return self._at[version]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module", params=["fp32", "bf16", "int8"])
def undisturbed(request: pytest.FixtureRequest) -> Iterator[tuple[str, Undisturbed]]:
    run = Undisturbed(moments=request.param)
    yield request.param, run
    run.close()


# ---- a whole run in a process, to be killed


def train(directory: Path, spec: ModelSpec, num_owners: int, told: Connection) -> None:
    """Owners, ranks and their loop, in this process. Tells the steps whose norms it has got."""
    servers: list[OwnerServer] = []
    for owner in range(num_owners):
        models = HostedModels(owner, num_owners, OwnerTerms(threads=2), share=directory)
        servers.append(serve_models(models, token=TOKEN))
    addresses = [server.address for server in servers]
    for server in servers:
        server.connect_peers(addresses)
    stores = [
        RankStore(RemoteConnection(rank, addresses, RankTerms(token=TOKEN, share=directory))) for rank in range(RANKS)
    ]
    ranks = start(stores, spec)
    for step in range(STEPS):
        take_step(ranks, [gradients(step, rank) for rank in range(RANKS)], CLIP)
        told.send(step)


def killed(directory: Path, spec: ModelSpec, num_owners: int, after: int, seed: int) -> int:
    """Train in a process and kill it after some steps and a random while; the last step that it had told of."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    ours, theirs = server.Pipe(duplex=False)
    process = server.Process(target=train, args=(directory, spec, num_owners, theirs))
    process.start()
    theirs.close()
    last = -1
    while last < after:
        last = ours.recv()
    time.sleep(random.Random(seed).random() * 0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    try:
        while True:
            last = ours.recv()
    except EOFError:
        return last


# ---- the successors


@dataclass
class Successors:
    """Owners that have taken over what a killed process left, the dead ranks' gradients included."""

    services: list[ShardService]
    version: int

    def states(self) -> dict[int, list[Tensor]]:
        return {
            shard: states(service, shard, self.version)
            for service in self.services
            for shard in service._attached().model.shards
        }


def succeed(stack: ExitStack, directory: Path, spec: ModelSpec, num_owners: int, threads: int = 2) -> Successors:
    made = []
    for owner in range(num_owners):
        models = HostedModels(owner, num_owners, OwnerTerms(threads=threads), share=directory, succeeds=True)
        stack.callback(models.close)
        server = stack.enter_context(serve_models(models, token=TOKEN))
        made.append((server, *models[0]))
    addresses = [server.address for server, _, _ in made]
    versions = []
    for server, service, _ in made:
        server.connect_peers(addresses)
        versions.append(service.attach(0, spec, own_gradients=True).version)
    model = made[0][0]._models[0].model
    model.take_spec(spec)
    model.require_lead().attach(0, spec, min(versions))
    newest = max([*versions, *(record.decision.step + 1 for record in made[0][2].records())])
    return Successors([service for _, service, _ in made], newest)


def same(ours: dict[int, list[Tensor]], theirs: dict[int, list[Tensor]]) -> list[tuple[int, str]]:
    """What differs, as (shard, kind)."""
    assert ours.keys() == theirs.keys()
    rows = [(shard, zip(KINDS, ours[shard], theirs[shard], strict=True)) for shard in ours]
    return [(shard, kind) for shard, row in rows for kind, a, b in row if not torch.equal(a, b)]


@pytest.mark.promise("recoverable", "optimizers")
@pytest.mark.spread(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_owners", [1, 2])
def test_a_run_that_was_killed_at_any_moment_loses_no_committed_step(
    undisturbed: tuple[str, Undisturbed], num_owners: int, seed: int, slab_dir: Path
) -> None:
    moments, expected = undisturbed
    spec = spec_of(f"killed{seed}", moments=moments)
    told = killed(slab_dir, spec, num_owners, after=2 + seed, seed=seed)
    with ExitStack() as stack:
        found = succeed(stack, slab_dir, spec, num_owners)
        assert found.version > told
        assert same(found.states(), expected.at(found.version)) == []
    sweep(slab_dir)
    assert list_slabs(slab_dir) == []


@pytest.mark.spread(1)
def test_a_rank_that_dies_before_it_meets_the_successor_is_read_once_its_next_life_comes(
    undisturbed: tuple[str, Undisturbed], slab_dir: Path
) -> None:
    moments, expected = undisturbed
    spec = spec_of("between", moments=moments)
    killed(slab_dir, spec, 1, after=2, seed=1)
    headers = [(slab.path, slab.header.facts) for slab in list_slabs(slab_dir) if slab.header is not None]
    ours = [path for path, facts in headers if facts.index == 1 and facts.role in ("grads", "control")]
    alive = [os.open(path, os.O_RDWR) for path in ours]
    for file in alive:
        fcntl.flock(file, fcntl.LOCK_EX)
    with ExitStack() as stack:
        found = succeed(stack, slab_dir, spec, 1)
        for file in alive:
            os.close(file)
        (service,) = found.services
        service.attach(1, spec, own_gradients=True)
        flats = {unit.index: torch.zeros(unit.numel) for unit in spec.layout.units}
        service.map_gradients(1, GradientMemory(flats), back_at=found.version)
        assert same(found.states(), expected.at(found.version)) == []


# ---- what cannot be continued is refused by name, and stays for whoever can


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"moments": "int8"}, r"has nothing as tensor 1 of shard 0, expected \d+ bytes of torch.float32"),
    (
        {"world_size": 3},
        "answers, joined, orders, record has another size; continue with the same model, number of ranks",
    ),
]


def states_in(directory: Path) -> list[Path]:
    """All slabs but lobbies: nobody takes over where a dead process was called."""
    return [slab.path for slab in list_slabs(directory) if slab.header is None or slab.header.facts.role != "lobby"]


def refuse(directory: Path, spec: ModelSpec, error: type[Exception], message: str) -> None:
    models = HostedModels(0, 1, OwnerTerms(threads=2), share=directory, succeeds=True)
    service, shared = models[0]
    with pytest.raises(error, match=message):
        service.attach(0, spec, own_gradients=True)
    models.close()
    assert shared is not None
    shared.close()


def test_what_a_successor_cannot_continue_it_refuses_and_leaves(slab_dir: Path) -> None:
    spec = spec_of("refused")
    killed(slab_dir, spec, 1, after=2, seed=0)
    left = states_in(slab_dir)
    for fields, message in REFUSED:
        refuse(slab_dir, replace(spec, **fields), HandshakeError, message)
    assert states_in(slab_dir) == left


@pytest.mark.spread(1)
def test_a_successor_with_other_threads_continues(slab_dir: Path, undisturbed: tuple[str, Undisturbed]) -> None:
    moments, expected = undisturbed
    spec = spec_of("threads", moments=moments)
    killed(slab_dir, spec, 1, after=1, seed=5)
    with ExitStack() as stack:
        found = succeed(stack, slab_dir, spec, 1, threads=3)
        assert same(found.states(), expected.at(found.version)) == []


@pytest.mark.parametrize("described", [True, False])
def test_slabs_without_any_published_shard_are_replaced(slab_dir: Path, described: bool) -> None:
    """The process died before rank 0 had loaded the first shard, or before the lines said which shards they are of."""
    spec = spec_of("empty")
    program = multiprocessing.get_context("forkserver").Process(target=attach_and_die, args=(slab_dir, spec, described))
    program.start()
    program.join()
    assert program.exitcode == -signal.SIGKILL
    before = {slab.path for slab in list_slabs(slab_dir)}
    models = HostedModels(0, 1, share=slab_dir, succeeds=True)
    service, shared = models[0]
    assert service.attach(0, spec, own_gradients=True).needs_load
    assert before
    assert before.isdisjoint({slab.path for slab in list_slabs(slab_dir)})
    models.close()
    assert shared is not None
    shared.close()
    assert list_slabs(slab_dir) == []


def attach_and_die(directory: Path, spec: ModelSpec, described: bool) -> None:
    if not described:
        ShardLines.describe = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    HostedModels(0, 1, share=directory)[0].service.attach(0, spec, own_gradients=True)
    os.kill(os.getpid(), signal.SIGKILL)
