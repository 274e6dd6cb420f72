"""Changes the owners of a run on Ray while it goes on: places, starts and ends processes, and takes the steps of a
change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from rayzero.cluster.actors.calls import ANSWER_S, START_S, control
from rayzero.cluster.actors.reach_trial import ReachTrial
from rayzero.cluster.actors.run_actors import Joining, RunActors
from rayzero.cluster.nodes.owner_places import check_memory, check_nodes, choose, hosts, is_placed
from rayzero.cluster.run import Rescaled, Routing, actor_name, optimizer_name
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.elastic import reform
from rayzero.elastic.controller import Controller, still_outlived
from rayzero.elastic.members import Process
from rayzero.elastic.reform import Step
from rayzero.elastic.requests import ScaleRequest
from rayzero.errors import ConfigError, RayZeroError
from rayzero.layout.rescale import Rescale
from rayzero.protocol.ownership import Prepared
from rayzero.quantities import count, format_bytes

__all__ = ["Rescaling", "why_not"]

log = logging.getLogger(__name__)

_REPLACED = "another change was asked for before it began"
_SAID = {
    Step.START: "starting what is missing",
    Step.HOLD: "finishing what is decided",
    Step.SETTLE: "publishing what is decided",
    Step.PREPARE: "writing down who owns what",
    Step.LET_STAND: "beginning the next epoch",
    Step.ENTER: "letting the new owners serve",
    Step.CHANGE: "leading the ranks to them",
}


def why_not(zero: ZeroConfig, max_failures: int) -> str | None:
    """Why the owners of a run cannot change; None if they can."""
    if zero.shared_directory is None:
        return "with zero.transport='grpc' owners have memory of their own, which nobody else can take over"
    if not max_failures:
        return "run.max_failures is 0, so its processes do not follow other optimizers"
    return None


@dataclass(slots=True)
class _Change:
    """A change that was asked for."""

    request: ScaleRequest
    why: str
    nodes: dict[int, str]  # owner that joins -> its node
    before: int = 0
    began: dict[Step, float] = field(default_factory=dict)  # monotonic seconds
    moved_bytes: int = 0
    stood: float = 0.0  # seconds, in attempts that were given up

    def __str__(self) -> str:
        return f"from {count(self.before, 'optimizer')} to {self.request.num_optimizers}"

    def begin_again(self, now: float) -> None:
        """The attempt is given up: nothing has moved."""
        self.stood, self.moved_bytes = self._pause(now), 0
        self.began = {Step.START: now}

    def _pause(self, now: float) -> float:
        held = self.began.get(Step.HOLD)
        return self.stood + (0.0 if held is None else now - held)

    def rescaled(self, now: float, failed: str | None = None) -> Rescaled:
        """What came of it. ``now``: when the last step ended."""
        began = [*self.began.values(), now]
        seconds = {str(step): end - start for step, start, end in zip(self.began, began, began[1:], strict=False)}
        return Rescaled(
            id=self.request.id,
            why=self.why,
            before=self.before,
            after=self.before if failed else self.request.num_optimizers,
            failed=failed,
            seconds=seconds,
            pause=self._pause(now),
            moved_bytes=0 if failed else self.moved_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A process that joins and is up, while the run's hosts try to reach it."""

    address: str
    trial: ReachTrial
    since: float  # monotonic seconds


