"""Watches a run's processes, and puts others in the places of those that die."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from rayzero.cluster.nodes.session import ray_answers
from rayzero.cluster.run import Recovery, actor_name
from rayzero.cluster.run_actors import RunActors
from rayzero.cluster.status import RunStatus
from rayzero.cluster.supervision import Failure, OneCause, death_of, postponed
from rayzero.cluster.upkeep.ray_processes import Death, RayProcesses
from rayzero.cluster.upkeep.rescaling import Rescaling
from rayzero.elastic.controller import Controller, Start, Supervisor, still_outlived
from rayzero.elastic.members import Answered, Died, Event, MemberId, MemberKind, Process, Serves
from rayzero.elastic.reform import Call


@dataclass(slots=True, kw_only=True)
class Recovering:
    """A member whose place another process takes; the times are monotonic seconds."""

    who: str
    death: Death
    acted: float  # when the new process was asked for
    answered: float = 0.0  # when it answered
    pid: int = 0  # its own
    telling: set[Process] = field(default_factory=set)  # processes that have been told about it and have not answered

    def recovery(self, now: float) -> Recovery:
        """The recovery, which has ended. A phase that nobody has measured is not in it."""
        phases = {"detect": self.acted - self.death.since} if self.death.seen else {}
        phases["start"] = self.answered - self.acted
        if not self.telling:
            phases["re-form"] = now - self.answered
        return Recovery(who=self.who, pid=self.pid, seconds=now - self.death.since, phases=phases)


class Replacement:
    """Passes what happens to processes on to a Supervisor, and writes down what comes of it.

    Knows what a death costs and how long a recovery takes; not Ray's calls, nor how a loop ends."""

    def __init__(self, actors: RunActors, controller: Controller, processes: RayProcesses, status: RunStatus) -> None:
        """``status``: where recoveries and the members of now are entered."""
        self._actors, self._controller, self.processes, self._status = actors, controller, processes, status
        self.supervisor = Supervisor(controller, processes)
        self.rescaling: Rescaling | None = None  # of owners, if they may change
        self._dead: dict[MemberId, Recovering] = {}  # until other processes are started
        self._recovering: dict[MemberId, Recovering] = {}  # from then on
        self._one_cause = OneCause()

    def close(self) -> None:
        self.processes.close()
        for member in [member for member, one in self._recovering.items() if one.telling]:
            self._end_recovery(member)

    def failed(self) -> list[Failure]:
        """What the run does not outlive, of which this has not told yet."""
        found, self.processes.failures = self.processes.failures, []
        return found

    def take(self, call: Any) -> None:
        """One of the calls of ``processes`` has ended."""
        for event in self.processes.take(call):
            if isinstance(event, Died):  # before it was a member
                failure = death_of(str(event.process), self.processes.joining_pid(event.process), "")
                self._die(event, Death(failure=failure, since=time.monotonic(), seen=False))
            else:
                self.do(event)

    def act(self) -> None:
        now = time.monotonic()
        self._act_on_deaths(now)
        if self._controller.max_failures:
            for process in self.processes.late(now):
                self._give_up(process)
            for event in self.processes.refusals(now):
                self.do(event)

    def do(self, event: Event) -> None:
        actions = self.supervisor.take(event)
        self._note(event)
        for action in actions:
            match action:
                case Start(process):
                    self._recovering[process.member] = self._dead.pop(process.member)
                    self._note_start(self._recovering[process.member])
                case Call(others, "succeed", (owner, _)):
                    self._recovering[MemberId(MemberKind.OWNER, owner)].telling = set(others)
                case _:  # of a change of the owners
                    pass
        self._end_recoveries()
        if self.rescaling is not None:
            self.rescaling.note(event, actions)

    # ---- deaths

    def _act_on_deaths(self, now: float) -> None:
        """Act on deaths, unless Ray is ending too: by a signal to everyone, say, which has come here by then. Ray's
        calls would wait a minute for it, and then end this process."""
        calm = self.processes.died(now)
        answers = ray_answers() if calm else True
        with postponed():
            for death in calm:
                if answers:
                    self._take_death(death)
                else:
                    self.processes.failures.append(replace(death.failure, restarts=False))

    def _take_death(self, death: Death) -> None:
        failure = death.failure
        host = self._actors.members[failure.who].node
        counted = self._one_cause.is_known(host, failure.who, death.since)
        if self._actors.has_lost_host(failure.who):
            self._take_loss(failure, None if counted else self._controller.spend())
            return
        self.processes.let_go(failure.who)
        self._die(Died(self.processes.present(failure.who), counted), death)

    def _die(self, event: Died, death: Death) -> None:
        member, failure = event.process.member, death.failure
        self._dead[member] = Recovering(who=failure.who, death=death, acted=time.monotonic())
        self._recovering.pop(member, None)
        self.do(event)
        if (over := self._controller.over) is not None:
            what = failure.what if not self._controller.max_failures else f"{failure.what} {over[0].upper()}{over[1:]}."
            self.processes.failures.append(replace(failure, what=what, restarts=not self._controller.exhausted))

    def _take_loss(self, failure: Failure, over: str | None = None) -> None:
        """A member's host has left the cluster, and all that was in its memory with it. ``over``: why the run does not
        outlive that."""
        text = over or "only a checkpoint brings back what it had"
        what = f"{failure.what} Its host has left the cluster: {text}."
        restarts = over is None and not self._actors.has_lost_host()
        self.processes.failures.append(replace(failure, what=what, restarts=restarts))

    def _give_up(self, process: Process) -> None:
        who = actor_name(process.member)
        late = Failure(who=who, what="died, and no other process could take its place.", restarts=True)
        if self._actors.has_lost_host(who):
            self._take_loss(late)
        else:
            self.processes.failures.append(late)

    # ---- recoveries

    def _note(self, event: Event) -> None:
        recovering = self._recovering.get(event.process.member)
        match event:
            case Serves() if recovering is not None:
                recovering.answered, recovering.pid = time.monotonic(), self._actors.members[recovering.who].pid
                self._actors.enlist()
                self._status.enter(self._controller.addresses, self._actors)
            case Answered(process, "succeed") | Died(process):
                told = [one for one in self._recovering.values() if process in one.telling]
                for one in told if isinstance(event, Died) else told[:1]:
                    one.telling.discard(process)
            case _:
                pass

    def _note_start(self, recovering: Recovering) -> None:
        failure = recovering.death.failure
        left = still_outlived(self._controller.max_failures, self._controller.outlived)
        self._status.say(f"{failure.who} {failure.what} Another process takes its place {left}")
        self._status.replacing = [*self._without(failure.who), failure.who]
        self._status.changed()

    def _without(self, who: str) -> list[str]:
        return [other for other in self._status.replacing if other != who]

    def _end_recoveries(self) -> None:
        awaited = self._controller.awaited
        ended = [m for m, one in self._recovering.items() if one.answered and not one.telling and m not in awaited]
        for member in ended:
            self._end_recovery(member)

    def _end_recovery(self, member: MemberId) -> None:
        recovery = self._recovering.pop(member).recovery(time.monotonic())
        self._actors.coordinator.recovered.remote(str(member.kind), recovery.who, recovery.phases)
        self._status.replacing = self._without(recovery.who)
        self._status.changed()
        self._status.recoveries.append(recovery)
        self._status.say(f"{recovery.who} is back as pid {recovery.pid}, {recovery.seconds:.1f} s after its death")
