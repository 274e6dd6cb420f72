"""Watches a run's processes, and puts others in the places of those that die."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import ray

from rayzero.cluster.actors.calls import ANSWER_S, START_S, failure_from_ray
from rayzero.cluster.actors.run_actors import RunActors
from rayzero.cluster.interrupts import postponed
from rayzero.cluster.nodes.session import ray_answers
from rayzero.cluster.run import Recovery, Routing, actor_name, optimizer_name
from rayzero.cluster.supervision import Failure, OneCause, death_of
from rayzero.cluster.upkeep.deaths import Death, Deaths, EndWatch, Recovering
from rayzero.cluster.upkeep.rescaling import Rescaling
from rayzero.concurrency.processes import Sleepers
from rayzero.elastic.controller import (
    Action,
    Connect,
    Controller,
    Lose,
    Run,
    Start,
    Succeed,
    still_outlived,
)
from rayzero.elastic.members import Kind, MemberId, Process
from rayzero.elastic.reform import Kill

__all__ = ["Replacement"]

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks for stopped processes
_CALM_S = 0.3  # between a death and what is done about it


class Replacement:
    """Waits for deaths, passes them on to the Controller and carries out its actions.

    Knows the Ray calls that last as long as an owner, and those to processes that start; not what a rank's loop
    answers, nor what a death that nobody outlives means for the run."""

    def __init__(
        self,
        actors: RunActors,
        controller: Controller,
        names: dict[MemberId, str],
        *,
        loops: dict[Any, str],
        stall_timeout: float,
        wake: Callable[[], object],
        say: Callable[[str], None],
        failed: Callable[[Failure], None],
        entered: Callable[[Routing], None],
        recovered: Callable[[Recovery], None],
        begin: Callable[[Run], None] | None = None,
        succeeded: Callable[[int, str], None] | None = None,
        rescaling: Rescaling | None = None,
        progress: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        """``names``: of all members' processes. ``loops``: the calls of ranks' loops and whose they are, as long as an
        answer is expected. ``wake``: ends, from any thread, the caller's wait for a call.

        ``rescaling``: carries out changes of the owners; None: there are none. Called back: ``say`` with what happens,
        ``failed`` with what the run does not outlive, ``entered`` when a new process answers, ``recovered`` once it
        does its work, ``begin`` when a rank's loop is to begin (None: there are no ranks), ``succeeded`` with the
        number of an owner and its successor's address, ``progress`` with the names of those that are being replaced."""
        self._actors, self._controller, self._names, self._loops = actors, controller, names, loops
        self._members = {who: member for member, who in reversed(names.items())}  # a rank's, if it also owns
        self._say, self._failed, self._entered, self._recovered = say, failed, entered, recovered
        self._begin, self._succeeded, self._rescaling = begin, succeeded, rescaling
        self._progress, self._replaced = progress, dict[str, None]()  # who is being replaced, in order
        self._lives = {who: controller.life(member) for member, who in names.items()}  # of the present processes
        self._recovering: dict[MemberId, Recovering] = {}  # members whose processes have died
        # a call lasts as long as its owner serves
        self._owners = {owner.watch.remote(): who for who, owner in actors.owners.items()}
        self._starts: dict[Any, MemberId] = {}  # call -> who starts
        self._telling: dict[Any, Recovering] = {}  # call that tells a member of a new process -> of whose
        self._past: set[Any] = set()  # calls to processes whose deaths were acted on before Ray told of them
        self._deaths = Deaths(_CALM_S)
        self._one_cause = OneCause()
        self._sleepers = Sleepers[str](stall_timeout / 2)
        self._ends = EndWatch(wake)
        if controller.max_failures:
            for who in names.values():
                self._ends.watch(who, actors.local.pid(who))

    def close(self) -> None:
        """Watch nobody any more. Idempotent."""
        self._ends.close()
        for recovering in {id(one): one for one in self._telling.values()}.values():
            self._end_recovery(recovering)
        self._telling.clear()

    @property
    def calls(self) -> list[Any]:
        """The calls to wait for, beside those of loops; give those that end to ``take``."""
        rescaling = self._rescaling.calls if self._rescaling is not None else []
        return [*self._owners, *self._starts, *self._telling, *self._past, *rescaling]

    def take(self, call: Any) -> None:
        """One of ``calls`` has ended."""
        if call in self._owners:
            self.answer(call, self._owners.pop(call))  # owners are stopped after the loops: an end before is a failure
        elif call in self._starts:
            self._take_start(call, self._starts.pop(call))
        elif call in self._telling:
            self._take_told(call, self._telling.pop(call))
        elif self._rescaling is None or not self._rescaling.take(call):
            self._past.discard(call)

    def answer(self, call: Any, who: str) -> Any:
        """The answer of a call that has ended; None after a failure, or after a death, which ``act`` deals with."""
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            failure = failure_from_ray(who, error, self._actors.members.get(who))
            if who not in self._members or isinstance(error, ray.exceptions.RayTaskError):
                self._failed(failure)
            else:
                self._notice_death(failure)
            return None

    def patience_s(self, now: float) -> float | None:
        """Seconds until ``act`` has something to do without an event."""
        patience = (_LOOK_S if self._controller.max_failures else None, self._deaths.patience_s(now))
        return min((max(0.0, seconds) for seconds in patience if seconds is not None), default=None)

    def act(self) -> None:
        """Do what is due by now."""
        if self._controller.max_failures:
            self._end_sleepers()
            self._act_on_deaths()
            self._give_up_late_starts(time.monotonic())
        if self._rescaling is not None:
            self._rescaling.give_up_late(time.monotonic())

    # ---- owners that join and part

    def joined(self, process: Process, *, lives: bool) -> None:
        """A process is an owner from now on. ``lives``: it has not died since it answered."""
        who = str(process)
        self._names[process.member], self._members[who], self._lives[who] = who, process.member, process.life
        if lives:
            self._owners[self._actors.owners[who].watch.remote()] = who
            self._ends.watch(who, self._actors.local.pid(who))

    def died_before(self, process: Process, pid: int) -> None:
        """A process that was to join has died."""
        death = Death(failure=death_of(str(process), pid, ""), since=time.monotonic(), seen=False)
        self._recovering[process.member] = Recovering(who=str(process), death=death, acted=time.monotonic())
        self.perform(self._controller.died(process.member, process.life))

    def parts(self, process: Process) -> None:
        """The process that is an owner now ends, and is not to be missed."""
        self._ends.forget(str(process))
        self._let_go(str(process))

    def _end_sleepers(self) -> None:
        """Kill what has been stopped for half of ``stall_timeout``: others would fail, and it might wake up."""
        for who in self._sleepers.overdue(self._actors.local.stopped, time.monotonic()):
            log.warning("%s was stopped for too long and is killed", who)
            self._actors.local.kill(who)

    def _notice_death(self, failure: Failure) -> None:
        if self._controller.max_failures:
            self._deaths.told(failure, time.monotonic())
        else:
            self._take_death(Death(failure=failure, since=time.monotonic(), seen=False))

    def _act_on_deaths(self) -> None:
        """Act on deaths, unless Ray is ending too: by a signal to everyone, say, which has come here by then. Ray's
        calls would wait a minute for it, and then end this process."""
        for who, pid, at in self._ends.take():
            self._deaths.saw(who, pid, at)
        calm = self._deaths.take(time.monotonic())
        answers = ray_answers() if calm else True
        with postponed():
            for death in calm:
                if answers:
                    self._take_death(death)
                else:
                    self._failed(replace(death.failure, restarts=False))

    def _take_death(self, death: Death) -> None:
        failure = death.failure
        host = self._actors.members[failure.who].node
        counted = self._one_cause.is_known(host, failure.who, death.since)
        if self._actors.has_lost_host(failure.who):
            self._take_loss(failure, None if counted else self._controller.spend())
            return
        member = self._members[failure.who]
        self._ends.forget(failure.who)
        self._let_go(failure.who)
        self._recovering[member] = Recovering(who=failure.who, death=death, acted=time.monotonic())
        actions = self._controller.died(member, self._lives[failure.who], counted=counted)
        if (over := self._controller.over) is not None:
            what = failure.what if not self._controller.max_failures else f"{failure.what} {over[0].upper()}{over[1:]}."
            restarts = not self._controller.exhausted
            self._failed(replace(failure, what=what, restarts=restarts))
        else:
            self.perform(actions)

    def _take_loss(self, failure: Failure, over: str | None = None) -> None:
        """A member's host has left the cluster, and all that was in its memory with it. ``over``: why the run does not
        outlive that."""
        text = over or "only a checkpoint brings back what it had"
        what = f"{failure.what} Its host has left the cluster: {text}."
        restarts = over is None and not self._actors.has_lost_host()
        self._failed(replace(failure, what=what, restarts=restarts))

    def _give_up_late_starts(self, now: float) -> None:
        """Processes that are to take a place may find none: their host has left the cluster, or others use it."""
        for call, member in list(self._starts.items()):
            who, began = self._names[member], self._recovering[member].acted
            late = Failure(who=who, what="died, and no other process could take its place.", restarts=True)
            if self._actors.has_lost_host(who):
                del self._starts[call]
                self._take_loss(late)
            elif now - began > START_S:
                del self._starts[call]
                self._failed(late)

    def _let_go(self, who: str) -> None:
        """Expect nothing more from the calls to the process that was ``who``."""
        for calls in (self._loops, self._owners):
            for call in [call for call, name in calls.items() if name == who]:
                del calls[call]
                self._past.add(call)
        for call in [call for call, member in self._starts.items() if self._names[member] == who]:
            del self._starts[call]
            self._past.add(call)

    def _take_start(self, call: Any, member: MemberId) -> None:
        who, recovering = self._names[member], self._recovering[member]
        answer = self.answer(call, who)
        if answer is None:
            return
        process, address, target = answer
        recovering.answered, recovering.pid = time.monotonic(), process.pid
        if member.kind is Kind.OWNER:
            self._owners[self._actors.owners[who].watch.remote()] = who
        actions = self._controller.ready(member, self._lives[who], address)
        self._entered(self._actors.took_place(who, process, target, self._controller.addresses))
        self._ends.watch(who, self._actors.local.pid(who))
        self.perform(actions)
        if not recovering.telling and member not in self._controller.awaited:
            self._end_recovery(recovering)

    def _take_told(self, call: Any, recovering: Recovering) -> None:
        """A member has been told of a new process, or has died instead, which another call reports."""
        recovering.telling.discard(call)
        if not recovering.telling:
            self._end_recovery(recovering)

    def _end_recovery(self, recovering: Recovering) -> None:
        recovery = recovering.recovery(time.monotonic())
        kind = str(self._members[recovery.who].kind)
        self._actors.coordinator.recovered.remote(kind, recovery.who, recovery.phases)
        self._replaced.pop(recovery.who, None)
        self._progress(list(self._replaced))
        self._recovered(recovery)
        self._say(f"{recovery.who} is back as pid {recovery.pid}, {recovery.seconds:.1f} s after its death")

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions of the controller."""
        for action in actions:
            match action:
                case Start(member, life):
                    self._start(member, life)
                case Lose(rank, life, owners):
                    for owner in owners:
                        self._actors.tell(self._names[owner], "lose", rank, life)
                case Connect(index, life, addresses):
                    self._connect(index, life, addresses)
                case Succeed(index, address, _, others):
                    recovering = self._recovering[MemberId(Kind.OWNER, index)]
                    for other in others:
                        method = "succeed_beside" if other.kind is Kind.BESIDE else "succeed"
                        call = self._actors.tell(self._names[other], method, index, address)
                        self._telling[call] = recovering
                        recovering.telling.add(call)
                    if self._succeeded is not None:
                        self._succeeded(index, address)
                case Run():
                    assert self._begin is not None, "only ranks have loops"
                    self._begin(action)
                case Kill(process, why):
                    log.warning("%s cannot go on with other owners and is killed: %s", process, why)
                    ray.kill(self._actors.handle(actor_name(process.member)))
                case _:
                    assert self._rescaling is not None, "only they change owners"
                    self._rescaling.perform(action)

    def _start(self, member: MemberId, life: int) -> None:
        """Start another process in the place of one that has died."""
        self._lives[self._names[member]] = life
        failure = self._recovering[member].death.failure
        left = still_outlived(self._controller.max_failures, self._controller.outlived)
        self._say(f"{failure.who} {failure.what} Another process takes its place {left}")
        self._replaced[failure.who] = None
        self._progress(list(self._replaced))
        started = self._actors.start_owner if member.kind is Kind.OWNER else self._actors.start_rank
        self._starts[started(member.index)] = member

    def _connect(self, owner: int, life: int, addresses: Sequence[str]) -> None:
        """Tell a successor where all owners are. If it does not answer, the call that watches it will say why."""
        who = optimizer_name(owner)
        try:
            ray.get(self._actors.tell(who, "connect_peers", addresses), timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError:
            self._actors.local.kill(who)
        except ray.exceptions.RayError as error:
            log.debug("%s was not told where the owners are: %s", who, error)
        else:
            self.perform(self._controller.connected(owner, life))
