"""Creates, calls, stops and ends the actors of one run. Nothing else creates them.

The driver owns every actor, so none outlives it: Ray kills them when the driver is gone, and its janitor removes what
they leave (cluster/janitor.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from rayzero.cluster.actor_calls import (
    ANSWER_S,
    START_S,
    STOP_S,
    ReachTarget,
    ReachTrial,
    Tries,
    actor_class,
    ask,
    ask_config,
    control,
    failure_of_call,
    make_coordinator,
)
from rayzero.cluster.files.metrics_log import MetricsLog
from rayzero.cluster.janitor import Janitor, KeptStates, Remains
from rayzero.cluster.nodes.places import OwnerPlace, Places, door_place
from rayzero.cluster.nodes.resources import too_few_files
from rayzero.cluster.nodes.session import alive_nodes, answered, ray_answers
from rayzero.cluster.processes.coordinator import this_process
from rayzero.cluster.processes.owner_process import OptimizerActor, OwnerSettings
from rayzero.cluster.processes.process_exporter import LOOPBACK, ExporterSettings, Renewed
from rayzero.cluster.processes.rank_worker import PackedLoop, RankSettings, RankWorker
from rayzero.cluster.roster import Certificates, Exporters, Joining, LocalProcesses, OwnerRoster, Spares, plan_exporters
from rayzero.cluster.run import Member, RunState, optimizer_name, rank_name
from rayzero.cluster.supervision import shielded
from rayzero.config import RunConfig, ZeroConfig
from rayzero.errors import ConfigError
from rayzero.protocol.ownership import Ownership
from rayzero.slabs.sweep import end_hold, sweep
from rayzero.telemetry.recorder import Measurements
from rayzero.telemetry.scrape import Target

log = logging.getLogger(__name__)

_COORDINATOR = "coordinator"
_DRIVER = "the driver"


class RunActors:
    """The coordinator, owners and rank workers of one run; leaving the ``with`` block ends them all.

    Knows actors and how to call them; not what a failure means for the run (supervision.py)."""

    def __init__(
        self,
        run: str,
        places: Places,
        certificates: Certificates,
        log: MetricsLog | None = None,
    ) -> None:
        """``log``: where the coordinator writes the ranks' reports; None if ranks report to another library."""
        self._run, self._log = run, log
        self.places = places  # those of actors that join are freed by: end()
        self.certificates = certificates
        self.exporters = Exporters({}, "auto", certificates)
        self._share: Path | None = None  # directory of the slabs that owners and ranks make
        self.remains: Remains | None = None  # of these; set by start()
        self._on_loopback = (
            False  # owners listen there, as all of the run is on one node; else at their nodes' addresses
        )
        self.local = LocalProcesses()  # freed by: end()
        self.members: dict[str, Member] = {}
        self.coordinator: Any = None
        self.coordinator_life = ""
        self.owners: dict[str, Any] = {}  # by name
        self.ranks: dict[str, Any] = {}
        self._roster: OwnerRoster  # made by: start()
        self._joining: list[Joining] = []  # owners of the next epoch
        self._parted: dict[Any, OwnerPlace | None] = {}  # owner without shards, which ends -> its place
        self.spares = Spares()

    def __enter__(self) -> RunActors:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with shielded():
            self.end(politely=kind is None)

    # ---- start --------------------------------------------------------------------------------------------------

    def start(
        self,
        zero: ZeroConfig,
        run: RunConfig,
        ownership: Ownership,
        remains: Remains,
        *,
        succeeds: bool,
        beside_ranks: str | None = None,
    ) -> tuple[str, ...]:
        """Create every actor, open the owners' ports and all exporters, register them with the coordinator; returns the
        owners' addresses.

        ownership, remains, succeeds: see ``OwnerSettings``. beside_ranks: see ``OwnerRoster``. A dead member may be
        started again (``start_owner``, ``start_rank``; the coordinator by Ray) as often as ``run`` says; without ranks,
        another library starts them again.

        Raises RunFailedError naming the process that did not start, and ConfigError when the run's name is taken, or
        when a process may not open as many files as so many ranks and owners need.
        """
        self.coordinator = make_coordinator(self._run, self._log, run.max_failures, self.places.plan.num_workers)
        share, self.remains, telemetry = zero.shared_directory, remains, run.telemetry
        self._share = share
        first = OwnerSettings(
            owner=0,
            num_owners=ownership.num_owners,
            threads=self.places.plan.optimizer.threads,
            bind_numa=self.places.plan.bind_numa,
            memory_budget=zero.cpu_memory_budget,
            share=share,
            norms_every=telemetry.norms_every if telemetry.enabled else None,
            ownership=ownership,
            succeeds=succeeds,
            replaces_members=run.max_failures > 0 or not self.places.plan.num_workers,
            token=self.certificates.token,
            network=run.network,
            remains=remains,
        )
        self._roster = OwnerRoster(first, self.places.plan, self.certificates, beside_ranks)
        for owner in range(ownership.num_owners):
            self._make_owner(owner)
        for rank in range(self.places.plan.num_workers):
            self._make_rank(rank)
        measure = telemetry.measure_bandwidth
        hellos = {
            who: control(actor.become).remote(self._roster.of(who), measure_bandwidth=measure)
            for who, actor in self.owners.items()
        }
        hellos |= {who: control(actor.hello).remote() for who, actor in self.ranks.items()}
        self.members = self.ask({_COORDINATOR: self.coordinator.hello.remote(), **hellos}, START_S)
        self.coordinator_life = self.ask({_COORDINATOR: self.coordinator.life.remote()}, ANSWER_S)[_COORDINATOR]
        lead = {_COORDINATOR: self.members.pop(_COORDINATOR)}
        here = {**lead, _DRIVER: this_process(_DRIVER)}
        self.check_files(len(self.owners), len(ownership.door_numbers), here)
        kept = KeptStates(run=self._run, lineage=remains.lineage, seconds=run.keep_states)
        discovery_dir = run.discovery_dir if telemetry.enabled else None
        self.local.janitor = Janitor(share, discovery_dir, keep=kept)
        self.local.find({**lead, **self.members}, self.driver_node)
        if telemetry.enabled:
            exporters = plan_exporters(self._run, {**lead, **self.members}, telemetry, Path(zero.slab_dir))
            self.exporters = Exporters(exporters, telemetry.bind, self.certificates)
            self._open_exporters()
        addresses = self._open_ports(run.network)
        former = remains.lineage if succeeds else remains.over
        if share is not None and former is not None:  # owners have adopted what they need
            end_hold(share, former)
            if not succeeds:
                sweep(share)
        self.spares = Spares(run.warm_spares, [self.members[who].node for who in self._roster.with_shards])
        self.fill_spares()
        return addresses

    def check_files(
        self, num_owners: int, num_doors: int, others: Mapping[str, Member], *, num_ranks: int | None = None
    ) -> None:
        """Raise ConfigError if this run cannot have so many optimizer actors, by the files that its processes may open.
        ``others``: processes beside those of now. ``num_ranks``: that another library starts; None: its own."""
        ranks = len(self.ranks) if num_ranks is None else num_ranks
        why = too_few_files({**self.members, **others}, ranks, num_owners, self._roster.num_beside, num_doors)
        if why is not None:
            raise ConfigError(why)

    @property
    def with_shards(self) -> dict[str, Any]:
        return {who: self.owners[who] for who in self._roster.with_shards}

    @property
    def ownership(self) -> Ownership:
        return self._roster.ownership

    def _make_owner(self, owner: int) -> Any:
        who = optimizer_name(owner)
        self.owners[who] = actor_class(OptimizerActor).options(**self.places.options(owner)).remote()
        return self.owners[who]

    def fill_spares(self) -> None:
        """Start the spare processes that are missing."""
        while (owner := self.spares.place()) is not None:
            actor = actor_class(OptimizerActor).options(**self.places.spare_options(owner)).remote()
            self.spares.add(owner, actor, [control(actor.hello).remote(), actor.watch.remote()])

    def _make_rank(self, rank: int) -> Any:
        threads = self.places.plan.worker.threads
        options = self.places.worker_options(rank)
        who = rank_name(rank)
        self.ranks[who] = actor_class(RankWorker).options(**options).remote(rank, threads, self._roster.of(who))
        return self.ranks[who]

    def _open_ports(self, network: str | None) -> tuple[str, ...]:
        nodes = {member.node for member in self.members.values()}
        # ranks of another library may be on any host
        one_node = len(nodes) == 1 and (bool(self.ranks) or len(alive_nodes()) == 1)
        serving = {who: self.handle(who) for who in self._roster.names}
        self._on_loopback = one_node and network is None  # else others may follow from outside
        opened = {who: control(actor.serve).remote(self._host_of(who)) for who, actor in serving.items()}
        addresses = tuple(ask_config(self._run, opened, self.members, START_S).values())
        if not one_node:
            self._require_reached(addresses)
        told = {who: control(a.call_owner).remote("connect_peers", [addresses]) for who, a in serving.items()}
        self.ask(told, START_S)
        self.enlist()
        return addresses

    def _host_of(self, who: str) -> str:
        """Where an owner listens."""
        return LOOPBACK if self._on_loopback else self.members[who].host

    def _open_exporters(self) -> None:
        own = self.exporters.of(_COORDINATOR)
        calls = {_COORDINATOR: self.coordinator.open_exporter.remote(own, self.certificates.viewer)}
        for who, actor in {**self.owners, **self.ranks}.items():
            calls[who] = control(actor.open_exporter).remote(self.exporters.of(who), self.coordinator)
        self.exporters.opened(ask_config(self._run, calls, self.members, ANSWER_S).values())

    def _require_reached(self, addresses: Sequence[str]) -> None:
        """Raise ConfigError if one host of the run does not reach an owner; one process a host tries."""
        listeners = self._listeners(addresses)
        tries = (Tries(who, self.members[who].host, self.handle(who), listeners) for who in self._one_a_node())
        trial = ReachTrial(tries)
        while calls := trial.calls:
            self.ask({who: call for call, who in calls.items()}, START_S)
            for call in calls:
                trial.take(call)
        trial.require()

    def _listeners(self, addresses: Sequence[str]) -> tuple[ReachTarget, ...]:
        named = zip(self._roster.names, addresses, strict=True)
        return tuple(ReachTarget(who, address, self.handle(who)) for who, address in named)

    def hosts_without(self, file: Path) -> list[str]:
        """The run's hosts that do not see a file of the driver's; one process looks on each but the driver's own."""
        elsewhere = [who for who in self._one_a_node() if self.members[who].node != self.driver_node]
        if not elsewhere:
            return []
        calls = {who: control(self.handle(who).sees).remote(str(file)) for who in elsewhere}
        return sorted({self.members[who].host for who, sees in self.ask(calls, ANSWER_S).items() if not sees})

    def _one_a_node(self) -> list[str]:
        """An owner on each node that has any, or else a rank, whose loop may be busy."""
        return list({self.members[who].node: who for who in (*self.ranks, *self.owners)}.values())

    # ---- while it runs ------------------------------------------------------------------------------------------

    def run_loop(self, settings: RankSettings, packed_loop: PackedLoop) -> Any:
        """Start a rank's loop. Returns the call, which lasts until the loop ends."""
        start = replace(settings.start, tls=self.certificates.of_rank(settings.rank))
        return self.ranks[rank_name(settings.rank)].run.remote(
            replace(settings, start=start), packed_loop, self.coordinator
        )

    # ---- members that are replaced ------------------------------------------------------------------------------

    def start_owner(self, owner: int) -> Any:
        """Start another process as this owner, or take a spare of its node; the dead one's place in the cluster is its
        place. Returns the call that answers once it serves, with (member, address, exporter's target)."""
        who = optimizer_name(owner)
        spare = self.spares.give(self.members[who].node)
        actor = self.owners[who] = spare or self._make_owner(owner)
        place = self._host_of(who), self.exporters.of(who), self.coordinator
        return control(actor.take_place).remote(self._roster.of_joining(owner, self.ownership), *place)

    # ---- other owners -------------------------------------------------------------------------------------------

    def join_owner(self, owner: int, ownership: Ownership, node: str) -> tuple[Joining, Any]:
        """Start a process on ``node`` (id) that becomes an owner in the epoch of ``ownership``. Returns the call that
        answers once it serves, as ``start_owner``'s."""
        there = {number: self.members[who].node for number, who in enumerate(self.with_shards)}
        settings = self._roster.of_joining(owner, ownership)
        is_door, coming = owner in ownership.door_numbers, {each.node: each.place for each in self._joining}
        place = door_place(node) if is_door else self.places.find(owner, node, there, coming)
        exporter = self._exporter_of(owner, node)
        joining = Joining(
            who=optimizer_name(owner),
            actor=actor_class(OptimizerActor).options(**place.options).remote(),
            settings=settings,
            node=node,
            exporter=exporter,
            place=place,
        )
        self._joining.append(joining)
        ask, host = control(joining.actor.take_place), LOOPBACK if self._on_loopback else None
        return joining, ask.remote(settings, host, exporter, self.coordinator)

    def listen_at_nodes(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """Let every owner be reached from other nodes. ``addresses``: those of now. Returns those that serve; blocks.
        Raises ConfigError if one does not answer."""
        if not self._on_loopback:
            return tuple(addresses)
        opened = [control(self.handle(who).listen).remote(self.members[who].host) for who in self._roster.names]
        try:
            found = ray.get(opened, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            why = str(error).partition("\n")[0]
            raise ConfigError(f"an optimizer does not listen at its node's address: {why}; ask again") from error
        self._on_loopback = False
        return tuple(found)

    def _exporter_of(self, owner: int, node: str) -> ExporterSettings | None:
        if not self.exporters.targets:
            return None
        address = next(known.address for known in alive_nodes() if known.id == node)
        beside_first = node == self.members[optimizer_name(0)].node
        coming = [each.exporter for each in self._joining if each.exporter is not None]
        return self.exporters.for_owner(owner, address, beside_first=beside_first, coming=coming)

    def joined(self, joining: Joining, member: Member, target: Target | None) -> None:
        """An owner that joins has answered. It has no shards before ``enter``."""
        joining.member, joining.target = member, target
        self.local.find({joining.process: member}, self.driver_node)

    def try_to_reach(self, joining: Joining, address: str, addresses: Sequence[str]) -> ReachTrial:
        """Have other hosts connect to an owner that joins, and that one to the others. ``address``: its own;
        ``addresses``: those of the owners of now."""
        assert joining.member is not None, f"{joining.who} has not answered"
        if self._on_loopback:  # all are on one host
            return ReachTrial([])
        new = ReachTarget(joining.who, address, joining.actor)
        others = [who for who in self._one_a_node() if self.members[who].node != joining.node]
        tries = [Tries(who, self.members[who].host, self.handle(who), (new,)) for who in others]
        back = Tries(joining.process, joining.member.host, joining.actor, self._listeners(addresses))
        return ReachTrial([*tries, back])

    def end_joining(self) -> None:
        """Owners that were to join are not needed: end their processes. Returns when those on this node are gone: the
        next ones would find what they have prepared."""
        for joining in self._joining:
            ray.kill(joining.actor)
            self.local.let_end(joining.process)
            self.places.free(joining.place)
        self.local.await_ending(STOP_S)
        self._joining = []

    def enter(self, ownership: Ownership) -> None:
        """The next epoch stands: an optimizer actor that joins is an owner from now on, also in the place of one that
        parts; and a later successor of an owner belongs to it."""
        joining, self._joining = self._joining, []
        for each in joining:
            assert each.member is not None, f"{each.who} has not answered"
            if each.who in self.owners:
                self._drop(each.settings.owner)
            self.owners[each.who], self.members[each.who] = each.actor, each.member
            if each.exporter is not None:
                self.exporters.enter(each.exporter, each.target)
            self.places.take(each.settings.owner, each.place)
            self.local.rename(each.process, each.who)
        self._roster.begin_epoch(ownership)

    def part(self, actor: Any, owner: int) -> None:
        """End the process of an owner that has no shards any more."""
        if self.owners.get(optimizer_name(owner)) is actor:
            self._drop(owner)
        control(actor.stop).remote()
        actor.__ray_terminate__.remote()
        self.places.free(self._parted.get(actor))

    def _drop(self, owner: int) -> None:
        who = optimizer_name(owner)
        self._parted[self.owners.pop(who)] = self.places.take(owner, None)
        self.exporters.leave(who)
        del self.members[who]
        self.local.let_end(who)

    def enlist(self) -> None:
        told = self.coordinator.enlist.remote(list(self.members.values()), self.exporters.targets)
        self.ask({_COORDINATOR: told}, ANSWER_S)

    def take_spare(self, call: Any) -> None:
        member = self.spares.take(call)
        if member is not None:
            self.local.find({member.who: member}, self.driver_node)

    def start_rank(self, rank: int) -> Any:
        """Start another process as this rank. Returns the call that answers once it is there, as ``start_owner``'s."""
        who = rank_name(rank)
        return control(self._make_rank(rank).take_place).remote(self.exporters.of(who), self.coordinator)

    def took_place(self, who: str, member: Member, target: Target | None) -> None:
        """A new process has answered in the place of a member; ``enlist`` it then."""
        before = self.members[who]
        self.members[who] = member
        self.local.find({who: member}, self.driver_node)
        if target is not None:
            self.exporters.opened([target])
        log.info("%s is pid %d now, it was pid %d", who, member.pid, before.pid)

    def resume_coordinator(self) -> int:
        """Ray has started another coordinator: tell it what the last one knew. Returns its process id."""
        known = list(self.members.values()), self.exporters.targets
        again = self.exporters.again(_COORDINATOR), self.certificates.viewer
        told = self.coordinator.resume.remote(*known, *again)
        member: Member = self.ask({_COORDINATOR: told}, ANSWER_S)[_COORDINATOR]
        self.local.find({_COORDINATOR: member}, self.driver_node)
        return member.pid

    def report_again(self) -> list[Any]:
        """Have every rank send another coordinator its last reports. Returns the calls."""
        return [control(rank.report_again).remote() for rank in self.ranks.values()]

    def handle(self, who: str) -> Any:
        return self.owners.get(who) or self.ranks[who]

    def move(self, state: RunState) -> None:
        self.ask({_COORDINATOR: self.coordinator.move.remote(state)}, ANSWER_S)

    def renew(self, who: str) -> Any:
        """Send a member, or the coordinator, its newest certificates. Returns the call."""
        exporter = self.exporters.of(who)
        metrics = None if exporter is None else exporter.protection
        if who == _COORDINATOR:
            return self.coordinator.renew.remote(Renewed(metrics=metrics, viewer=self.certificates.viewer))
        owner = self._roster.of(who)
        serves = None if owner is None else self.certificates.of_owner(owner.owner)
        if who in self.owners:
            return control(self.owners[who].renew).remote(Renewed(tls=serves, metrics=metrics))
        rank = self.certificates.of_rank(int(who.partition(" ")[2]))
        return control(self.ranks[who].renew).remote(Renewed(tls=rank, beside=serves, metrics=metrics))

    @cached_property
    def driver_node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    @property
    def everybody(self) -> list[str]:
        return [_COORDINATOR, *self.members]

    def ask(self, calls: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answers to calls already made, by process. Raises RunFailedError, naming the process that failed or is
        late."""
        return ask(self._run, calls, self.members, timeout_s)

    def has_lost_host(self, who: str | None = None) -> bool:
        """Whether the node of a member (None: of this process) has left the cluster."""
        host = self.driver_node if who is None else self.members[who].node
        return all(node.id != host for node in alive_nodes())

    # ---- end ----------------------------------------------------------------------------------------------------

    def stop_ranks(self, loops: Mapping[Any, str], reason: str) -> list[Any]:
        """Ask every rank to end its loop, and kill those that do not within ``STOP_S``. Returns the calls that
        ended."""
        told = [control(rank.stop).remote(reason) for rank in self.ranks.values()]
        ready, stuck = answered(list(loops), STOP_S)
        for loop in stuck:
            ray.kill(self.ranks[loops[loop]])
        del told
        return ready

    def stop_owners(self, timeout_s: float = ANSWER_S) -> dict[str, Measurements]:
        """Close every owner that answers within ``timeout_s``. Returns each one's measurements, except those of owners
        beside ranks."""
        calls = {who: control(owner.stop).remote() for who, owner in self.owners.items()}
        beside = [control(self.ranks[who].stop_owner).remote() for who in self._roster.beside if who in self.ranks]
        ready, _ = answered([*calls.values(), *beside], timeout_s)
        return {who: ray.get(call) for who, call in calls.items() if call in ready and not failure_of_call(who, call)}

    def end(self, *, politely: bool) -> None:
        """End every actor; returns when those on this node are gone. Idempotent.

        ``politely``: let their exit handlers run (the user's loop may have set some), for at most ``STOP_S``."""
        actors = [*self.ranks.values(), *self.owners.values(), *(each.actor for each in self._joining), *self._parted]
        actors += [*self.spares.actors, self.coordinator]
        alive = [actor for actor in actors if actor is not None]
        if politely:
            asked = [actor.__ray_terminate__.remote() for actor in (*self.ranks.values(), *self.owners.values())]
            self.local.await_all(STOP_S)
            del asked
        for actor in alive:
            ray.kill(actor)
        self.local.kill_stopped()
        if ray_answers():
            self.local.see_gone()
        else:
            self.local.see_gone(0.0)  # a Ray that is gone kills nobody
        self.places.close()
        self._joining, self._parted = [], {}
        self.coordinator, self.owners, self.ranks = None, {}, {}
        self.spares = Spares()
        self.local.close()  # its janitor holds the slabs that successors may need
        if self._share is not None and self._share.is_dir():
            # slabs of killed processes on this node; other nodes have janitors (slabs/sweep.py)
            sweep(self._share)
