"""The members of a run on Ray, as a ``Supervisor`` starts, calls and ends them.

[Note: two witnesses] Ray reports a death from any node, with a reason, but not at once, and not when it happened. The
kernel reports it at once, to a pidfd, but only of processes on the driver's node. So a death counts from the first
word, its moment is known only where the kernel saw it, and Ray's words describe it if they have come by then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import ray

from rayzero.cluster.actor_calls import ANSWER_S, START_S, ReachTrial, control, failure_from_ray
from rayzero.cluster.processes.rank_worker import PackedLoop, RankSettings
from rayzero.cluster.roster import Joining
from rayzero.cluster.run import actor_name
from rayzero.cluster.run_actors import RunActors
from rayzero.cluster.supervision import Failure, death_of
from rayzero.concurrency.processes import Sleepers, process_with, watch_process
from rayzero.elastic.members import Answered, Died, Event, MemberId, MemberKind, Process, Serves
from rayzero.elastic.reform import Step
from rayzero.errors import ConfigError, RayZeroError
from rayzero.protocol.ownership import Ownership

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks for stopped processes
_CALM_S = 0.3  # between a death and what is done about it


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A call that is open."""

    process: Process
    method: str
    since: float  # monotonic seconds


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A process that joins and is up, while the run's hosts try to reach it."""

    address: str
    trial: ReachTrial
    since: float  # monotonic seconds


