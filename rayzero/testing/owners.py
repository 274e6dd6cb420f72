"""The owners of ``run_ranks``: objects of this process, servers in this process, or processes of their own."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rayzero.config import ZeroConfig
from rayzero.elastic.reform import Step
from rayzero.errors import RayZeroError
from rayzero.owner.terms import OwnerTerms
from rayzero.protocol.ownership import Ownership
from rayzero.protocol.store import ParameterStore
from rayzero.security.credentials import Identity
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.owner.by_model import ByModel
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import OwnerServer, serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.owner_table import OwnerTable
from rayzero.store.remote.remote_connection import RankTerms
from rayzero.telemetry.recorder import Recorder
from rayzero.testing.place import LivingConnect

Lose = Callable[[int, int], None]  # (rank, life): tells the owners that a rank has died and comes back in that life
Reach = Callable[[OwnerTable, int, Recorder, int, int], ParameterStore]
"""How a rank reaches the owners in any process: (they, rank, recorder, number of the model, life) -> its store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedReach:
    """To owners behind servers."""

    token: str = field(repr=False)
    stall_timeout: float
    share: Path | None
    hosts: Mapping[str, Path] = field(default_factory=dict)  # see ``run_ranks``
    config: ZeroConfig
    outlives_owners: bool = False
    world_size: int = 1
    tls: Identity | None = None

    def __call__(self, table: OwnerTable, rank: int, recorder: Recorder, model: int, life: int) -> ParameterStore:
        terms = RankTerms(
            token=self.token,
            tls=self.tls,
            stall_timeout=self.stall_timeout,
            wire_compression=self.config.wire_compression,
            share=self._host_of(rank),
            host_push=self.config.pushes_for_host if self.share else "never",
            ranks_here=self._ranks_with(rank),
            outlives_owners=self.outlives_owners,
            recorder=recorder,
            model=model,
            life=life,
        )
        return table.connect(rank, terms)

    def _host_of(self, rank: int) -> Path | None:
        return self.hosts.get(f"rank {rank}", self.share)

    def _ranks_with(self, rank: int) -> list[int]:
        """The ranks on the host of one, itself included."""
        return [other for other in range(self.world_size) if self._host_of(other) == self._host_of(rank)]


@dataclass(slots=True)
class OwnersHere:
    """Owners that live as long as this process."""

    connect: LivingConnect  # for ranks that are threads
    lose: Lose
    reach: Reach | None = None  # for ranks that are processes; None: they cannot reach these owners
    addresses: tuple[str, ...] = ()
    ownership: Ownership | None = None  # who owns what; None: there are no doors


@contextmanager
def local_owners(num_optimizers: int, beside_ranks: int, threads: int, stall_timeout: float) -> Iterator[OwnersHere]:
    """Plain objects of this process."""

    def make(_: int) -> LocalOwners:
        return LocalOwners(num_optimizers, threads=threads, devices=[torch.device("cpu")] * beside_ranks)

    def lose(rank: int, life: int) -> None:
        for owners in models.made:
            owners.lose(rank, life)

    def connect(rank: int, recorder: Recorder, model: int, life: int) -> ParameterStore:
        return RankStore(
            LocalConnection(rank, models[model], stall_timeout=stall_timeout, recorder=recorder, life=life)
        )

    models = ByModel(make)
    try:
        yield OwnersHere(connect, lose)
    finally:
        for owners in models.close():
            owners.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What all owners behind servers have in common."""

    num_owners: int  # all of them in the first epoch
    beside: int = 0  # of them beside ranks, the last ones
    doors: tuple[Path, ...] = ()  # where the owners before those make their slabs, which have no shards
    threads: int
    lineage: str  # of the run's states in shared memory
    share: Path | None  # where they make their slabs; None: they have private memory
    hosts: Mapping[str, Path] = field(default_factory=dict)  # see ``run_ranks``
    replaces_ranks: bool = False
    tls: Identity | None = None
    token: str = field(repr=False, default_factory=lambda: secrets.token_hex(16))

    @property
    def ownership(self) -> Ownership:
        """Who owns what in the first epoch."""
        return Ownership(self.num_owners - self.beside, doors=len(self.doors))

    def first_home(self, owner: int) -> Path | None:
        """Where an owner of the first epoch makes its slabs."""
        doors = dict(zip(self.ownership.door_numbers, self.doors, strict=True))
        return doors[owner] if owner in doors else self.home(owner, 0)

    def home(self, owner: int, life: int) -> Path | None:
        """Where an owner with shards makes its slabs in this life."""
        named = self.hosts.get(f"optimizer {owner}", self.share)
        return self.hosts.get(f"optimizer {owner} in life {life}", named)

    def host(self, owner: int, life: int, ownership: Ownership, home: Path | None) -> HostedModels:
        """An owner's shards, in a later life those of its predecessor. ``home``: where it makes its slabs."""
        return HostedModels(
            owner,
            ownership.num_owners + self.beside,
            OwnerTerms(threads=self.threads),
            ownership=ownership,
            share=home,
            succeeds=life > 0 or ownership.epoch > 0,
        )

    def serve(self, models: HostedModels, *, replaces_owners: bool) -> OwnerServer:
        """A server in front of them."""
        return serve_models(
            models,
            token=self.token,
            tls=self.tls,
            replaces_ranks=self.replaces_ranks,
            replaces_owners=replaces_owners,
            lineage=self.lineage,
        )


def _carry_out(server: OwnerServer, order: tuple[Any, ...], pipe: Connection, sending: threading.Lock) -> None:
    """Call a method of ``server``, and send its name, what it returns, and why it refuses if it does."""
    method, *arguments = order
    answer: tuple[str, object, str | None]
    try:
        answer = method, getattr(server, method)(*arguments), None
    except RayZeroError as error:
        answer = method, None, str(error)
    with sending, suppress(OSError):  # the supervisor has died, or needs this owner no more
        pipe.send(answer)


@contextmanager
def served_owners(service: Service, reach: Reach) -> Iterator[OwnersHere]:
    """Behind servers, in this process."""
    with ExitStack() as stack:
        servers = []
        for owner in range(service.num_owners):
            models = service.host(owner, 0, service.ownership, service.first_home(owner))
            stack.callback(models.close)
            servers.append(stack.enter_context(service.serve(models, replaces_owners=False)))
        addresses = tuple(server.address for server in servers)
        for server in servers:
            server.connect_peers(addresses)

        def lose(rank: int, life: int) -> None:
            for server in servers:
                server.lose(rank, life)

        table = OwnerTable(addresses, service.ownership)
        yield OwnersHere(partial(reach, table), lose, reach, addresses, service.ownership)


def serve_owner(
    service: Service, owner: int, life: int, ownership: Ownership, home: Path | None, pipe: Connection
) -> None:
    """Be one owner: send its address, and an answer to each order, until None or the pipe's end. ``home``: where it
    makes its slabs."""
    torch.set_num_threads(service.threads)
    models = service.host(owner, life, ownership, home)
    with service.serve(models, replaces_owners=True) as server:
        pipe.send(server.address)
        sending = threading.Lock()
        try:
            while (order := pipe.recv()) is not None:
                if order[0] in list(Step):  # it may wait for others, who may need other orders to be carried out
                    threading.Thread(target=_carry_out, args=(server, order, pipe, sending), daemon=True).start()
                else:
                    _carry_out(server, order, pipe, sending)
        except EOFError:  # its supervisor has died
            pass
    models.close()
