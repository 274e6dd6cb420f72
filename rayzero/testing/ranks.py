"""``run_ranks``: a training loop on several ranks on this machine.

::

    def train(ctx):
        model, optimizer = rayzero.prepare(build(), ...)
        ...
        return rayzero.full_state_dict(model)

    states = run_ranks(train, world_size=2, num_optimizers=3)

Ranks are threads or processes. Threads are fast, but share torch's global random generator. Each process has its own,
and uses real transports. A server that has imported torch once forks the processes (multiprocessing's "forkserver",
which ends with this program), because otherwise each would take seconds to import it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Literal

from rayzero.config import ZeroConfig
from rayzero.elastic.controller import Controller
from rayzero.elastic.members import MemberId, MemberKind, Process
from rayzero.elastic.reform import Call
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import ConfigError
from rayzero.protocol.ownership import device_owners
from rayzero.protocol.store import ParameterStore
from rayzero.security.credentials import ANY_RANK, OWNER, Identity
from rayzero.slabs.sweep import SHARED_MEMORY, Hold, sweep
from rayzero.store.remote.owner_table import OwnerTable
from rayzero.store.shm.signals import why_no_sharing
from rayzero.telemetry.recorder import Recorder
from rayzero.testing.members import (
    Connect,
    Ending,
    Killed,
    Loop,
    OwnersHere,
    RankPlace,
    RankResult,
    Service,
    T,
    local_owners,
    outcome_of,
    results_of,
    served_owners,
)
from rayzero.testing.rank_processes import FaultInjector, ForkedProcesses

Transport = Literal["inproc", "grpc", "shm"]


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
    faults: FaultInjector | None = None,
    hosts: Mapping[str, Path] | None = None,
    tls: bool = False,
) -> list[T]:
    """Call ``fn(ctx)`` on ``world_size`` ranks with ``num_optimizers`` owners. Returns the ranks' results by rank.

    processes: start a process per rank and per owner. ``fn`` and its results must then be picklable, and ``transport``
        must not be "inproc".
    transport: "inproc": owners are plain objects in this process; "grpc": they are behind servers; "shm": behind
        servers and with shared memory; or a function (rank, recorder, model) that connects a rank to owners of your
        own, where model is 0 for its first prepared model, 1 for its second, and so on.
    config: what ``rayzero.prepare`` uses if the loop gives it none. Its ``offload_fraction`` decides whether owners are
        started beside the ranks; its ``wire_compression`` and ``host_push`` say how bytes travel over gRPC.
    resume, run_dir: what the ranks' contexts say. With processes=True and max_failures > 0, requests for other owners
        are taken from run_dir (elastic/scaling.py).
    threads: torch threads of each rank process and of each owner.
    stall_timeout: seconds that a rank waits for a peer that makes no progress.
    max_failures: how many deaths in all the run outlives. A rank dies as a process that is killed, or a thread that
        raises ``Killed`` (not with "shm"): its loop begins anew and repeats the step that it died in
        (``rayzero.track``), while the others wait. With processes=True an owner that is killed gets a successor. A loop
        that raises any other error has failed, and is not started again.
    faults: lets something go wrong in the ranks' and owners' processes, for tests.
    hosts: by member ("rank 0", "optimizer 1", "optimizer 1 in life 2"), the directory for its shared memory, in place
        of /dev/shm. Members with different directories share none, as on different hosts. Only with transport="shm".
        A directory with ranks and no optimizer gets one without shards, whose number is the next one.
    tls: whether connections are protected, as between hosts.

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
    if max_failures and transport == "shm" and not processes:
        raise ConfigError(
            f'max_failures={max_failures} with transport="shm" needs processes: a thread that ends takes its shared '
            "memory along, and what its next life needs is there; pass processes=True"
        )
    if faults is not None and not processes:
        raise ConfigError("faults strike processes; pass processes=True")
    if tls and transport not in ("grpc", "shm"):
        raise ConfigError(f'tls=True needs connections, and transport={transport!r} has none; use "grpc" or "shm"')
    run = f"run_ranks-{secrets.token_hex(4)}"  # slabs are swept by run, so each needs a name of its own
    places = [
        RankPlace(
            rank=rank,
            world_size=world_size,
            run=run,
            config=config,
            resume=resume,
            run_dir=run_dir,
            threads=threads,
        )
        for rank in range(world_size)
    ]
    settings = config or ZeroConfig()
    beside_ranks = device_owners(world_size, settings.host_fraction)
    share = SHARED_MEMORY if transport == "shm" else None
    homes = dict(hosts or {}) if share is not None else {}
    if transport == "inproc":
        with local_owners(num_optimizers, beside_ranks, threads, stall_timeout) as owners:
            return run_threads(fn, places, owners, max_failures)
    own = transport if callable(transport) else None
    replaces = max_failures > 0
    shown = _certificate_of_all(run) if tls else None
    service = Service(
        num_optimizers=num_optimizers if own is None else 0,
        num_ranks=world_size,
        beside=beside_ranks if own is None else 0,
        threads=threads,
        share=share,
        hosts=homes,
        lineage=run,
        replaces_ranks=replaces,
        replaces_owners=processes and replaces,
        stall_timeout=stall_timeout,
        config=settings,
        tls=shown,
    )
    if faults is not None:
        faults.check(world_size, None if run_dir is not None and replaces else service.ownership.num_owners)
    reach = service.reach if own is None else partial(_connect, own)
    directories = set[Path]() if share is None else {share, *homes.values()}
    try:
        if not processes:
            with served_owners(service, reach) as owners:
                return run_threads(fn, places, owners, max_failures)
        with ExitStack() as held:  # else another run's sweep takes what a host has whose members are all dead
            for directory in directories:
                held.enter_context(closing(Hold(directory, run)))
            requests = run_dir if replaces else None
            members = ForkedProcesses(fn, places, service, reach, max_failures, stall_timeout, faults, requests)
            return held.enter_context(closing(members)).results()
    finally:
        for directory in directories:  # remove what processes that were ended in the middle have left
            sweep(directory)


