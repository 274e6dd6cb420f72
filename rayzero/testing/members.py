"""The members of ``run_ranks``: a rank's number, what its context says and how its loop ends; owners, as objects of
this process or servers in it for ranks that are threads, or processes of their own."""

from __future__ import annotations

import secrets
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from rayzero.config import ZeroConfig
from rayzero.elastic.reform import Step, hosts_without_owner
from rayzero.engine.context import RankContext
from rayzero.errors import RankLeftError, RayZeroError
from rayzero.modes import load_compiler_only_to_compile
from rayzero.owner.owned_model import OwnerTerms
from rayzero.protocol.ownership import Ownership
from rayzero.protocol.store import ParameterStore
from rayzero.security.credentials import Identity
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.owner.hosted import ByModel, HostedModels
from rayzero.store.owner.server import OwnerServer, serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.owner_table import OwnerTable
from rayzero.store.remote.remote_connection import RankTerms
from rayzero.telemetry.recorder import MemoryRecorder, Recorder

T = TypeVar("T")
Loop = Callable[[RankContext], T]
Connect = Callable[[int, Recorder, int], ParameterStore]  # (rank, recorder, number of the model) -> its store
LivingConnect = Callable[[int, Recorder, int, int], ParameterStore]  # the same, and how often the rank has died


class Killed(BaseException):
    """Raise it in a rank that is a thread: the rank dies as a process dies that is killed, without a word to anyone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank's number, and what its context says."""

    rank: int
    world_size: int
    run: str  # also the lineage of its states in shared memory
    config: ZeroConfig | None
    resume: Path | None
    run_dir: Path | None
    threads: int

    def context(self, connect: LivingConnect, ending: Ending, life: int) -> RankContext:
        recorder = MemoryRecorder()
        context = RankContext(
            rank=self.rank,
            world_size=self.world_size,
            life=life,
            run=self.run,
            lineage=self.run,
            run_dir=self.run_dir,
            resume=self.resume,
            config=self.config,
            recorder=recorder,
        )
        context.connect = partial(_connected, context, connect, ending)
        return context


@dataclass(slots=True)
class Ending:
    """Why ranks may no longer connect, once one has failed."""

    reason: str | None = None


def _connected(context: RankContext, connect: LivingConnect, ending: Ending, model: int) -> ParameterStore:
    """A store that closes with its rank's context, because another rank's failure may close the context while
    prepare() runs."""
    store = connect(context.rank, context.recorder, model, context.life)
    context.on_close(store.close)
    if ending.reason is not None:  # the context was closed before the store existed
        store.close(ending.reason)
    return store


