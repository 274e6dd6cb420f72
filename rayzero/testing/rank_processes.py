"""Ranks and owners as processes."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import torch

from rayzero.concurrency.processes import Sleepers, is_stopped
from rayzero.elastic.controller import Controller, Supervisor
from rayzero.elastic.members import Answered, Died, Ended, Event, MemberId, MemberKind, Process, Serves
from rayzero.elastic.reform import Abandon, Step, resolved, with_doors
from rayzero.elastic.scaling import take
from rayzero.engine.context import running_in
from rayzero.errors import RankLeftError, RunFailedError
from rayzero.layout.shard_map import Rescale
from rayzero.memory.process_memory import map_blocks
from rayzero.modes import load_compiler_only_to_compile
from rayzero.protocol.ownership import Ownership
from rayzero.store.remote.owner_table import OwnerTable
from rayzero.testing.members import (
    Ending,
    Loop,
    RankPlace,
    RankResult,
    Reach,
    Service,
    outcome_of,
    results_of,
    serve_owner,
)

log = logging.getLogger(__name__)

_LEAVE_S = 30.0  # seconds that a process has to end after its loop has ended, or after it was told to
_END_S = 3.0  # seconds that processes have to end after they were told to in the middle of a run
_LOOK_S = 0.5  # between two looks for stopped processes
_SETTLE_S = 3.0  # how long an error that another one has caused waits for that one
PRELOADED = [
    "rayzero.testing",
    "rayzero.engine.prepare",
    "rayzero.store.remote.remote_connection",
    "rayzero.testing.permanent",
]
"""What the server that forks processes imports, in this order. None of it starts a thread."""


class FaultInjector(Protocol):
    """Lets something go wrong in the processes of a run, for tests. Picklable: every process gets it."""

    def check(self, num_ranks: int, num_owners: int | None) -> None:
        """Raise ConfigError if it is meant for a process that the run does not have. ``num_owners``: of those that are
        processes; None: others may come."""

    def arm(self, member: MemberId, life: int) -> None:
        """Called in each process before anything else; it is ``member`` in its ``life``."""


class ForkedProcesses:
    """The processes of a run: its ranks and owners.

    Knows processes and pipes; what a death means is decided by the ``Controller``, which a ``Supervisor`` asks."""

    def __init__(
        self,
        fn: Loop[Any],
        places: Sequence[RankPlace],
        service: Service,
        reach: Reach,
        max_failures: int,
        stall_timeout: float,
        faults: FaultInjector | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """Start the owners. ``reach``: how ranks reach them. Members whose processes die are replaced, ``max_failures``
        times in all. One that is stopped (SIGSTOP) for half of ``stall_timeout`` is killed, before others fail.
        ``run_dir``: where requests for other owners are left (elastic/scaling.py)."""
        self._run_dir = run_dir
        self._fn, self._places, self._faults = fn, places, faults
        self._service, self._reach = service, reach
        patience_s = stall_timeout / 2 if max_failures else math.inf  # inf: nobody replaces them
        self._sleepers = Sleepers[BaseProcess](patience_s)
        self._server, usual = multiprocessing.get_context("forkserver"), multiprocessing.get_start_method(True)
        self._server.set_forkserver_preload(PRELOADED)  # takes effect when the first process starts the server
        self._start_state = _Start(usual, dict(os.environ))
        self._led_to: dict[Connection, Process] = {}  # by pipe
        self._pipes: dict[Process, Connection] = {}
        self._children: dict[Process, BaseProcess] = {}  # freed by: close()
        self._dead: dict[Process, BaseProcess] = {}  # whose pipes have ended. freed by: close()
        self._parted: list[BaseProcess] = []  # owners that the run needs no more. freed by: close()
        doors = zip(service.ownership.door_numbers, service.doors, strict=True)
        self._doors = dict(doors)  # by number: where owners without shards make their slabs
        self._outcomes: list[RankResult] = []
        self._failed_s: float | None = None  # when the first rank failed
        try:
            addresses = self._start_owners()
        except BaseException:
            self.close()
            raise
        controller = Controller(
            len(places),
            addresses,
            max_failures=max_failures,
            bound=frozenset(m for m in self._first_owners() if service.share is None or m.kind is MemberKind.BESIDE),
            beside=service.beside,
            ownership=service.ownership,
        )
        self._supervisor = Supervisor(controller, self)

    def _first_owners(self) -> list[MemberId]:
        """The owners of the first epoch, in the order of their numbers."""
        return [
            *(MemberId(MemberKind.OWNER, owner) for owner in range(self._service.ownership.num_owners)),
            *(MemberId(MemberKind.BESIDE, rank) for rank in range(self._service.beside)),
        ]

    def _start_owners(self) -> tuple[str, ...]:
        owners = [Process(member, 0) for member in self._first_owners()]
        for owner in owners:
            self.start(owner, self._service.ownership)
        addresses = tuple(self._first_word(owner) for owner in owners)
        for owner in owners:
            self.call((owner,), "connect_peers", addresses)
            self._first_word(owner)
        return addresses

    def _first_word(self, process: Process) -> Any:
        try:
            return self._pipes[process].recv()
        except (EOFError, ConnectionResetError):
            raise RunFailedError(f"the process of {process} died before the run began") from None

    # ---- until the loops have ended

    def results(self) -> list[Any]:
        """Run the loop on every rank, until all have ended or one has failed; if that one says that another has left,
        until that one has said why. Returns the results by rank."""
        controller = self._supervisor.controller
        for place in self._places:
            rank = Process(MemberId(MemberKind.RANK, place.rank), 0)
            self.start(rank, controller.ownership)
            self.run(rank, controller.addresses, controller.ownership)
        while len(self._outcomes) < len(self._places) and not self._has_failed(time.monotonic()):
            for pipe in wait(list(self._led_to), _LOOK_S):
                assert isinstance(pipe, Connection)
                self._take(pipe)
            self._end_sleepers()
            self._take_request()
        return results_of(self._outcomes)

    def _has_failed(self, now: float) -> bool:
        errors = [outcome.error for outcome in self._outcomes if outcome.error is not None]
        if errors and self._failed_s is None:
            self._failed_s = now
        late = self._failed_s is not None and now - self._failed_s > _SETTLE_S
        return late or any(not isinstance(error, RankLeftError) for error in errors)

    def _take(self, pipe: Connection) -> None:
        """Take what a process says. Raises RunFailedError if it has died and the run is over."""
        process, controller = self._led_to[pipe], self._supervisor.controller
        for action in self._supervisor.take(self._event(pipe, process)):
            if isinstance(action, Abandon):
                log.warning("the owners stay as they are: %s", action.why)
        if controller.over is not None:
            raise RunFailedError(f"the process of {process} died: {controller.over}")

    def _event(self, pipe: Connection, process: Process) -> Event:
        try:
            said = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            del self._led_to[pipe]
            if process in self._children:
                self._dead[process] = self._children.pop(process)
            return Died(process)
        match said:
            case RankResult():
                self._outcomes.append(said)
                return Ended(process)
            case str():
                return Serves(process, said)
            case (method, result, refused):
                return Answered(process, method, result, refused)
            case _:
                raise AssertionError(f"{process} said {said!r}")

    def _take_request(self) -> None:
        requests = take(self._run_dir) if self._run_dir is not None else []
        if requests:
            request, before = requests[-1], self._supervisor.controller.coming
            stay = [i for i in range(before.num_optimizers) if f"optimizer {i}" not in request.avoid]
            change = Rescale(tuple(i if i in stay else None for i in range(request.num_optimizers)))
            self._supervisor.scale(resolved(self._with_doors(change, before), before))

    def _with_doors(self, change: Rescale, before: Ownership) -> Rescale:
        """A change of the owners with shards, with the doors that it takes. ``before``: who owns what until then."""
        service, life = self._service, self._supervisor.controller.last_life
        if service.beside or service.share is None:
            return change
        ids = [MemberId(MemberKind.OWNER, owner) for owner in range(max(len(change.former), before.num_optimizers))]
        after = [service.home(i, life(ids[i]) + (was is None)) for i, was in enumerate(change.former)]
        there = [*(service.home(i, life(ids[i])) for i in range(before.num_optimizers))]
        there += [self._doors[door] for door in before.door_numbers]
        whole, joining = with_doors(change, after, ranks=service.homes_of_ranks, there=there, before=before)
        self._doors |= joining
        return whole

    def _end_sleepers(self) -> None:
        """Kill what has been stopped for too long: others would take it for dead, and it might wake up."""
        children = [*self._children.values(), *self._parted]
        stopped = [child for child in children if child.pid is not None and is_stopped(child.pid)]
        for child in self._sleepers.overdue(stopped, time.monotonic()):
            log.warning("%s (pid %d) was stopped for too long and is killed", child.name, child.pid)
            child.kill()

    # ---- the supervisor's calls

    def start(self, process: Process, ownership: Ownership) -> None:
        member, life = process.member, process.life
        for former in [dead for dead in self._dead if dead.member == member]:
            dead = self._dead.pop(former)
            dead.join()
            dead.close()
            log.warning("%s died and is started again", member)
        ours, theirs = self._server.Pipe()
        be = self._rank(member.index, life) if member.kind is MemberKind.RANK else self._owner(member, life, ownership)
        child = self._server.Process(target=_child, args=(self._start_state, self._faults, process, be, theirs))
        child.name = str(member)
        child.start()
        theirs.close()
        self._children[process], self._pipes[process], self._led_to[ours] = child, ours, process

    def join(self, process: Process, ownership: Ownership, addresses: Sequence[str]) -> None:
        self.start(process, ownership)

    def run(self, rank: Process, addresses: Sequence[str], ownership: Ownership) -> None:
        self._send(rank, (addresses, ownership))

    def call(self, processes: Sequence[Process], method: str, *arguments: Any) -> None:
        for process in processes:
            self._send(process, (str(method), *arguments))

    def kill(self, processes: Sequence[Process]) -> None:
        killed = [self._children[process] for process in processes if process in self._children]
        for child in killed:
            child.kill()
        for child in killed:
            child.join()

    def end(self, process: Process) -> None:
        self._send(process, None)
        if process in self._children:
            self._parted.append(self._children.pop(process))

    def _send(self, process: Process, what: Any) -> None:
        with suppress(OSError):  # it has died, or ended, which its pipe tells
            self._pipes[process].send(what)

    def _rank(self, rank: int, life: int) -> Any:
        return partial(_be_rank, self._fn, self._places[rank], self._reach, life)

    def _owner(self, member: MemberId, life: int, ownership: Ownership) -> Any:
        service = self._service
        number = member.index if member.kind is MemberKind.OWNER else self._first_owners().index(member)
        home = self._doors[number] if number in ownership.door_numbers else service.home(number, life)
        return partial(serve_owner, service, number, life, ownership, home)

    # ---- end

    def close(self) -> None:
        """End the processes that still run: at once what runs in the middle of a loop. A stopped process (SIGSTOP)
        reacts to nothing but the final kill."""
        well = len(self._outcomes) == len(self._places) and not any(outcome.error for outcome in self._outcomes)
        for ranks in (True, False):  # ranks still have to leave the run
            there = self._dead | self._children
            going = {p: child for p, child in there.items() if (p.member.kind is MemberKind.RANK) is ranks}
            children = [*going.values(), *([] if ranks else self._parted)]
            for process in () if ranks else going:
                self._send(process, None)
            deadline = time.monotonic() + (_LEAVE_S if well else _END_S)
            for child in children:
                if not well and ranks:
                    child.terminate()
            for child in children:
                child.join(max(0.0, deadline - time.monotonic()))
                child.kill()
                child.join()
                child.close()
        for pipe in self._pipes.values():
            pipe.close()


@dataclass(frozen=True, slots=True)
class _Start:
    """The state of this process that a forked one does not get from the server, or gets in an old version."""

    method: str | None  # the start method of processes that it starts itself
    environment: dict[str, str]

    def take(self) -> None:
        multiprocessing.set_start_method(self.method, force=True)
        os.environ.clear()
        os.environ.update(self.environment)


def _child(start: _Start, faults: FaultInjector | None, process: Process, be: Any, pipe: Connection) -> None:
    start.take()
    if faults is not None:
        faults.arm(process.member, process.life)
    be(pipe)


def _be_rank(fn: Loop[Any], place: RankPlace, reach: Reach, life: int, pipe: Connection) -> None:
    load_compiler_only_to_compile()
    map_blocks()
    torch.set_num_threads(place.threads)
    pipe.send("")
    addresses, ownership = pipe.recv()
    table, sending = OwnerTable(addresses, ownership), threading.Lock()
    threading.Thread(target=_follow, args=(table, pipe, sending), name="rayzero-owner-table", daemon=True).start()
    with running_in(place.context(partial(reach, table), Ending(), life)) as context:
        outcome = outcome_of(fn, context)
        with sending:
            _send(pipe, outcome)  # before the rank leaves the run, which fails the other ranks


def _follow(table: OwnerTable, pipe: Connection, sending: threading.Lock) -> None:
    """Take the addresses of owners' successors, and of other owners, until the pipe's end. ``sending``: held while
    something is sent over the pipe."""

    def answer(_: object) -> None:
        with sending, suppress(OSError):  # the supervisor has ended
            pipe.send((str(Step.CHANGE), None, None))

    with suppress(EOFError, OSError):
        while True:
            match pipe.recv():
                case (Step.CHANGE, addresses, ownership):
                    table.go_over(addresses, ownership).add_done_callback(answer)
                case ("succeed", owner, address):
                    table.succeed(owner, address)


def _send(pipe: Connection, outcome: RankResult) -> None:
    try:
        pipe.send_bytes(pickle.dumps(outcome))  # by value: torch's own reduction would send a file descriptor
    except Exception as exc:  # an object that cannot be pickled may raise anything
        what = "error" if outcome.error is not None else "result"
        error = RunFailedError(f"rank {outcome.rank}: its {what} cannot be sent to the parent: {exc}")
        pipe.send_bytes(pickle.dumps(RankResult(outcome.rank, error=error, trace=outcome.trace)))
