"""A run without Ray whose processes can all be killed at once: one with all owners, and one for each rank."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rayzero.cluster.continuation import Continuation
from rayzero.engine.context import RankContext, running_in
from rayzero.modes import load_compiler_only_to_compile
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.testing.rank_processes import PRELOADED

TOKEN = "the token of this test run"
RUN = "whole"
LINEAGE = "one"


def serve_all(directory: Path, num_owners: int, succeeds: bool, told: Connection) -> None:
    """All owners of a run, until they are told to stop."""
    made = [HostedModels(owner, num_owners, share=directory, succeeds=succeeds) for owner in range(num_owners)]
    terms = {"token": TOKEN, "replaces_ranks": True, "replaces_owners": True, "lineage": LINEAGE}
    servers = [serve_models(models, **terms) for models in made]
    addresses = [server.address for server in servers]
    for server in servers:
        server.connect_peers(addresses)
    told.send(addresses)
    told.recv()
    for server, models in zip(servers, made, strict=True):
        server.stop()
        models.close()


def run_rank(
    loop: Callable[[RankContext], Any],
    rank: int,
    world_size: int,
    directory: Path,
    addresses: list[str],
    goes_on: Continuation | None,
    lineage: str,
    told: Connection,
) -> None:
    """One rank, from its top; tells its result, or the error."""
    load_compiler_only_to_compile()
    life = goes_on.life if goes_on is not None else 0

    def connect(model: int) -> RankStore:
        store = RankStore(
            RemoteConnection(
                rank,
                addresses,
                RankTerms(
                    token=TOKEN,
                    model=model,
                    life=life,
                    stall_timeout=30.0,
                    share=directory,
                    share_with_all=True,
                    outlives_owners=True,
                ),
            )
        )
        context.on_close(store.close)
        return store

    context = RankContext(
        rank=rank,
        world_size=world_size,
        life=life,
        run=RUN,
        lineage=lineage,
        repeats=goes_on.step if goes_on is not None and goes_on.repeats else None,
        connect=connect,
    )
    with running_in(context):
        try:
            result = loop(context)
        except Exception as error:  # the test raises it
            result = error
        told.send_bytes(pickle.dumps(result))


class WholeRun:
    """The processes of one run, or of one that continues it.

    ``results`` waits for the loops; ``kill`` kills everything, as ``kill -9`` of all processes does."""

    def __init__(
        self,
        loop: Callable[[RankContext], Any],
        directory: Path,
        goes_on: Continuation | None = None,
        *,
        world_size: int = 2,
        num_owners: int = 2,
        lineage: str = LINEAGE,
    ) -> None:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(PRELOADED)
        self._processes: list[Any] = []

        def begin(work: Callable[..., None], *args: Any) -> Connection:
            ours, theirs = server.Pipe()
            process = server.Process(target=work, args=(*args, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            return ours

        self._owners = begin(serve_all, directory, num_owners, goes_on is not None)
        addresses = self._owners.recv()
        self._ranks = [
            begin(run_rank, loop, rank, world_size, directory, addresses, goes_on, lineage)
            for rank in range(world_size)
        ]

    def wait_for_a_death(self, timeout_s: float = 60.0) -> None:
        """Return once a process has died or ended."""
        assert wait([process.sentinel for process in self._processes], timeout_s)

    def kill(self) -> None:
        """Kill everything that still runs."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join()

    def results(self) -> list[Any]:
        """What the loops returned, by rank; ends the owners. Raises the first error of a loop."""
        try:
            found = [pickle.loads(pipe.recv_bytes()) for pipe in self._ranks]
            self._owners.send(None)
            for process in self._processes:
                process.join(30)
                assert process.exitcode == 0
        finally:
            self.kill()
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found