class RayProcesses:
    """Makes events of Ray's answers: a ``Processes``.

    Knows calls, and whose each is; not why one is made, nor what a death means for the run."""

    def __init__(
        self,
        actors: RunActors,
        lives: Mapping[MemberId, int],
        *,
        replaces: bool,
        stall_timeout: float,
        settings: Sequence[RankSettings] = (),
        packed_loop: PackedLoop | None = None,
        join_s: float = START_S,
    ) -> None:
        """``lives``: of all members. ``replaces``: whether others take the places of the dead. ``stall_timeout``: after
        half of it, a process that is stopped is killed then. ``settings``: of each rank, whose loop is ``packed_loop``.
        ``join_s``: seconds in which a process that joins is up."""
        self._actors, self._replaces, self._settings, self._packed_loop = actors, replaces, settings, packed_loop
        self._join_s = max(START_S, join_s)
        there = [Process(member, life) for member, life in lives.items()]
        self._present = {actor_name(each.member): each for each in reversed(there)}  # a rank, if it also owns
        self._handles: dict[Process, Any] = {each: actors.handle(actor_name(each.member)) for each in there}
        self.failures: list[Failure] = []  # which no other process can mend, for the caller to take
        self.loops: dict[Any, str] = {}  # calls of ranks' loops -> whose, as long as an answer is expected
        # a call lasts as long as its owner serves
        owners = [each for each in there if each.member.kind is MemberKind.OWNER]
        self._watches = {self._handles[each].watch.remote(): each for each in owners}
        self._starts: dict[Any, _OpenCall] = {}
        self._asked: dict[Any, _OpenCall] = {}
        self._past: set[Any] = set()  # calls to processes whose deaths were acted on before Ray told of them
        self.nodes: Mapping[int, str] = {}  # owner that is to join -> its node
        self._joining: dict[Process, Joining] = {}
        self._addresses: Sequence[str] = ()  # of the owners before
        self._arrivals: dict[Process, _Arrival] = {}  # of those that join
        self._deaths = Deaths(_CALM_S if replaces else 0.0)
        self._sleepers = Sleepers[str](stall_timeout / 2)
        coordinator = actors.coordinator
        self._ends = EndWatch(lambda: coordinator.rouse.remote())  # else nobody waits for a call that ends now
        if replaces:
            for who in self._present:
                self._ends.watch(who, actors.local.pid(who))

    def close(self) -> None:
        self._ends.close()

    def present(self, who: str) -> Process:
        """The process that is a member now, or was until it died."""
        return self._present[who]

    def joining_pid(self, process: Process) -> int | None:
        """The id of a process that is to join, once it has answered."""
        member = self._joining[process].member
        return None if member is None else member.pid

    # ---- what is done to processes

    def start(self, process: Process, ownership: Ownership) -> None:
        member, who = process.member, actor_name(process.member)
        started = self._actors.start_owner if member.kind is MemberKind.OWNER else self._actors.start_rank
        call = started(member.index)
        self._present[who], self._handles[process] = process, self._actors.handle(who)
        self._starts[call] = _OpenCall(process, Step.START, time.monotonic())

    def join(self, process: Process, ownership: Ownership, addresses: Sequence[str]) -> None:
        self._addresses = addresses
        joining, call = self._actors.join_owner(process.member.index, ownership, self.nodes[process.member.index])
        self._joining[process], self._handles[process] = joining, joining.actor
        self._starts[call] = _OpenCall(process, Step.START, time.monotonic())

    def run(self, rank: Process, addresses: Sequence[str], ownership: Ownership) -> None:
        assert self._packed_loop is not None, "only ranks have loops"
        own = self._settings[rank.member.index]
        start = replace(own.start, life=rank.life, addresses=tuple(addresses), ownership=ownership)
        self.loops[self._actors.run_loop(replace(own, start=start), self._packed_loop)] = actor_name(rank.member)

    def call(self, processes: Sequence[Process], method: str, *arguments: Any) -> None:
        if method == Step.ENTER:
            self._enter(arguments[0])
        calls = {self._remote(each, str(method), arguments): each for each in processes}
        self._asked |= {call: _OpenCall(each, method, time.monotonic()) for call, each in calls.items()}
        if method == "abandon" and calls:  # Ray may carry out what another attempt asks before it
            ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S)

    def _remote(self, process: Process, method: str, arguments: Sequence[Any]) -> Any:
        actor = self._handles[process]
        if process.member.kind is MemberKind.RANK:
            return control(getattr(actor, method)).remote(*arguments)
        return control(actor.call_owner).remote(method, arguments)

    def kill(self, processes: Sequence[Process]) -> None:
        others = [process for process in processes if process not in self._joining]
        if len(others) < len(processes):
            self._end_joining()
        for process in others:
            who, actor = actor_name(process.member), self._handles[process]
            ray.kill(actor)
            if self._actors.handle(who) is actor:
                self._actors.local.kill(who)  # a stopped process does not hear Ray

    def _end_joining(self) -> None:
        """All that were to join: they are needed together, or not at all."""
        self._starts = {call: of for call, of in self._starts.items() if of.process not in self._joining}
        self._watches = {call: of for call, of in self._watches.items() if of not in self._joining}
        self._joining, self._arrivals = {}, {}
        self._actors.end_joining()

    def end(self, process: Process) -> None:
        who, actor = actor_name(process.member), self._handles.pop(process)
        if self._actors.owners.get(who) is actor:  # else another one has its place
            self.let_go(who)
        self._actors.part(actor, process.member.index)

    def _enter(self, ownership: Ownership) -> None:
        """Owners that are replaced are not to be missed, and those that join are members from now on."""
        joining, self._joining = self._joining, {}
        for process in joining:
            self.let_go(actor_name(process.member))
        self._actors.enter(ownership)
        self._present |= {actor_name(process.member): process for process in joining}
        for process in joining:
            if process in self._watches.values():  # else it has died, which is known
                self._ends.watch(str(process), self._actors.local.pid(str(process)))

    def let_go(self, who: str) -> None:
        """Expect nothing more of the process that is this member."""
        self._ends.forget(who)
        process = self._present.get(who)
        past = [call for call, name in self.loops.items() if name == who]
        past += [call for call, of in self._watches.items() if of == process]
        past += [call for call, of in self._starts.items() if of.process == process]
        for call in past:
            for calls in (self.loops, self._watches, self._starts):
                calls.pop(call, None)
        self._past.update(past)

    # ---- what comes of it

    @property
    def calls(self) -> list[Any]:
        """The calls to wait for, beside those of loops; give those that end to ``take``."""
        trials = [call for arrival in self._arrivals.values() for call in arrival.trial.calls]
        return [*self._watches, *self._starts, *self._asked, *self._past, *trials]

    def take(self, call: Any) -> list[Event]:
        if call in self._watches:
            return self._take_end(call, self._watches.pop(call))
        if call in self._starts:
            process = self._starts.pop(call).process
            return self._take_joined(call, process) if process in self._joining else self._take_start(call, process)
        if call in self._asked:
            return self._take_answer(call, self._asked.pop(call))
        self._past.discard(call)
        events: list[Event] = []
        for process in [each for each, arrival in self._arrivals.items() if call in arrival.trial.calls]:
            self._arrivals[process].trial.take(call)
            events += self._let_in(process)
        return events

    def answer(self, call: Any, who: str) -> Any:
        """The answer of a call that has ended; None after a failure, or after a death, which ``died`` returns."""
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            failure = failure_from_ray(who, error, self._actors.members.get(who))
            if who not in self._present or isinstance(error, ray.exceptions.RayTaskError):
                self.failures.append(failure)
            else:
                self._deaths.told(failure, time.monotonic())
            return None

    def _take_end(self, call: Any, process: Process) -> list[Event]:
        if process in self._joining:
            return [Died(process)]
        self.answer(call, actor_name(process.member))  # owners are stopped after the loops: an end before is a failure
        return []

    def _take_start(self, call: Any, process: Process) -> list[Event]:
        who = actor_name(process.member)
        answer = self.answer(call, who)
        if answer is None:
            return []
        member, address, target = answer
        if process.member.kind is MemberKind.OWNER:
            self._watches[self._handles[process].watch.remote()] = process
        self._actors.took_place(who, member, target)
        self._ends.watch(who, self._actors.local.pid(who))
        return [Serves(process, address)]

    def _take_joined(self, call: Any, process: Process) -> list[Event]:
        try:
            member, address, target = ray.get(call)
        except ray.exceptions.RayError as error:
            log.warning("%s did not join: %s", process, str(error).partition("\n")[0])
            return [Died(process)]
        joining = self._joining[process]
        self._actors.joined(joining, member, target)
        coming = joining.settings.ownership
        try:
            self._actors.check_files(coming.num_owners, len(coming.door_numbers), {str(process.member): member})
        except ConfigError as error:
            return [Answered(process, Step.START, refused=str(error))]
        self._watches[joining.actor.watch.remote()] = process
        trial = self._actors.try_to_reach(joining, address, self._addresses)
        self._arrivals[process] = _Arrival(address, trial, time.monotonic())
        return self._let_in(process)

    def _let_in(self, process: Process) -> list[Event]:
        """Once all have tried to reach a process that joins: what stands in the next epoch cannot be given up."""
        if self._arrivals[process].trial.calls:
            return []
        arrival = self._arrivals.pop(process)
        try:
            arrival.trial.require()
        except ConfigError as error:
            return [Answered(process, Step.START, refused=str(error))]
        return [Serves(process, arrival.address)]

    def _take_answer(self, call: Any, asked: _OpenCall) -> list[Event]:
        process, method = asked.process, asked.method
        try:
            return [Answered(process, method, ray.get(call))]
        except ray.exceptions.RayTaskError as error:
            return [Answered(process, method, refused=_in_one_line(error.cause))]
        except ray.exceptions.RayError as error:  # it has died, which another call reports
            log.debug("%s was not told to %s: %s", process, method, error)
            return [] if method in list(Step) else [Answered(process, method, refused="it has died")]

    # ---- what takes too long

    def patience_s(self, now: float) -> float | None:
        """Seconds until ``died`` has something to do without an event."""
        patience = (_LOOK_S if self._replaces else None, self._deaths.patience_s(now))
        return min((max(0.0, seconds) for seconds in patience if seconds is not None), default=None)

    def died(self, now: float) -> list[Death]:
        """The deaths to act on by now. Those that have been stopped for too long are killed: others would fail, and
        they might wake up."""
        if self._replaces:
            for who in self._sleepers.overdue(self._actors.local.stopped, now):
                log.warning("%s was stopped for too long and is killed", who)
                self._actors.local.kill(who)
        for who, pid, at in self._ends.take():
            self._deaths.saw(who, pid, at)
        return self._deaths.take(now)

    def late(self, now: float) -> list[Process]:
        """Processes that are to take a place and have found none by now, as their host has left the cluster or others
        use it. Nothing more is expected of them."""
        there = {call: of for call, of in self._starts.items() if of.process not in self._joining}
        late = [
            call
            for call, of in there.items()
            if now - of.since > START_S or self._actors.has_lost_host(actor_name(of.process.member))
        ]
        return [self._starts.pop(call).process for call in late]

    def refusals(self, now: float) -> list[Event]:
        """Processes that should have answered by now. One that is to join may find no place, or take too long to start;
        Ray does not say which. One that tries to reach it may be stopped, or one that is to learn of the others."""
        events: list[Event] = []
        for call, of in list(self._starts.items()):
            if of.process in self._joining and now - of.since > self._join_s:
                del self._starts[call]
                why = f"it was not up within {now - of.since:.0f} s; it needs {self._actors.places.needs}"
                events.append(Answered(of.process, Step.START, refused=why))
        for process, arrival in list(self._arrivals.items()):
            if now - arrival.since > START_S:
                del self._arrivals[process]
                why = (
                    f"{', '.join(arrival.trial.calls.values())} gave no answer within {now - arrival.since:.0f} s to "
                    "whether the run's hosts reach each other; see whether they are stopped, and ask again"
                )
                events.append(Answered(process, Step.START, refused=why))
        for call, of in list(self._asked.items()):
            if of.method == "connect_peers" and now - of.since > ANSWER_S:
                del self._asked[call]
                events.append(Answered(of.process, of.method, refused=f"no answer within {ANSWER_S:g} s"))
        return events