@dataclass(slots=True)
class RankResult:
    """How one rank ended: with a result, or with an error and its traceback."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    trace: str = ""

    def name_rank(self) -> BaseException:
        """The error, with a note that names the rank, and with the traceback if the error has lost its own."""
        assert self.error is not None
        lost = self.trace and self.error.__traceback__ is None
        self.error.add_note(f"on rank {self.rank}" + (f":\n{self.trace}" if lost else ""))
        return self.error


def outcome_of(fn: Loop[Any], context: RankContext) -> RankResult:
    """Run the loop in its context. The outcome has its result, or the error that it raised."""
    outcome = RankResult(context.rank)
    try:
        outcome.result = fn(context)
    except BaseException as exc:  # run_ranks raises it again
        outcome.error, outcome.trace = exc, traceback.format_exc()
    return outcome


def results_of(outcomes: Sequence[RankResult]) -> list[Any]:
    """The results by rank; ``outcomes``: in the order in which loops ended. Raises the first error: one that says that
    a rank has left only if there is no other, because that rank may leave before its own error is noted."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in sorted(failed, key=lambda outcome: isinstance(outcome.error, RankLeftError)):
        raise outcome.name_rank()
    return [outcome.result for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


# ---- owners ---------------------------------------------------------------------------------------------------------

Lose = Callable[[int, int], None]  # (rank, life): tells the owners that a rank has died and comes back in that life
Reach = Callable[[OwnerTable, int, Recorder, int, int], ParameterStore]
"""How a rank reaches the owners in any process: (they, rank, recorder, number of the model, life) -> its store."""


@dataclass(slots=True)
class OwnersHere:
    """Owners that live as long as this process, for ranks that are its threads."""

    connect: LivingConnect
    lose: Lose


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

    num_optimizers: int  # owners with shards in the first epoch, but for those beside ranks
    num_ranks: int
    beside: int = 0  # owners beside ranks, which come last
    threads: int
    lineage: str  # of the run's states in shared memory
    share: Path | None  # where they make their slabs; None: they have private memory
    hosts: Mapping[str, Path] = field(default_factory=dict)  # see ``run_ranks``
    replaces_ranks: bool = False
    replaces_owners: bool = False
    stall_timeout: float
    config: ZeroConfig  # says how bytes travel over gRPC
    tls: Identity | None = None
    token: str = field(repr=False, default_factory=lambda: secrets.token_hex(16))

    @property
    def ownership(self) -> Ownership:
        doors = len(self.doors)
        return Ownership(self.num_optimizers + doors, doors=doors)

    @property
    def doors(self) -> list[Path | None]:
        """Where the owners without shards make their slabs: one on each host with ranks and no other owner."""
        if self.share is None or self.beside:
            return []
        there = [self.home(owner, 0) for owner in range(self.num_optimizers)]
        return hosts_without_owner(self.homes_of_ranks, there)

    def first_home(self, owner: int) -> Path | None:
        """Where an owner of the first epoch makes its slabs."""
        doors = dict(zip(self.ownership.door_numbers, self.doors, strict=True))
        return doors[owner] if owner in doors else self.home(owner, 0)

    @property
    def homes_of_ranks(self) -> list[Path | None]:
        """Where each rank makes its slabs."""
        return [self.hosts.get(f"rank {rank}", self.share) for rank in range(self.num_ranks)]

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

    def serve(self, models: HostedModels) -> OwnerServer:
        """A server in front of them."""
        return serve_models(
            models,
            token=self.token,
            tls=self.tls,
            replaces_ranks=self.replaces_ranks,
            replaces_owners=self.replaces_owners,
            lineage=self.lineage,
        )

    def reach(self, table: OwnerTable, rank: int, recorder: Recorder, model: int, life: int) -> ParameterStore:
        """A ``Reach`` to these owners."""
        homes = self.homes_of_ranks
        terms = RankTerms(
            token=self.token,
            tls=self.tls,
            stall_timeout=self.stall_timeout,
            wire_compression=self.config.wire_compression,
            share=homes[rank],
            host_push=self.config.pushes_for_host if homes[rank] else "never",
            ranks_here=[other for other, home in enumerate(homes) if home == homes[rank]],
            outlives_owners=self.replaces_owners and self.share is not None,
            recorder=recorder,
            model=model,
            life=life,
        )
        return table.connect(rank, terms)


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
    with ExitStack() as stack:
        servers = []
        for owner in range(service.ownership.num_owners + service.beside):
            models = service.host(owner, 0, service.ownership, service.first_home(owner))
            stack.callback(models.close)
            servers.append(stack.enter_context(service.serve(models)))
        addresses = tuple(server.address for server in servers)
        for server in servers:
            server.connect_peers(addresses)

        def lose(rank: int, life: int) -> None:
            for server in servers:
                server.lose(rank, life)

        yield OwnersHere(partial(reach, OwnerTable(addresses, service.ownership)), lose)


def serve_owner(
    service: Service, owner: int, life: int, ownership: Ownership, home: Path | None, pipe: Connection
) -> None:
    """Be one owner: send its address, and an answer to each order, until None or the pipe's end. ``home``: where it
    makes its slabs."""
    load_compiler_only_to_compile()
    torch.set_num_threads(service.threads)
    models = service.host(owner, life, ownership, home)
    with service.serve(models) as server:
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
