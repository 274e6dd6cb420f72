"""Owners are killed while ranks train on; their successors take over, and the ranks notice nothing but time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rayzero.protocol.messages import ModelSpec
from rayzero.slabs.slab import list_slabs
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.rank.remote import RemoteConnection
from rayzero.store.rank.store import RankStore
from rayzero.store.shm.signals import available

from .stores import TOKEN
from .test_succession import CLIP, KINDS, RANKS, Undisturbed, gradients, spec_of
from .toy import Rank, start, take_step

SEEDS = 3
pytestmark = pytest.mark.skipif(available() is not None, reason="no signals between processes here")


def serve(directory: Path, owner: int, num_owners: int, told: Connection, succeeds: bool) -> None:
    """One owner, until it is told to stop."""
    models = HostedModels(owner, num_owners, share=directory, threads=2, succeeds=succeeds)
    with serve_models(models, token=TOKEN, replaces_owners=True) as server:
        told.send(server.address)
        server.connect_peers(told.recv())
        while (order := told.recv()) is not None:
            server.succeed(*order)
    models.close()


class Owners:
    """The owners' processes, each replaced when it is killed."""

    def __init__(self, directory: Path, num_owners: int) -> None:
        self.directory, self.num = directory, num_owners
        self.stores: list[RankStore] = []
        self._server = multiprocessing.get_context("forkserver")
        self._server.set_forkserver_preload(["rayzero.testing", "tests.store.test_owner_deaths"])
        self._made = [self._start(owner, succeeds=False) for owner in range(num_owners)]
        self.addresses = [pipe.recv() for _, pipe in self._made]
        for _, pipe in self._made:
            pipe.send(self.addresses)

    def _start(self, owner: int, *, succeeds: bool) -> tuple[Any, Connection]:
        ours, theirs = self._server.Pipe()
        process = self._server.Process(target=serve, args=(self.directory, owner, self.num, theirs, succeeds))
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
            future.result(20)
        found[unit.index] = [out for _, out in asked]
    return found


def run(directory: Path, spec: ModelSpec, num_owners: int, steps: int, kills: list[tuple[float, int]]) -> Any:
    """Train while owners are killed after so many seconds each; the states, and the seconds of each succession."""
    owners = Owners(directory, num_owners)
    pauses: list[float] = []
    with ExitStack() as stack:
        stack.callback(owners.close)
        owners.stores = [
            RankStore(RemoteConnection(rank, owners.addresses, token=TOKEN, share=directory, outlives_owners=True))
            for rank in range(RANKS)
        ]
        for store in owners.stores:
            stack.callback(store.close)
        ranks = start(owners.stores, spec)

        def kill() -> None:
            for after, owner in kills:
                time.sleep(after)
                pauses.append(owners.kill(owner))

        killer = threading.Thread(target=kill)
        killer.start()
        step = 0
        while step < steps or killer.is_alive():
            take_step(ranks, [gradients(step, rank) for rank in range(RANKS)], CLIP)
            step += 1
        killer.join()
        return step, states(ranks[0], step), pauses


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("num_owners", [1, 2])
def test_ranks_outlive_their_owners(num_owners: int, seed: int, slab_dir: Path) -> None:
    spec = spec_of(f"deaths{seed}")
    draw = random.Random(seed)
    kills = [(0.2 + draw.random() / 5, draw.randrange(num_owners)) for _ in range(2)]
    step, found, _ = run(slab_dir, spec, num_owners, 20, kills)
    undisturbed = Undisturbed()
    try:
        expected = undisturbed.at(step)
    finally:
        undisturbed.close()
    layout = spec.layout
    for unit in layout.units:
        for kind, ours in zip(KINDS, found[unit.index], strict=True):
            for shard in layout.shards_by_unit[unit.index]:
                theirs = expected[shard.index][KINDS.index(kind)]
                assert bool((ours[shard.start : shard.stop] == theirs).all()), (unit.name, kind, shard.index)
    assert list_slabs(slab_dir) == []