def _in_one_line(error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0]
    return said if isinstance(error, RayZeroError) else f"{type(error).__name__}: {said}"


# ---- deaths, from the first word of one until it is acted on --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A process that has died."""

    failure: Failure
    since: float  # monotonic seconds: when it happened if it was ``seen``, else when Ray told of it
    seen: bool  # by the kernel


class Deaths:
    """Deaths that nobody has acted on. Each waits until it is ``calm_s`` old.

    Knows names; not processes, Ray or a clock (callers pass monotonic seconds)."""

    def __init__(self, calm_s: float) -> None:
        self._calm_s = calm_s
        self._known: dict[str, Death] = {}

    def told(self, failure: Failure, now: float) -> None:
        known = self._known.get(failure.who)
        since, seen = (known.since, known.seen) if known is not None else (now, False)
        self._known[failure.who] = Death(failure=failure, since=since, seen=seen)

    def saw(self, who: str, pid: int, at: float) -> None:
        known = self._known.get(who)
        failure = known.failure if known is not None else death_of(who, pid, "")
        self._known[who] = Death(failure=failure, since=at, seen=True)

    def patience_s(self, now: float) -> float | None:
        """Seconds until ``take`` returns a death; None: it will not."""
        return min((max(0.0, death.since + self._calm_s - now) for death in self._known.values()), default=None)

    def take(self, now: float) -> list[Death]:
        """The deaths that are old enough, the oldest first; they are acted on now."""
        calm = [death for death in self._known.values() if now - death.since >= self._calm_s]
        for death in calm:
            del self._known[death.failure.who]
        return sorted(calm, key=lambda death: death.since)


