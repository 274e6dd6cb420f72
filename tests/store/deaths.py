"""Owners in processes of their own, which are killed and replaced while ranks in this process train on."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayzero.owner.gradients import contributions
from rayzero.owner.owned_model import OwnerTerms
from rayzero.protocol.messages import ModelSpec
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.testing.rank_processes import PRELOADED

from .stores import TOKEN, inprocess
from .test_succession import CLIP, KINDS, RANKS, gradients
from .toy import WAIT, Rank, start


def serve(directory: Path, owner: int, num_owners: int, told: Connection, succeeds: bool) -> None:
    """One owner, until it is told to stop. It adds up a shard as soon as every rank has pushed it, however small."""
    contributions.EARLY = 1
    models = HostedModels(owner, num_owners, OwnerTerms(threads=2), share=directory, succeeds=succeeds)
    with serve_models(models, token=TOKEN, replaces_owners=True) as server:
        told.send(server.address)
        server.connect_peers(told.recv())
        while (order := told.recv()) is not None:
            server.succeed(*order)
    models.close()


class Owners:
    """The owners' processes, each replaced when it is killed."""

    def __init__(self, directory: Path, num_owners: int, other_host: Path | None = None) -> None:
        """``other_host``: the memory of another host, on which all owners but the first are."""
        self._directories = [directory, *[other_host or directory] * (num_owners - 1)]
        self.num = num_owners
        self.stores: list[RankStore] = []
        self._server = multiprocessing.get_context("forkserver")
        self._server.set_forkserver_preload(PRELOADED)
        self._made = [self._start(owner, succeeds=False) for owner in range(num_owners)]
        self.addresses = [pipe.recv() for _, pipe in self._made]
        for _, pipe in self._made:
            pipe.send(self.addresses)

    def _start(self, owner: int, *, succeeds: bool) -> tuple[Any, Connection]:
        ours, theirs = self._server.Pipe()
        process = self._server.Process(target=serve, args=(self._directories[owner], owner, self.num, theirs, succeeds))
        process.start()
        theirs.close()
        return process, ours

    def kill(self, owner: int) -> float:
        """Kill it and start its successor; the seconds until that was told to everybody."""
        process, _ = self._made[owner]
        os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        process.join()
        self._made[owner] = self._start(owner, succeeds=True)
        _, pipe = self._made[owner]
        self.addresses[owner] = pipe.recv()
        pipe.send(self.addresses)
        for other, (_, theirs) in enumerate(self._made):
            if other != owner:
                theirs.send((owner, self.addresses[owner]))
        for store in self.stores:
            store.connection.succeed(owner, self.addresses[owner])  # type: ignore[attr-defined]
        return time.monotonic() - began

    def close(self) -> None:
        for process, pipe in self._made:
            pipe.send(None)
            process.join(20)
            assert process.exitcode == 0


def states(rank: Rank, version: int) -> dict[int, list[Tensor]]:
    """By unit."""
    found: dict[int, list[Tensor]] = {}
    for unit in rank.spec.layout.units:
        asked = [rank.fetch_unit(unit.index, version, kind) for kind in KINDS]
        for future, _ in asked:
            future.result(WAIT)
        found[unit.index] = [out for _, out in asked]
    return found


Step = Callable[[Rank], list[Any]]  # one rank's step; what its loop sees of it
Kill = tuple[int, float, int]  # the step of rank 0, seconds after it begins, owner


@dataclass
class Run:
    """What came of a run."""

    seen: list[list[Any]]  # by rank, what its loop saw
    states: dict[int, list[Tensor]]  # by unit
    pauses: list[float] = field(default_factory=list)  # seconds until each successor was told of


def each_alone(ranks: Sequence[Rank], steps: int, step: Step) -> list[list[Any]]:
    """Let each rank take its steps in a thread of its own; what the loops saw, by rank."""

    errors: list[Exception] = []

    def loop(rank: Rank) -> list[Any]:
        try:
            return [value for _ in range(steps) for value in step(rank)]
        except Exception as error:  # the first one is raised below: the others wait in vain for that rank
            errors.append(error)
            rank.store.close()
            return []

    with ThreadPoolExecutor(len(ranks)) as pool:
        seen = list(pool.map(loop, ranks))
    if errors:
        raise errors[0]
    return seen


def train(rank: Rank) -> list[Any]:
    """One step; with accumulation several pushes of each unit."""
    rank.fetch()
    for seq in range(rank.spec.accumulation_steps):
        grads = gradients(rank.step + 2 * seq, rank.rank)
        rank.push(grads, [u.index for u in rank.spec.layout.units if any(slot.name in grads for slot in u.slots)])
    return [rank.finish(CLIP).result(WAIT).total]


def undisturbed(spec: ModelSpec, steps: int, step: Step) -> Run:
    """A run in this process that nobody kills."""
    with inprocess(RANKS, 1) as stores:
        ranks = start(list(stores), spec)
        return Run(each_alone(ranks, steps, step), states(ranks[0], steps))


def disturbed(
    directory: Path,
    spec: ModelSpec,
    steps: int,
    step: Step,
    kills: Sequence[Kill],
    *,
    num_owners: int = 2,
    shares: Sequence[bool] = (False,) * RANKS,
    other_host: Path | None = None,
    **options: Any,
) -> Run:
    """The same over owners that are killed. ``shares``: by rank, whether it shares memory with them; it uses gRPC else.
    ``other_host``: see ``Owners``. ``options``: of every rank's connection."""
    owners = Owners(directory, num_owners, other_host)
    pauses: list[float] = []
    with ExitStack() as stack:
        stack.callback(owners.close)
        for rank, shared in enumerate(shares):
            share = directory if shared else None
            connection = RemoteConnection(
                rank, owners.addresses, RankTerms(token=TOKEN, share=share, outlives_owners=True, **options)
            )
            owners.stores.append(stack.enter_context(closing(RankStore(connection))))
        ranks = start(owners.stores, spec)
        over = threading.Event()

        def kill() -> None:
            for at, after, owner in kills:
                while ranks[0].step < at and not over.is_set():
                    time.sleep(0.0005)
                time.sleep(after)
                pauses.append(owners.kill(owner))

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            seen = each_alone(ranks, steps, step)
        finally:
            over.set()
            killer.join()
        return Run(seen, states(ranks[0], steps), pauses)


def differing(spec: ModelSpec, ours: Run, theirs: Run) -> list[tuple[str, str]]:
    """The states that differ, as (unit, kind). What the loops saw must be equal."""
    assert ours.seen == theirs.seen
    return [
        (unit.name, kind)
        for unit in spec.layout.units
        for kind, a, b in zip(KINDS, ours.states[unit.index], theirs.states[unit.index], strict=True)
        if not torch.equal(a, b)
    ]


def random_kills(seed: int, num_owners: int, steps: int, count: int) -> list[Kill]:
    """At random moments of the first steps."""
    draw = random.Random(seed)
    at = sorted(draw.randrange(1, steps) for _ in range(count))
    return [(step, draw.random() * 0.02, draw.randrange(num_owners)) for step in at]
