"""Ranks as processes, and owners too where a dead one gets a successor."""

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
from typing import Any

import torch

from rayzero.concurrency.processes import Sleepers, is_stopped
from rayzero.elastic.controller import Action, Connect, Controller, Kind, Lose, MemberId, Run, Start, Succeed
from rayzero.engine.context import running_in
from rayzero.engine.private_torch import load_compiler_only_to_compile
from rayzero.errors import RankLeftError, RunFailedError
from rayzero.store.rank.owner_table import OwnerTable
from rayzero.testing.faults import Faults
from rayzero.testing.owners import OwnersHere, Reach, Service, serve_owner
from rayzero.testing.place import Ending, Loop, Outcome, Place, T, outcome_of, results_of

log = logging.getLogger(__name__)

_LEAVE_S = 30.0  # seconds that a process has to end after its loop has ended, or after it was told to
_END_S = 3.0  # seconds that processes have to end after they were told to in the middle of a run
_LOOK_S = 0.5  # between two looks for stopped processes
_SETTLE_S = 3.0  # how long an error that another one has caused waits for that one
_PRELOADED = ["rayzero.testing", "rayzero.engine.prepare", "rayzero.store.rank.remote"]  # none starts a thread


@dataclass(frozen=True, slots=True)
class OwnerProcesses:
    """Owners that run in processes of their own."""

    service: Service
    reach: Reach
    bound: bool  # their states die with them


def run_processes(
    fn: Loop[T],
    places: Sequence[Place],
    owners: OwnersHere | OwnerProcesses,
    max_failures: int,
    stall_timeout: float,
    faults: Faults | None = None,
) -> list[T]:
    """Run the loop on every rank; the results by rank. Members whose processes die are replaced, ``max_failures``
    times in all. One that is stopped (SIGSTOP) for half of ``stall_timeout`` is killed, before others fail."""
    run = _Run(fn, places, owners, max_failures, stall_timeout / 2, faults)
    try:
        return results_of(run.outcomes())
    finally:
        run.end()


class _Run:
    """The processes of a run.

    Knows processes and pipes; what a death means is decided by the ``Controller``."""

    def __init__(
        self,
        fn: Loop[Any],
        places: Sequence[Place],
        owners: OwnersHere | OwnerProcesses,
        max_failures: int,
        patience_s: float,
        faults: Faults | None,
    ) -> None:
        self._fn, self._places, self._owners, self._faults = fn, places, owners, faults
        self._sleepers = Sleepers[BaseProcess](patience_s if max_failures else math.inf)  # inf: nobody replaces them
        self._server, usual = multiprocessing.get_context("forkserver"), multiprocessing.get_start_method(True)
        self._server.set_forkserver_preload(_PRELOADED)  # takes effect when the first process starts the server
        self._start_state = _Start(usual, dict(os.environ))
        self._lives: dict[Connection, tuple[MemberId, int]] = {}  # whom a pipe leads to
        self._pipes: dict[MemberId, Connection] = {}
        self._children: dict[MemberId, BaseProcess] = {}  # freed by: end()
        self._outcomes: list[Outcome] = []
        self._failed_s: float | None = None  # when the first rank failed
        try:
            addresses = self._start_owners()
        except BaseException:
            self.end()
            raise
        self._controller = Controller(len(places), addresses, max_failures=max_failures, bound=self._bound)

    @property
    def _bound(self) -> frozenset[MemberId]:
        if isinstance(self._owners, OwnersHere) or not self._owners.bound:
            return frozenset()
        return frozenset(MemberId(Kind.OWNER, owner) for owner in range(self._owners.service.num_owners))

    def _start_owners(self) -> tuple[str, ...]:
        if isinstance(self._owners, OwnersHere):
            return self._owners.addresses
        members = [MemberId(Kind.OWNER, owner) for owner in range(self._owners.service.num_owners)]
        for member in members:
            self._start(member, 0)
        addresses = tuple(self._first_word(member) for member in members)
        for member in members:
            self._send(member, ("connect_peers", addresses))
            self._first_word(member)
        return addresses

    def _first_word(self, member: MemberId) -> Any:
        try:
            return self._pipes[member].recv()
        except (EOFError, ConnectionResetError):
            raise RunFailedError(f"the process of {member} died before the run began") from None

    # ---- until the loops have ended

    def outcomes(self) -> list[Outcome]:
        """Run the ranks. Returns their outcomes in the order in which they end, until all have ended or one has failed;
        if that one says that another has left, until that one has said why."""
        for place in self._places:
            rank = MemberId(Kind.RANK, place.rank)
            self._start(rank, 0)
            self._do(Run(place.rank, 0, self._controller.addresses))
        while len(self._outcomes) < len(self._places) and not self._has_failed(time.monotonic()):
            for pipe in wait(list(self._lives), _LOOK_S):
                assert isinstance(pipe, Connection)
                self._take(pipe)
            self._end_sleepers()
        return self._outcomes

    def _has_failed(self, now: float) -> bool:
        errors = [outcome.error for outcome in self._outcomes if outcome.error is not None]
        if errors and self._failed_s is None:
            self._failed_s = now
        late = self._failed_s is not None and now - self._failed_s > _SETTLE_S
        return late or any(not isinstance(error, RankLeftError) for error in errors)

    def _take(self, pipe: Connection) -> None:
        if pipe not in self._lives:  # its process was replaced in this round
            return
        member, life = self._lives[pipe]
        try:
            said = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            del self._lives[pipe]
            if self._pipes[member] is pipe:
                self._died(member, life)
            return
        if member.kind is Kind.RANK:
            self._outcomes.append(pickle.loads(said))
            self._controller.ended(member.index, life)
        elif (address := pickle.loads(said)) is not None:
            self._perform(self._controller.ready(member, life, address))
        else:
            self._perform(self._controller.connected(member.index, life))

    def _died(self, member: MemberId, life: int) -> None:
        actions = self._controller.died(member, life)
        if self._controller.over is not None:
            raise RunFailedError(f"the process of {member} died: {self._controller.over}")
        if actions:  # it had not ended its loop
            self._children[member].join()
            log.warning("%s died and is started again", member)
            self._perform(actions)

    def _end_sleepers(self) -> None:
        """Kill what has been stopped for too long: others would take it for dead, and it might wake up."""
        stopped = [child for child in self._children.values() if child.pid is not None and is_stopped(child.pid)]
        for child in self._sleepers.overdue(stopped, time.monotonic()):
            log.warning("%s (pid %d) was stopped for too long and is killed", child.name, child.pid)
            child.kill()

    # ---- actions

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        match action:
            case Start(member, life):
                self._start(member, life)
                if member.kind is Kind.RANK:  # a forked process needs no time to start
                    self._perform(self._controller.ready(member, life))
            case Run(index, _, addresses):
                self._send(MemberId(Kind.RANK, index), addresses)
            case Lose(rank, life, owners):
                if isinstance(self._owners, OwnersHere):
                    self._owners.lose(rank, life)
                for owner in owners:
                    self._send(owner, ("lose", rank, life))
            case Connect(index, life, addresses):
                self._send(MemberId(Kind.OWNER, index), ("connect_peers", addresses))
            case Succeed(index, address, _, others):
                for other in others:
                    self._send(other, ("succeed", index, address))

    def _send(self, member: MemberId, what: Any) -> None:
        with suppress(OSError):  # it has died, or ended, which its pipe tells
            self._pipes[member].send(what)

    def _start(self, member: MemberId, life: int) -> None:
        ours, theirs = self._server.Pipe()
        be = self._rank(member.index, life) if member.kind is Kind.RANK else self._owner(member.index, life)
        if self._faults is not None:
            be = partial(_arm, self._faults, member, life, be)
        child = self._server.Process(target=_child, args=(self._start_state, be, theirs))
        child.name = str(member)
        child.start()
        theirs.close()
        self._children[member], self._pipes[member], self._lives[ours] = child, ours, (member, life)

    def _rank(self, rank: int, life: int) -> Any:
        assert self._owners.reach is not None, "ranks in other processes cannot reach these owners"
        follows = isinstance(self._owners, OwnerProcesses)
        return partial(_be_rank, self._fn, self._places[rank], self._owners.reach, life, follows)

    def _owner(self, owner: int, life: int) -> Any:
        assert isinstance(self._owners, OwnerProcesses)
        return partial(serve_owner, self._owners.service, owner, life)

    # ---- end

    def end(self) -> None:
        """End the processes that still run: at once what runs in the middle of a loop. A stopped process (SIGSTOP)
        reacts to nothing but the final kill."""
        well = len(self._outcomes) == len(self._places) and not any(outcome.error for outcome in self._outcomes)
        for kind in (Kind.RANK, Kind.OWNER):  # ranks still have to leave the run
            children = [child for member, child in self._children.items() if member.kind is kind]
            for member in self._pipes:
                if member.kind is kind is Kind.OWNER:
                    self._send(member, None)
            deadline = time.monotonic() + (_LEAVE_S if well else _END_S)
            for child in children:
                if not well and kind is Kind.RANK:
                    child.terminate()
            for child in children:
                child.join(max(0.0, deadline - time.monotonic()))
                child.kill()
                child.join()


