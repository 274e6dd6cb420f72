"""Runs a training loop on several ranks on this machine, without Ray.

::

    def train(ctx):
        model, optimizer = rayzero.prepare(build(), ...)
        ...
        return rayzero.full_state_dict(model)

    states = run_ranks(train, world_size=2, num_optimizers=3)

Ranks are threads or processes. Threads are fast, but share torch's global random generator. Each process has its own,
and uses real transports. Owners run in this process. A server that has imported torch once forks the processes
(multiprocessing's "forkserver", which ends with this program), because otherwise each would take seconds to import it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.private_torch import load_compiler_only_to_compile
from rayzero.errors import ConfigError, RunFailedError
from rayzero.protocol.ownership import device_owners
from rayzero.protocol.store import ParameterStore
from rayzero.slabs.slab import SHARED_MEMORY, sweep
from rayzero.store.shm.same_host import why_no_sharing
from rayzero.telemetry.recorder import MemoryRecorder, Recorder

__all__ = ["Killed", "run_ranks"]

log = logging.getLogger(__name__)

_LEAVE_S = 30.0  # seconds that a rank's process has to end after its loop has ended
_END_S = 3.0  # seconds that processes have to end after they were told to
_PRELOADED = ["rayzero.testing", "rayzero.engine.prepare", "rayzero.store.rank.remote"]  # none starts a thread

T = TypeVar("T")
Loop = Callable[[RankContext], T]
Connect = Callable[[int, Recorder, int], ParameterStore]  # (rank, recorder, number of the model) -> its store
LivingConnect = Callable[[int, Recorder, int, int], ParameterStore]  # the same, and how often the rank has died
Lose = Callable[[int, int], None]  # (rank, life): tells the owners that a rank has died and comes back in that life
Transport = Literal["inproc", "grpc", "shm"]


class Killed(BaseException):
    """Raise it in a rank that is a thread: the rank dies as a process dies that is killed, without a word to anyone."""


def run_ranks(
    fn: Loop[T],
    world_size: int = 2,
    num_optimizers: int = 2,
    transport: Transport | Connect = "inproc",
    processes: bool = False,
    *,
    config: ZeroConfig | None = None,
    resume: Path | None = None,
    run_dir: Path | None = None,
    threads: int = 1,
    stall_timeout: float = 60.0,
    max_failures: int = 0,
) -> list[T]:
    """Call ``fn(ctx)`` on ``world_size`` ranks with ``num_optimizers`` owners. Returns the ranks' results by rank.

    processes: start a process per rank. ``fn`` and its results must then be picklable, and ``transport`` must not be
        "inproc".
    transport: "inproc": owners are plain objects in this process; "grpc": they are behind servers; "shm": behind
        servers and with shared memory; or a function (rank, recorder, model) that connects a rank to owners of your
        own, where model is 0 for its first prepared model, 1 for its second, and so on.
    config: what ``rayzero.prepare`` uses if the loop gives it none. Its ``offload_fraction`` decides whether owners are
        started beside the ranks; its ``chunk_bytes``, ``wire_compression`` and ``broadcast`` say how bytes travel over
        gRPC.
    resume, run_dir: what the ranks' contexts say.
    threads: torch threads of each rank process and of each owner.
    stall_timeout: seconds that a rank waits for a peer that makes no progress.
    max_failures: how many times in all a rank that dies is started again: a process that is killed, or a thread that
        raises ``Killed``. Its loop begins at its top and repeats the step that it died in (``rayzero.track``), while
        the others wait. A loop that raises any other error has failed, and is not started again.

    If a rank fails, the others are told to stop, and the error of the first is raised with a note that names its rank.
    No thread, process or port is left behind. Raises ConfigError if the arguments do not fit together.
    """
    if processes and transport == "inproc":
        raise ConfigError(f'transport={transport!r} cannot reach other processes; use "grpc" or "shm"')
    if transport == "shm" and (reason := why_no_sharing()) is not None:
        raise ConfigError(f'transport="shm" does not work here: {reason}; use "grpc"')
    if world_size < 1 or num_optimizers < 1:
        raise ConfigError(f"world_size and num_optimizers must be >= 1, got {world_size} and {num_optimizers}")
    if max_failures < 0 or (max_failures and callable(transport)):
        raise ConfigError(f"max_failures is {max_failures}; pass a number >= 0, and 0 with a transport of your own")
    failures = _Failures(max_failures)
    run = f"run_ranks-{secrets.token_hex(4)}"  # slabs are swept by run, so each needs a name of its own
    places = [
        _Place(
            rank=rank, world_size=world_size, run=run, config=config, resume=resume, run_dir=run_dir, threads=threads
        )
        for rank in range(world_size)
    ]
    run_all = _in_processes if processes else _in_threads
    if callable(transport):
        return run_all(fn, places, _Own(transport), failures)
    share = SHARED_MEMORY if transport == "shm" else None
    settings = config or ZeroConfig()
    beside_ranks = device_owners(world_size, settings.host_fraction)
    owners = _local_owners if transport == "inproc" else partial(_served_owners, share, settings)
    try:
        with owners(num_optimizers, beside_ranks, threads, stall_timeout, failures) as connect:
            return run_all(fn, places, connect, failures)
    finally:
        if share is not None:
            sweep()  # removes what processes that were ended in the middle have left


@dataclass(slots=True)
class _Failures:
    """How many deaths of ranks the run still outlives, and how its owners learn of one."""

    left: int
    lose: Lose = lambda rank, life: None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def outlive(self, rank: int, life: int) -> bool:
        """A rank has died in ``life``. Returns whether it is to be started again; the owners then wait for it."""
        with self.lock:
            if not self.left:
                return False
            self.left -= 1
        log.warning("rank %d died and is started again (%d more failures are allowed)", rank, self.left)
        self.lose(rank, life + 1)
        return True


@dataclass(frozen=True, slots=True)
class _Own:
    """A transport of the caller's own, which knows no lives."""

    connect: Connect

    def __call__(self, rank: int, recorder: Recorder, model: int, life: int) -> ParameterStore:
        return self.connect(rank, recorder, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A rank's number, and what its context says."""

    rank: int
    world_size: int
    run: str
    config: ZeroConfig | None
    resume: Path | None
    run_dir: Path | None
    threads: int

    def context(self, connect: LivingConnect, ending: _Ending, life: int) -> RankContext:
        recorder = MemoryRecorder()
        context = RankContext(
            rank=self.rank,
            world_size=self.world_size,
            life=life,
            run=self.run,
            run_dir=self.run_dir,
            resume=self.resume,
            config=self.config,
            recorder=recorder,
        )
        context.connect = partial(_connected, context, connect, ending)
        return context


@dataclass(slots=True)
class _Ending:
    """Why ranks may no longer connect, once one has failed."""

    reason: str | None = None


def _connected(context: RankContext, connect: LivingConnect, ending: _Ending, model: int) -> ParameterStore:
    """A store that closes with its rank's context, because another rank's failure may close the context while
    prepare() runs."""
    store = connect(context.rank, context.recorder, model, context.life)
    context.on_close(store.close)
    if ending.reason is not None:  # the context was closed before the store existed
        store.close(ending.reason)
    return store


@dataclass(slots=True)
class _Outcome:
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


# ---- owners -----------------------------------------------------------------------------------------------------


@contextmanager
def _local_owners(
    num_optimizers: int, beside_ranks: int, threads: int, stall_timeout: float, failures: _Failures
) -> Iterator[LivingConnect]:
    from rayzero.store.inprocess import LocalConnection, LocalOwners
    from rayzero.store.owner.by_model import ByModel
    from rayzero.store.rank.store import RankStore

    def make(_: int) -> LocalOwners:
        return LocalOwners(num_optimizers, threads=threads, devices=[torch.device("cpu")] * beside_ranks)

    def lose(rank: int, life: int) -> None:
        for owners in models.made:
            owners.lose(rank, life)

    models = ByModel(make)
    failures.lose = lose
    try:
        yield lambda rank, recorder, model, life: RankStore(
            LocalConnection(rank, models[model], stall_timeout=stall_timeout, recorder=recorder, life=life)
        )
    finally:
        for owners in models.close():
            owners.close()


@dataclass(frozen=True, slots=True)
class _Addresses:
    """Connects a rank to the owners' servers, from any process."""

    addresses: tuple[str, ...]
    token: str
    stall_timeout: float
    share: Path | None
    config: ZeroConfig

    def __call__(self, rank: int, recorder: Recorder, model: int, life: int) -> ParameterStore:
        from rayzero.store.rank.remote import RemoteConnection
        from rayzero.store.rank.store import RankStore

        return RankStore(
            RemoteConnection(
                rank,
                self.addresses,
                token=self.token,
                stall_timeout=self.stall_timeout,
                chunk_bytes=self.config.chunk_bytes,
                wire_compression=self.config.wire_compression,
                broadcast=self.config.broadcast,
                share=self.share,
                recorder=recorder,
                model=model,
                life=life,
            )
        )


@contextmanager
def _served_owners(
    share: Path | None,
    config: ZeroConfig,
    num_optimizers: int,
    beside_ranks: int,
    threads: int,
    stall_timeout: float,
    failures: _Failures,
) -> Iterator[LivingConnect]:
    from rayzero.store.owner.hosted import HostedModels
    from rayzero.store.owner.server import serve_models

    token = secrets.token_hex(16)
    with ExitStack() as stack:
        servers = []
        num_owners = num_optimizers + beside_ranks
        for owner in range(num_owners):
            models = HostedModels(owner, num_owners, share=share, threads=threads)
            stack.callback(models.close)
            server = serve_models(models, token=token, replaces_ranks=failures.left > 0)
            stack.callback(server.stop)
            servers.append(server)
        addresses = tuple(server.address for server in servers)
        for server in servers:
            server.connect_peers(addresses)

        def lose(rank: int, life: int) -> None:
            for server in servers:
                server.lose(rank, life)

        failures.lose = lose
        yield _Addresses(addresses, token, stall_timeout, share, config)


def _outcome(fn: Loop[Any], context: RankContext) -> _Outcome:
    """Run the loop in its context. The outcome has its result, or the error that it raised."""
    outcome = _Outcome(context.rank)
    try:
        outcome.result = fn(context)
    except BaseException as exc:  # run_ranks raises it again
        outcome.error, outcome.trace = exc, traceback.format_exc()
    return outcome


# ---- ranks as threads -------------------------------------------------------------------------------------------


def _in_threads(fn: Loop[T], places: list[_Place], connect: LivingConnect, failures: _Failures) -> list[T]:
    ending = _Ending()
    contexts = [place.context(connect, ending, 0) for place in places]
    outcomes: list[_Outcome] = []  # in the order in which loops ended
    ended = threading.Lock()

    def run(place: _Place) -> None:
        while not live(contexts[place.rank]):
            contexts[place.rank] = place.context(connect, ending, contexts[place.rank].life + 1)

    def live(context: RankContext) -> bool:
        """One life of a rank; False: it died and is to be started again."""
        with running_in(context):
            outcome = _outcome(fn, context)  # noted before the rank leaves the run, which fails the other ranks
            if isinstance(outcome.error, Killed) and failures.outlive(context.rank, context.life):
                return False
            with ended:
                outcomes.append(outcome)
                first_failure = outcome.error is not None and sum(o.error is not None for o in outcomes) == 1
        if first_failure:
            ending.reason = f"rank {context.rank} failed: {outcome.error}"
            for other in contexts:
                other.close(ending.reason)
        return True

    ranks = [threading.Thread(target=run, args=(place,), name=f"rank-{place.rank}") for place in places]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return _results(outcomes)


def _results(outcomes: list[_Outcome]) -> list[Any]:
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.name_rank()
    return [outcome.result for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


# ---- ranks as processes -----------------------------------------------------------------------------------------


def _in_processes(fn: Loop[T], places: list[_Place], connect: LivingConnect, failures: _Failures) -> list[T]:
    server, usual = multiprocessing.get_context("forkserver"), multiprocessing.get_start_method(allow_none=True)
    server.set_forkserver_preload(_PRELOADED)  # takes effect when the first process starts the server
    start = _Start(usual, dict(os.environ))
    children: list[BaseProcess] = []

    def begin(place: _Place, life: int) -> Connection:
        ours, theirs = server.Pipe(duplex=False)
        child = server.Process(target=_child, args=(fn, place, connect, theirs, start, life), name=f"rank-{place.rank}")
        child.start()
        theirs.close()
        children.append(child)
        return ours

    try:
        results = _results(_outcomes(places, begin, failures))
        for child in children:  # which still have to leave the run
            child.join(_LEAVE_S)
        return results
    finally:
        _end(children)


def _end(children: Sequence[BaseProcess]) -> None:
    """End the processes that still run. A stopped process (SIGSTOP) reacts to nothing but the final kill."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + _END_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.join()


def _outcomes(
    places: Sequence[_Place], begin: Callable[[_Place, int], Connection], failures: _Failures
) -> list[_Outcome]:
    """Start the ranks. Returns their outcomes in the order in which they end, until all have ended or one has failed.
    ``begin(place, life)`` starts a process; its outcome comes through the pipe."""
    outcomes: list[_Outcome] = []
    waiting = {begin(place, 0): (place.rank, 0) for place in places}
    while waiting and not any(outcome.error for outcome in outcomes):
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, Connection)
            rank, life = waiting.pop(pipe)
            try:
                outcomes.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                if failures.outlive(rank, life):
                    waiting[begin(places[rank], life + 1)] = rank, life + 1
                else:
                    outcomes.append(_Outcome(rank, error=RunFailedError(f"the process of rank {rank} died")))
    return outcomes


@dataclass(frozen=True, slots=True)
class _Start:
    """The state of this process that a forked rank does not get from the server, or gets in an old version."""

    method: str | None  # the start method of processes that the rank starts itself
    environment: dict[str, str]

    def take(self) -> None:
        multiprocessing.set_start_method(self.method, force=True)
        os.environ.clear()
        os.environ.update(self.environment)


def _child(fn: Loop[Any], place: _Place, connect: LivingConnect, pipe: Connection, start: _Start, life: int) -> None:
    start.take()
    load_compiler_only_to_compile()
    torch.set_num_threads(place.threads)
    with running_in(place.context(connect, _Ending(), life)) as context:
        _send(pipe, _outcome(fn, context))  # before the rank leaves the run, which fails the other ranks


def _send(pipe: Connection, outcome: _Outcome) -> None:
    try:
        pipe.send_bytes(pickle.dumps(outcome))  # by value: torch's own reduction would send a file descriptor
    except Exception as exc:  # an object that cannot be pickled may raise anything
        what = "error" if outcome.error is not None else "result"
        error = RunFailedError(f"rank {outcome.rank}: its {what} cannot be sent to the parent: {exc}")
        pipe.send_bytes(pickle.dumps(_Outcome(outcome.rank, error=error, trace=outcome.trace)))