class EndWatch:
    """Notices the ends of processes on this node. [Note: two witnesses]"""

    def __init__(self, wake: Callable[[], object]) -> None:
        """``wake``: called on another thread when ``take`` has something to return."""
        self._wake = wake
        self._ended: SimpleQueue[tuple[str, int, float]] = SimpleQueue()
        self._watched: dict[str, tuple[int, Callable[[], None]]] = {}  # who -> pid, and what ends the watch

    def watch(self, who: str, pid: int | None) -> None:
        """Watch this process, and no earlier one of that name. None: it is on another node."""
        self.forget(who)
        process = None if pid is None else process_with(pid)
        if process is None:
            return

        def died() -> None:
            self._ended.put((who, process.pid, time.monotonic()))
            self._wake()

        end = watch_process(process, died)
        if end is not None:
            self._watched[who] = process.pid, end

    def forget(self, who: str) -> None:
        if who in self._watched:
            self._watched.pop(who)[1]()

    def take(self) -> list[tuple[str, int, float]]:
        """(who, pid, monotonic seconds of the end) of each process that has ended since the last call."""
        found = []
        try:
            while True:
                found.append(self._ended.get_nowait())
        except Empty:
            return [(who, pid, at) for who, pid, at in found if self._watched.get(who, (0,))[0] == pid]

    def close(self) -> None:
        for who in list(self._watched):
            self.forget(who)