class Rescaling:
    """Carries out what the Controller says of a change of the owners.

    Knows the calls of a change; not deaths, nor when one is wanted."""

    def __init__(
        self,
        actors: RunActors,
        controller: Controller,
        *,
        zero: ZeroConfig,
        scaling: ScalingConfig,
        perform: Callable[[Iterable[Any]], None],
        joined: Callable[[Process, bool], None],
        died: Callable[[Process, int], None],
        parts: Callable[[Process], None],
        say: Callable[[str], None],
        progress: Callable[[str | None], None],
        ended: Callable[[Rescaled, Routing | None], None],
    ) -> None:
        """Called back: ``perform`` with actions of the controller, ``joined`` with a process that is an owner from now
        on and whether it lives, ``died`` with one that has died before that, and its process id, ``parts`` with one
        that ends, ``say`` with what happens, ``progress`` with what is done now (None: nothing), ``ended`` with what
        came of a request and, if the owners have changed, the new routing table."""
        self._actors, self._controller, self._zero, self._scaling = actors, controller, zero, scaling
        self._placement = zero.placement  # that of the last change that named one
        self._perform, self._joined, self._parts, self._say, self._ended = perform, joined, parts, say, ended
        self._progress, self._died = progress, died
        self._refusal = why_not(zero, controller.max_failures)
        self._waiting: _Change | None = None  # asked for while another one was under way
        self._change: _Change | None = None
        self._joining: dict[Process, Joining] = {}
        self._starts: dict[Any, tuple[Process, float]] = {}  # call -> who joins, when it was made
        self._arrivals: dict[Process, _Arrival] = {}  # of those that are up
        self._watched: dict[Any, Process] = {}  # call -> who joins, as long as it lives
        self._dead: set[Process] = set()  # of those that join
        self._handles: dict[Process, Any] = {}  # of those that take part in the change
        self._asked: dict[Any, tuple[Process, Step]] = {}

    # ---- requests

    def request(self, request: ScaleRequest, why: str = "asked for") -> None:
        """Change to other owners, once every member does its work; instead of a change that has not begun. ``why``: for
        the record."""
        change = _Change(request, why, {}, before=self._controller.ownership.num_owners)
        if self._refusal is not None:
            self._end(change, f"the optimizers of this run cannot change: {self._refusal}")
        elif self._change is not None and self._controller.changes:
            self._replace_waiting(change)
        else:
            self._begin(change)

    def replace(self, request: ScaleRequest) -> None:
        """A request is not carried out, because a newer one came with it."""
        self._end(_Change(request, "asked for", {}, before=self._controller.ownership.num_owners), _REPLACED)

    def _replace_waiting(self, change: _Change) -> None:
        if self._waiting is not None:
            self._end(self._waiting, _REPLACED)
        self._waiting = change

    def _begin(self, change: _Change) -> None:
        try:
            wanted = self._planned(change)
            changes = wanted != Rescale.to(change.before, change.before)
            if changes:
                self._check_files(change)
                self._check_hosts(change, wanted)
        except ConfigError as error:
            self._end(change, str(error))
            return
        if not changes:
            self._say(f"it has {count(change.before, 'optimizer')} already")
            self._ended(change.rescaled(time.monotonic()), None)
            return
        self._change = change
        change.began[Step.START] = time.monotonic()
        self._say(f"changing {change} ({change.why})")
        self._progress(f"{change}: {_SAID[Step.START]}")
        self._perform(self._controller.scale(wanted))

    def _planned(self, change: _Change) -> Rescale:
        """Who stays, and where those that join are to be."""
        avoid, before, labels = change.request.avoid, change.before, self._scaling.optimizer_labels
        alive = hosts()
        check_nodes(avoid, alive)
        check_memory(change.request.num_optimizers - before, alive)
        placement = change.request.placement or self._placement
        nodes = {i: self._actors.members[optimizer_name(i)] for i in range(before)}
        ranks = [member.node for who, member in self._actors.members.items() if who.startswith("rank")]
        right = {
            node.id
            for node in alive
            if change.request.placement is None or is_placed(node, rank_nodes=ranks, placement=placement, labels=labels)
        }
        stays = [i for i, at in nodes.items() if at.node in right and at.node not in avoid and at.host not in avoid]
        former = tuple(i if i in stays else None for i in range(change.request.num_optimizers))
        there = [nodes[i].node for i in stays if i < len(former)]
        for owner in (i for i, was in enumerate(former) if was is None):
            change.nodes[owner] = choose(
                there,
                alive,
                rank_nodes=ranks,
                placement=placement,
                labels=labels,
                avoid=avoid,
            )
            there.append(change.nodes[owner])
        return Rescale(former)

    def _check_files(self, change: _Change) -> None:
        """Raise ConfigError if a process may not open a connection to each owner after a change."""
        why = self._actors.too_few_files(change.request.num_optimizers, {})
        if why is not None:
            raise ConfigError(why)

    def _check_hosts(self, change: _Change, wanted: Rescale) -> None:
        """Raise ConfigError if ranks could not reach the owners after a change, or owners not each other; let them, if
        the run has been on one node until now."""
        members = self._actors.members
        ranks = {member.node for who, member in members.items() if who.startswith("rank")}
        stay = {members[optimizer_name(i)].node for i in wanted.former if i is not None}
        nodes = ranks | stay | set(change.nodes.values())
        if len(nodes) == 1:
            return
        if self._zero.transport == "shm":
            where = count(len(nodes), "node")
            raise ConfigError(f"zero.transport='shm' needs every process on one host, and these are on {where}")
        self._controller.readdress(self._actors.listen_at_nodes(self._controller.addresses))

    def close(self) -> None:
        """The run's processes end: so do the changes that it has not made. Idempotent."""
        waiting, self._waiting, change, self._change = self._waiting, None, self._change, None
        for each in (change, waiting):
            if each is not None:
                self._end(each, "its processes have ended before; ask again if the run starts again")

    def _end(self, change: _Change, failed: str | None, routing: Routing | None = None) -> None:
        rescaled = change.rescaled(time.monotonic(), failed)
        outcome = "given_up" if failed else "done"
        self._actors.coordinator.rescaled.remote(outcome, dict(rescaled.seconds), rescaled.pause, rescaled.moved_bytes)
        if failed is None:
            self._placement = change.request.placement or self._placement
            now, moved = count(rescaled.after, "optimizer"), format_bytes(change.moved_bytes)
            said = f"the run has {now} now; training stood for {rescaled.pause:.2f} s; {moved} have another owner"
        else:
            said = f"{count(change.before, 'optimizer')} as before: {failed}"
        self._say(said)
        self._progress(None)
        self._ended(rescaled, routing)

    # ---- calls

    @property
    def calls(self) -> list[Any]:
        """The calls to wait for; give those that end to ``take``."""
        trials = [call for arrival in self._arrivals.values() for call in arrival.trial.calls]
        return [*self._starts, *self._watched, *trials, *self._asked]

    def take(self, call: Any) -> bool:
        """One of ``calls`` has ended. False: it is none of them."""
        if call in self._starts:
            self._take_start(call, self._starts.pop(call)[0])
        elif call in self._watched:
            process = self._watched.pop(call)
            self._dead.add(process)
            member = self._joining[process].member
            assert member is not None, "it has answered"
            self._died(process, member.pid)
        elif call in self._asked:
            self._take_answer(call, *self._asked.pop(call))
        else:
            tried = [process for process, arrival in self._arrivals.items() if call in arrival.trial.calls]
            for process in tried:
                self._arrivals[process].trial.take(call)
                self._let_in(process)
            return bool(tried)
        return True

    def _take_start(self, call: Any, process: Process) -> None:
        try:
            member, address, target = ray.get(call)
        except ray.exceptions.RayError as error:
            log.warning("%s did not join: %s", process, str(error).partition("\n")[0])
            self._perform(self._controller.died(process.member, process.life))
            return
        joining = self._joining[process]
        self._actors.joined(joining, member, target)
        assert self._change is not None, "it joins for this change"
        why = self._actors.too_few_files(self._change.request.num_optimizers, {str(process.member): member})
        if why is not None:
            self._perform(self._controller.refused(process, Step.START, why))
            return
        self._watched[joining.actor.watch.remote()] = process
        self._progress(f"{self._change}: {len(self._watched)} of {len(self._joining)} new processes are up")
        trial = self._actors.try_to_reach(joining, address, self._controller.addresses)
        self._arrivals[process] = _Arrival(address, trial, time.monotonic())
        self._let_in(process)

    def _let_in(self, process: Process) -> None:
        """Once all have tried to reach a process that joins: what stands in the next epoch cannot be given up."""
        if self._arrivals[process].trial.calls:
            return
        arrival = self._arrivals.pop(process)
        try:
            arrival.trial.require()
        except ConfigError as error:
            self._perform(self._controller.refused(process, Step.START, str(error)))
        else:
            self._perform(self._controller.ready(process.member, process.life, arrival.address))

    def _take_answer(self, call: Any, process: Process, step: Step) -> None:
        try:
            answer = ray.get(call)
        except ray.exceptions.RayTaskError as error:
            self._perform(self._controller.refused(process, step, _in_one_line(error.cause)))
        except ray.exceptions.RayError as error:  # it has died, which another call reports
            log.debug("%s did not %s: %s", process.member, step, error)
        else:
            if isinstance(answer, Prepared):
                self._take_prepared(process, answer)
                answer = answer.leads
            self._perform(self._controller.answered(process, step, answer))

    def _take_prepared(self, process: Process, answer: Prepared) -> None:
        if self._change is None or process not in self._handles:  # late, of an attempt that is given up
            return
        self._change.moved_bytes += answer.moved_bytes
        moved = format_bytes(self._change.moved_bytes)
        self._progress(f"{self._change}: {process.member} is ready; {moved} have another owner by now")

    def give_up_late(self, now: float) -> None:
        """Processes that are to join may find no place, or take too long to start; Ray does not say which. And whoever
        tries to reach them may be stopped."""
        patience_s = max(START_S, self._scaling.placement_timeout)
        late = [call for call, (_, began) in self._starts.items() if now - began > patience_s]
        for call in late:
            if call in self._starts:  # else an earlier one of them has ended the change
                process, began = self._starts.pop(call)
                why = f"it was not up within {now - began:.0f} s; it needs {self._actors.places.needs}"
                self._perform(self._controller.refused(process, Step.START, why))
        untried = [process for process, arrival in self._arrivals.items() if now - arrival.since > START_S]
        for process in untried:
            if process in self._arrivals:  # as above
                arrival = self._arrivals.pop(process)
                why = (
                    f"{', '.join(arrival.trial.calls.values())} gave no answer within {now - arrival.since:.0f} s to "
                    "whether the run's hosts reach each other; see whether they are stopped, and ask again"
                )
                self._perform(self._controller.refused(process, Step.START, why))

    # ---- actions

    def perform(self, action: reform.Action) -> None:
        """Carry out an action of a change."""
        match action:
            case reform.Join(member, life, ownership):
                assert self._change is not None
                process, node = Process(member, life), self._change.nodes[member.index]
                self._joining[process], call = self._actors.join_owner(member.index, ownership, node)
                self._handles[process] = self._joining[process].actor
                self._starts[call] = process, time.monotonic()
            case reform.Ask(step, processes, arguments):
                self._ask(step, processes, arguments)
            case reform.Abandon(owners, _, why):
                self._abandon(owners, why)
            case reform.Release(owner):
                self._actors.tell(actor_name(owner.member), "abandon")
            case reform.Part(processes):
                self._part(processes)

    def _ask(self, step: Step, processes: Sequence[Process], arguments: Sequence[Any]) -> None:
        if self._change is not None:
            self._change.began[step] = time.monotonic()
            self._progress(f"{self._change}: {_SAID[step]}")
        if step is Step.ENTER:
            self._enter()
        for process in processes:
            if process not in self._handles:
                self._handles[process] = self._actors.handle(actor_name(process.member))
            call = control(self._handles[process].carry_out).remote(step, list(arguments))
            self._asked[call] = process, step

    def _enter(self) -> None:
        """Owners that are replaced part, and those that join are watched like all others from now on."""
        replaced = [process for process in self._handles if self._is_replaced(process)]
        for process in replaced:
            self._parts(process)
        self._actors.enter(self._controller.ownership, self._controller.addresses)
        joining, self._joining, self._watched = self._joining, {}, {}
        for process in joining:
            self._joined(process, process not in self._dead)
        self._dead = set()

    def _is_replaced(self, process: Process) -> bool:
        return process not in self._joining and process.member in {each.member for each in self._joining}

    def _abandon(self, owners: Sequence[Process], why: str) -> None:
        """Whoever has not answered yet still will, and is released then."""
        self._starts, self._watched, self._joining, self._handles, self._dead = {}, {}, {}, {}, set()
        self._arrivals = {}
        told = [self._actors.tell(actor_name(owner.member), "abandon") for owner in owners]
        if told:  # before another attempt asks anything
            ray.wait(told, num_returns=len(told), timeout=ANSWER_S)
        self._actors.end_joining()
        if self._change is not None and self._controller.changes:  # it is tried again
            self._change.begin_again(time.monotonic())
            self._progress(f"{self._change}: {_SAID[Step.START]}")
            left = still_outlived(self._controller.max_failures, self._controller.outlived)
            self._say(f"the change of the optimizers begins again: {why} {left}")
            return
        change, self._change = self._change, None
        if change is not None:
            self._end(change, why)
        self._next()

    def _part(self, processes: Sequence[Process]) -> None:
        for process in processes:
            if self._actors.owners.get(str(process)) is self._handles[process]:  # else another one has its place
                self._parts(process)
            self._actors.part(self._handles[process], process.member.index)
        self._handles = {}
        change, self._change = self._change, None
        if change is not None:
            self._end(change, None, self._actors.enlist(self._controller.addresses))
        self._next()

    def _next(self) -> None:
        change, self._waiting = self._waiting, None
        if change is not None:
            change.before = self._controller.ownership.num_owners
            self._begin(change)


def _in_one_line(error: BaseException) -> str:
    """Why a process refuses a step."""
    said = str(error).strip().partition("\n")[0]
    return said if isinstance(error, RayZeroError) else f"{type(error).__name__}: {said}"