@dataclass(frozen=True, slots=True)
class _Start:
    """The state of this process that a forked one does not get from the server, or gets in an old version."""

    method: str | None  # the start method of processes that it starts itself
    environment: dict[str, str]

    def take(self) -> None:
        multiprocessing.set_start_method(self.method, force=True)
        os.environ.clear()
        os.environ.update(self.environment)


def _child(start: _Start, be: Any, pipe: Connection) -> None:
    start.take()
    be(pipe)


def _arm(faults: Faults, member: MemberId, life: int, be: Any, pipe: Connection) -> None:
    faults.arm(member, life)
    be(pipe)


def _be_rank(fn: Loop[Any], place: Place, reach: Reach, life: int, follows: bool, pipe: Connection) -> None:
    """``follows``: owners may get successors."""
    load_compiler_only_to_compile()
    torch.set_num_threads(place.threads)
    table = OwnerTable(pipe.recv())
    if follows:
        threading.Thread(target=_follow, args=(table, pipe), name="rayzero-owner-table", daemon=True).start()
    with running_in(place.context(partial(reach.connect, table), Ending(), life)) as context:
        _send(pipe, outcome_of(fn, context))  # before the rank leaves the run, which fails the other ranks


def _follow(table: OwnerTable, pipe: Connection) -> None:
    """Take the addresses of owners' successors, until the pipe's end."""
    with suppress(EOFError, OSError):
        while True:
            _, owner, address = pipe.recv()
            table.succeed(owner, address)


def _send(pipe: Connection, outcome: Outcome) -> None:
    try:
        pipe.send_bytes(pickle.dumps(outcome))  # by value: torch's own reduction would send a file descriptor
    except Exception as exc:  # an object that cannot be pickled may raise anything
        what = "error" if outcome.error is not None else "result"
        error = RunFailedError(f"rank {outcome.rank}: its {what} cannot be sent to the parent: {exc}")
        pipe.send_bytes(pickle.dumps(Outcome(outcome.rank, error=error, trace=outcome.trace)))