def _certificate_of_all(run: str) -> Identity:
    # imported here: other runs need no certificates, and their processes no memory for the library
    from rayzero.security.authority import Authority

    return Identity(Authority(run, on_loopback=True).issue("every process", [OWNER, ANY_RANK]))


def _connect(own: Connect, table: OwnerTable, rank: int, recorder: Recorder, model: int, life: int) -> ParameterStore:
    """A ``Reach`` to owners of the caller's own, who know no lives."""
    return own(rank, recorder, model)


log = logging.getLogger(__name__)


def run_threads(fn: Loop[T], places: list[RankPlace], owners: OwnersHere, max_failures: int) -> list[T]:
    """Run the loop on every rank; the results by rank. A rank that raises ``Killed`` begins anew, in its next life."""
    ending = Ending()
    contexts = [place.context(owners.connect, ending, 0) for place in places]
    outcomes: list[RankResult] = []  # in the order in which loops ended
    controller, lock = Controller(len(places), (), max_failures=max_failures), threading.Lock()

    def run(place: RankPlace) -> None:
        while not live(contexts[place.rank]):
            contexts[place.rank] = place.context(owners.connect, ending, contexts[place.rank].life + 1)

    def live(context: RankContext) -> bool:
        """One life of a rank; False: it died and is to be started again."""
        with running_in(context):
            outcome = outcome_of(fn, context)  # noted before the rank leaves the run, which fails the other ranks
            if isinstance(outcome.error, Killed) and outlived(context):
                return False
            with lock:
                outcomes.append(outcome)
                first_failure = outcome.error is not None and sum(o.error is not None for o in outcomes) == 1
        if first_failure:
            ending.reason = f"rank {context.rank} failed: {outcome.error}"
            for other in contexts:
                other.close(ending.reason)
        return True

    def outlived(context: RankContext) -> bool:
        rank = MemberId(MemberKind.RANK, context.rank)
        with lock:
            actions = controller.died(Process(rank, context.life))
            controller.ready(Process(rank, controller.life(rank)))  # a thread needs no time to start
        for action in actions:
            if isinstance(action, Call):
                log.warning("%s died and is started again", rank)
                owners.lose(*action.arguments)
        return bool(actions)

    ranks = [threading.Thread(target=run, args=(place,), name=f"rank-{place.rank}") for place in places]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return results_of(outcomes)
