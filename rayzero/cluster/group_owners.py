"""The owners of ranks that another library starts: replaced when they die, and formed anew for each group of ranks.

The library's call is in the user's main thread, so a thread does what the driver of a ``ZeroTrainer`` does. When a new
group asks for its owners, the former one is dead, as after a run that was killed as a whole: the old owners are ended,
and what everybody has left in shared memory decides. If it is enough, new owners take it over, and the group goes on at
the open step; if not, the group begins as its loop says, from a checkpoint perhaps, with owners that have nothing.

A group says on which nodes its ranks are. If one of these has no owner, owners start anew with a door on it, also for
the first group.

Between ranks and driver is an actor (``WorkerGroups``). If a worker dies, the library ends the group and starts another
one. The ranks of a group ask the actor, and wait; the driver finds out what the group goes on from, and opens it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayzero.cluster.actor_calls import ANSWER_S, refuse_name_in_use
from rayzero.cluster.continuation import Continuation, Lost, await_left, choose
from rayzero.cluster.janitor import Remains
from rayzero.cluster.nodes.places import Places
from rayzero.cluster.nodes.resources import Node
from rayzero.cluster.nodes.session import alive_nodes
from rayzero.cluster.processes.rank_worker import RankStart
from rayzero.cluster.roster import Certificates
from rayzero.cluster.run import RunState
from rayzero.cluster.run_actors import RunActors
from rayzero.cluster.status import RunStatus
from rayzero.cluster.supervision import Failure, shielded
from rayzero.cluster.upkeep.ray_processes import RayProcesses
from rayzero.cluster.upkeep.renewal import Renewal
from rayzero.cluster.upkeep.replacement import Replacement
from rayzero.config import RunConfig, ZeroConfig
from rayzero.elastic.controller import Controller
from rayzero.elastic.members import MemberId, MemberKind
from rayzero.errors import ConfigError, RunFailedError
from rayzero.quantities import count
from rayzero.slabs.sweep import Hold
from rayzero.store.shm.signals import why_no_sharing

_LOOK_S = 1.0  # between two looks whether the block has ended
_WANTED_S = 0.5  # between two looks whether a rank still wants its answer
_MANY_RANKS = 1000  # each has a call that waits
_GONE_S = 60.0  # until processes that are ended have left the cluster

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroup:
    """A group of ranks that asks for owners."""

    name: str  # no other group's
    run: str  # in the library: a group continues the one before if it has the same
    world_size: int
    nodes: tuple[str, ...]  # of its ranks (ids)
    resume: Path | None  # the checkpoint that its loop would resume from


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    """A group has no owners, or has them no more."""

    why: str


class WorkerGroups:
    """The actor. Knows the newest group and what it begins with; not why."""

    def __init__(self) -> None:
        self._news = asyncio.Condition()
        self._newest: WorkerGroup | None = None
        self._former: set[str] = set()  # names of groups before it
        self._processes: dict[int, str] = {}  # of the newest, by rank
        self._told: RankStart | GroupEnded | None = None  # what the driver has last said to the newest
        self._over: GroupEnded | None = None  # to every group

    # ---- for ranks

    async def join(self, group: WorkerGroup, rank: int, process: str) -> RankStart | GroupEnded:
        """Ask for a rank's place in ``group``, which is the newest if nobody has asked for it before; waits until the
        driver has opened it. ``process``: whose place it is, the same in every call."""
        async with self._news:
            if group.name not in self._former and not self._is_newest(group.name):
                self._begin(group)
            if self._is_newest(group.name) and self._processes.setdefault(rank, process) != process:
                before = self._processes[rank]
                return GroupEnded(
                    why=f"rank {rank} was {before} and is now {process}, in the same group of workers; start the whole "
                    "group again, not one of its workers"
                )
            return await self._next(group.name, None)

    def _begin(self, group: WorkerGroup) -> None:
        if self._newest is not None:
            self._former.add(self._newest.name)
        self._newest, self._processes, self._told = group, {}, None
        self._news.notify_all()

    async def news(self, group: str, known: RankStart) -> RankStart | GroupEnded:
        """What the ranks of the group would begin with now, as soon as it is not ``known``: an owner has moved, or
        ranks are to show another certificate."""
        async with self._news:
            return await self._next(group, known)

    async def _next(self, group: str, known: RankStart | None) -> RankStart | GroupEnded:
        await self._news.wait_for(lambda: self._answer(group) not in (None, known))
        answer = self._answer(group)
        assert answer is not None
        return answer

    def _answer(self, group: str) -> RankStart | GroupEnded | None:
        if self._over is None and group in self._former:
            return GroupEnded(why="another group of workers has been started in the place of this one")
        return self._over or self._told

    # ---- for the driver

    async def next_group(self, after: str | None) -> WorkerGroup:
        """The newest group, as soon as it is not ``after``."""
        async with self._news:
            await self._news.wait_for(lambda: self._newest is not None and self._newest.name != after)
            assert self._newest is not None
            return self._newest

    async def tell(self, group: str, answer: RankStart | GroupEnded) -> None:
        """Answer the ranks of ``group``, unless there is a newer one; also anew, once an owner is at another address,
        ranks are to show something else, or the group has lost its owners (the next one gets others)."""
        async with self._news:
            if self._is_newest(group):
                self._told = answer
                self._news.notify_all()

    async def end(self, why: str) -> None:
        """No group gets owners any more."""
        async with self._news:
            self._over = GroupEnded(why=why)
            self._news.notify_all()

    def _is_newest(self, group: str) -> bool:
        return self._newest is not None and self._newest.name == group


@dataclass(frozen=True, slots=True)
class GroupsAsked:
    """The actor, as ranks reach it."""

    actor: Any

    def join(self, group: WorkerGroup, rank: int, process: str) -> RankStart | GroupEnded:
        return _answer(self.actor.join.remote(group, rank, process))

    def news(self, group: str, known: RankStart, unwanted: threading.Event) -> RankStart | GroupEnded | None:
        """See ``WorkerGroups.news``; None once the answer is ``unwanted``."""
        call = self.actor.news.remote(group, known)
        while not ray.wait([call], timeout=_WANTED_S)[0]:
            if unwanted.is_set():
                return None
        return _answer(call)


def _answer(call: Any) -> RankStart | GroupEnded:
    try:
        answer: RankStart | GroupEnded = ray.get(call)
    except ray.exceptions.RayError as error:
        said = str(error).strip().partition("\n")[0]
        return GroupEnded(why=f"the process that knows them has ended, perhaps with its driver: {said}")
    return answer


# ---- the driver's end -----------------------------------------------------------------------------------------------


class GroupOwners:
    """The owners of one group of ranks after the other, and the thread that watches them; leaving the ``with`` block
    ends all.

    Knows groups, and what one leaves to the next; not how a member is replaced, or what can be continued."""

    def __init__(self, run: RunConfig, config: ZeroConfig, places: Places) -> None:
        self._run, self._config, self._places = run, config, places
        self._share = config.shared_directory
        self._outlived = 0  # deaths, of ``run.max_failures``
        self._lineage = secrets.token_hex(8)
        self._group: WorkerGroup | None = None  # that has these owners
        self._resume: Path | None = None  # the checkpoint that gave the lineage its first values
        self._hold: Hold | None = None  # keeps what the group continues; freed by: _change_owners(), _end()
        self._failure: Failure | None = None  # why these owners serve no more
        self._actors: RunActors | None = None
        self._controller: Controller | None = None
        self._replacement: Replacement | None = None  # None: nobody is watched
        self._told: RankStart | None = None  # what the group knows
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rayzero-group-owners", daemon=True)
        self.groups: Any = None  # the actor that ranks ask

    def __enter__(self) -> GroupOwners:
        try:
            self.groups = _make_groups()
            self._start(None, None, ())
        except BaseException:
            self._end(politely=False)
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with shielded():
            self._ended.set()
            self._thread.join()
            self._end(politely=kind is None)

    def _end(self, *, politely: bool) -> None:
        if self._hold is not None:
            self._hold.close()  # the actors' end sweeps
        if self._actors is not None:
            if politely and self._replacement is not None:
                with suppress(RunFailedError):  # the coordinator may be gone
                    self._actors.move(RunState.FINISHED)
                self._actors.stop_owners()
            self._unwatch()
            self._actors.end(politely=politely)
        if self.groups is not None:
            ray.kill(self.groups)

    # ---- owners

    def _start(self, former: str | None, goes_on: Continuation | None, nodes: Sequence[str]) -> None:
        """``former``: the lineage of the owners before. ``nodes``: those (ids) that need a door."""
        name = self._run.name
        self._actors = RunActors(name, self._places, Certificates(name, self._run.security))
        over = None if goes_on is not None else former
        known = None if goes_on is None else goes_on.ownership
        ownership = self._places.add_doors(nodes, known, self._actors.driver_node)
        if doors := len(ownership.door_numbers):
            more = count(doors, "more optimizer actor")
            log.warning("the optimizer actors start with %s, without shards, for workers that have none near", more)
        addresses = self._actors.start(
            self._config,
            self._run,
            ownership,
            Remains.of_run(self._lineage, self._actors.driver_node, replaces=True, over=over),
            succeeds=goes_on is not None,
        )
        self._actors.move(RunState.RUNNING)
        members = [MemberId(MemberKind.OWNER, owner) for owner in range(len(addresses))]
        self._controller = Controller(
            0,
            addresses,
            max_failures=self._run.max_failures,
            bound=frozenset(members) if self._share is None else frozenset(),
            outlived=self._outlived,
            ownership=ownership,
        )
        processes = RayProcesses(
            self._actors,
            dict.fromkeys(members, 0),
            replaces=self._run.max_failures > 0,
            stall_timeout=self._config.stall_timeout,
        )
        self._replacement = Replacement(self._actors, self._controller, processes, RunStatus(say=log.warning))
        self._renewal = Renewal(self._actors, say=log.warning, others={"the workers": self._renew_workers})
        self._failure = None

    def _fail(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        self._unwatch()
        why = f"{failure.who} {failure.what}"
        log.error("%s", why)
        if not failure.restarts:
            ray.get(self.groups.end.remote(why), timeout=ANSWER_S)
        elif self._group is not None:
            self._tell(self._group, GroupEnded(why=why))

    def _unwatch(self) -> None:
        if self._replacement is not None:
            self._replacement.close()
            self._replacement = None

    def _tell_successors(self) -> None:
        """Tell the group of owners that are at other addresses now, once all serve."""
        assert self._controller is not None
        if not self._controller.awaited and self._told is not None:
            now = replace(self._told, addresses=self._controller.addresses)
            if now != self._told:
                self._tell_start(now)

    def _renew_workers(self) -> None:
        assert self._actors is not None
        if self._told is not None:
            self._tell_start(replace(self._told, tls=self._actors.certificates.of_rank(None)))

    def _tell_start(self, start: RankStart) -> None:
        assert self._group is not None
        self._told = start
        self._tell(self._group, start)

    def _tell(self, group: WorkerGroup, answer: RankStart | GroupEnded) -> None:
        ray.get(self.groups.tell.remote(group.name, answer), timeout=ANSWER_S)

    # ---- groups

    def _serve(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # nobody else would tell the ranks, who wait
            self._unwatch()
            log.exception("run %r: its optimizer actors are not watched any more", self._run.name)
            self.groups.end.remote(f"its optimizer actors cannot be replaced: {type(error).__name__}: {error}")

    def _follow(self) -> None:
        asked = self.groups.next_group.remote(None)
        while not self._ended.is_set():
            watched = self._replacement.processes.calls if self._replacement is not None else []
            ready, _ = ray.wait([asked, *watched], num_returns=1, timeout=self._patience_s())
            for call in ready:
                if call == asked:
                    group = ray.get(asked)
                    self._open(group)
                    asked = self.groups.next_group.remote(group.name)
                elif self._replacement is not None:
                    self._replacement.take(call)
            if self._replacement is not None:
                self._replacement.act()
                self._tell_successors()
                self._renewal.act()
                for failure in self._replacement.failed():
                    self._fail(failure)

    def _patience_s(self) -> float:
        due = None if self._replacement is None else self._replacement.processes.patience_s(time.monotonic())
        return _LOOK_S if due is None else min(due, _LOOK_S)

    def _open(self, group: WorkerGroup) -> None:
        """Give a group its owners, with a door on each node that has ranks of it and no owner. It hears why if they
        would need more files for its ranks than they may open, or if a door cannot be where it is needed."""
        assert self._actors is not None
        nodes = [] if self._share is None else self._places.nodes_without_optimizer(group.nodes)
        num_owners = self._places.plan.num_optimizers + len(nodes)
        try:
            self._actors.check_files(num_owners, len(nodes), {}, num_ranks=group.world_size)
        except ConfigError as error:
            self._refuse(group, str(error))
            return
        goes_on = None
        if self._group is not None or self._failure is not None or nodes:
            try:
                goes_on = self._change_owners(group, nodes)
            except (ConfigError, RunFailedError) as error:  # perhaps of this group's hosts only
                self._failure = Failure(who="a group", what=f"has no optimizer actors: {error}")
                self._refuse(group, str(error))
                return
        if goes_on is None:
            self._resume = group.resume
        assert self._controller is not None
        self._group = group
        start = RankStart(
            addresses=self._controller.addresses,
            ownership=self._controller.ownership,
            lineage=self._lineage,
            life=0 if goes_on is None else goes_on.life,
            repeats=None if goes_on is None else goes_on.repeats,
            resume=self._resume,
            token=self._actors.certificates.token,
            tls=self._actors.certificates.of_rank(None),
            remains=self._actors.remains,
        )
        self._tell_start(start)

    def _refuse(self, group: WorkerGroup, why: str) -> None:
        log.error("%s", why)
        self._tell(group, GroupEnded(why=why))

    def _change_owners(self, group: WorkerGroup, nodes: Sequence[str]) -> Continuation | None:
        """End these owners and start others, with doors on ``nodes`` (ids). Returns how the group goes on; None: it
        starts afresh. Raises RunFailedError or ConfigError if they do not all start."""
        assert self._actors is not None
        assert self._controller is not None
        held, self._hold = self._hold, self._new_hold()
        self._unwatch()
        self._outlived = self._controller.outlived
        self._actors.end(politely=False)
        if held is not None:
            held.close()
        found, former = self._what_is_left(group), self._lineage
        if isinstance(found, Lost):
            if self._group is not None:
                text = "a new group of %d workers begins with its loop's checkpoint: %s"
                log.warning(text, group.world_size, found.why)
            self._lineage = secrets.token_hex(8)
            if self._hold is not None:
                self._hold.close()
        else:
            log.warning("a new group of %d workers goes on at step %d", group.world_size, found.step)
        refuse_name_in_use(self._run.name, _GONE_S)  # Ray frees a name some time after its actor has ended
        goes_on = found if isinstance(found, Continuation) else None
        self._start(former, goes_on, nodes)
        return goes_on

    def _new_hold(self) -> Hold | None:
        """Keep what is left from being swept. None: nothing is shared on this host."""
        if self._share is None or why_no_sharing(self._share) is not None:
            return None
        return Hold(self._share, self._lineage)

    def _what_is_left(self, group: WorkerGroup) -> Continuation | Lost:
        assert self._actors is not None
        if self._group is None:
            return Lost(why="no group has begun before")
        if self._group.run != group.run:
            return Lost(why=f"it is of another run, {group.run}; the one before was of {self._group.run}")
        if self._share is None or self._hold is None:
            return Lost(why="optimizer actors and workers share no memory")
        if away := hosts_away(group.nodes, self._actors.driver_node, alive_nodes()):
            return Lost(why=f"its workers are on {', '.join(away)} now, and that memory is on this host")
        left = await_left(self._run.name, self._lineage, self._share, _GONE_S)
        return choose(left, num_workers=group.world_size, num_owners=self._places.plan.num_optimizers)


def hosts_away(nodes: Sequence[str], here: str, alive: Sequence[Node]) -> list[str]:
    """The addresses of the nodes (ids) that are not on the host of the node ``here``. Several nodes may share a host,
    and so an address."""
    at = {node.id: node.address for node in alive}
    return sorted({at.get(node, "a node that is gone") for node in nodes} - {at.get(here)})


def _make_groups() -> Any:
    """Start the actor on this node: as long as the driver lives, so does its node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": _MANY_RANKS}
    return ray.remote(WorkerGroups).options(**options).remote()
