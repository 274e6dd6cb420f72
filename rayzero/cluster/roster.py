"""Who is in a run. Owners: the settings of each, also of those that come later. Spares: processes
that have imported what an owner needs, and wait to become the successor of one that dies. Exporters: where each
listens, what it asks of its clients, where Prometheus finds it. Certificates: what all of them show by now. Processes
on the driver's node: which are stopped, which have to be killed, and when all are gone; Ray ends them by itself, but a
stopped process notices nothing, and a Ray that is gone ends nobody."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray

from rayzero.cluster.files.key_files import FollowerKey
from rayzero.cluster.janitor import Janitor
from rayzero.cluster.nodes.places import OwnerPlace
from rayzero.cluster.nodes.resources import ResourcePlan
from rayzero.cluster.processes.owner_process import OwnerSettings
from rayzero.cluster.processes.process_exporter import LOOPBACK, ExporterSettings
from rayzero.cluster.run import Member, optimizer_name, rank_name
from rayzero.cluster.supervision import Failure
from rayzero.concurrency.processes import is_stopped
from rayzero.concurrency.survivor import kill, wait_or_kill
from rayzero.config import SecurityConfig, TelemetryConfig
from rayzero.protocol.ownership import Ownership
from rayzero.security.authority import issuer
from rayzero.security.clients import is_loopback
from rayzero.security.credentials import ANY_RANK, FOLLOWER, OWNER, Credentials, follower_token, name_of_rank
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry.metric import Role
from rayzero.telemetry.pages import Protection
from rayzero.telemetry.scrape import Target, Viewer

log = logging.getLogger(__name__)


class OwnerRoster:
    """The owners of one run by the names of their processes: "optimizer 0", and "rank 0" for one beside a rank.
    Optimizer actors come first, those without shards last among them, then the owners beside ranks.

    Knows settings; not actors, nor who lives."""

    def __init__(
        self, first: OwnerSettings, plan: ResourcePlan, certificates: Certificates, beside_ranks: str | None = None
    ) -> None:
        """``first``: the settings of owner 0, which has shards. ``certificates``: with those of owners that come later.
        ``beside_ranks``: the device on which owners beside the ranks have their states; None: there are none."""
        self._first, self._plan, self._certificates, self._device = first, plan, certificates, beside_ranks
        self.num_beside = 0 if beside_ranks is None else plan.num_workers

    @property
    def names(self) -> list[str]:
        """Of all of them, in order of owner index."""
        return [*map(optimizer_name, range(self.ownership.num_owners)), *self.beside]

    @property
    def ownership(self) -> Ownership:
        return self._first.ownership

    @property
    def with_shards(self) -> list[str]:
        return list(map(optimizer_name, range(self.ownership.num_optimizers)))

    @property
    def beside(self) -> list[str]:
        return list(map(rank_name, range(self.num_beside)))

    def of(self, who: str) -> OwnerSettings | None:
        """The settings of a process of now; None: it is no owner."""
        names = self.names
        return self._settings(names.index(who), self.ownership) if who in names else None

    def of_joining(self, owner: int, ownership: Ownership) -> OwnerSettings:
        """The settings of a process that becomes an owner in the epoch of ``ownership``; in that of now, it takes the
        place of one that has died."""
        return replace(self._settings(owner, ownership), succeeds=True)

    def _settings(self, owner: int, ownership: Ownership) -> OwnerSettings:
        is_beside, is_door = owner >= ownership.num_owners, owner in ownership.door_numbers
        share = self._plan.worker if is_beside else self._plan.optimizer
        return replace(
            self._first,
            owner=owner,
            num_owners=ownership.num_owners + self.num_beside,
            threads=1 if is_door else share.threads,  # a door computes nothing
            device=self._device if is_beside and self._device is not None else self._first.device,
            ownership=ownership,
            tls=self._certificates.of_owner(owner),
        )

    def begin_epoch(self, ownership: Ownership) -> None:
        """A successor of an owner belongs from now on to the epoch of ``ownership``."""
        self._first = replace(self._first, ownership=ownership)


@dataclass(slots=True, kw_only=True)
class Joining:
    """A process that becomes an owner in the next epoch."""

    who: str
    actor: Any
    settings: OwnerSettings
    node: str
    exporter: ExporterSettings | None
    place: OwnerPlace
    member: Member | None = None  # once it has answered
    target: Target | None = None

    @property
    def process(self) -> str:
        """The name of its process until then: another one may have its own."""
        return f"{self.who} (joins)"


# ---- spares ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Spare:
    actor: Any
    node: str  # node id
    member: Member | None = None  # once it has imported everything


class Spares:
    """The spare processes of one run, on the nodes of its owners.

    Knows actors that have no work yet; not who dies, or how one becomes an owner."""

    def __init__(self, number: int = 0, nodes: Sequence[str] = ()) -> None:
        """``number``: how many there shall be. ``nodes``: of each owner."""
        self._number, self._nodes = number, tuple(nodes)
        self._spares: dict[str, _Spare] = {}
        self._made = 0
        self.calls: dict[Any, str] = {}  # for ``take``: one answers when a process is up, one when it has died

    @property
    def actors(self) -> list[Any]:
        return [spare.actor for spare in self._spares.values()]

    @property
    def members(self) -> list[Member]:
        return [spare.member for spare in self._spares.values() if spare.member is not None]

    def place(self) -> int | None:
        """The owner (by index) at whose place the next one belongs, where the fewest are; None: none is missing."""
        if len(self._spares) >= self._number:
            return None
        there = Counter(spare.node for spare in self._spares.values())
        return min(range(len(self._nodes)), key=lambda index: there[self._nodes[index]])

    def add(self, owner: int, actor: Any, calls: Iterable[Any]) -> None:
        """A process has been started at the place of ``owner``. ``calls``: see ``calls``."""
        who = f"spare {self._made}"
        self._spares[who] = _Spare(actor, self._nodes[owner])
        self.calls |= dict.fromkeys(calls, who)
        self._made += 1

    def take(self, call: Any) -> Member | None:
        """Take a call that has ended: the process that is up now, or None if it has died. A dead one is replaced
        later, because it may have died of what will kill the next one too."""
        who = self.calls.pop(call)
        try:
            answer: Member = ray.get(call)
        except ray.exceptions.RayError as error:
            if self._spares.pop(who, None) is not None:
                log.warning("%s died: %s", who, str(error).partition("\n")[0])
            return None
        if who not in self._spares:  # it has died since
            return None
        self._spares[who].member = replace(answer, who=who)
        return self._spares[who].member

    def give(self, node: str) -> Any:
        """A process of this node that is up, which is no spare any more; None: there is none."""
        for who, spare in self._spares.items():
            if spare.member is not None and spare.node == node:
                del self._spares[who]
                self.calls = {call: name for call, name in self.calls.items() if name != who}
                return spare.actor
        return None


# ---- exporters ------------------------------------------------------------------------------------------------------


def plan_exporters(
    run: str, members: Mapping[str, Member], config: TelemetryConfig, slab_dir: Path
) -> dict[str, ExporterSettings]:
    """Each process's exporter settings, but for what is asked of clients. ``members``: the coordinator first, then the
    others in the order of their ports."""
    everywhere = config.bind == "node" or (config.bind == "auto" and len({m.node for m in members.values()}) > 1)
    found: dict[str, ExporterSettings] = {}
    for number, (who, member) in enumerate(members.items()):
        kind, _, index = who.partition(" ")
        found[who] = ExporterSettings(
            run=run,
            role=Role(kind),
            who=who,
            index=int(index) if index else None,
            node=member.host,
            host=member.host if everywhere else LOOPBACK,
            port=config.port if not number else config.exporter_ports and config.exporter_ports + number - 1,
            slab_dir=slab_dir,
            trace=config.trace_steps is not None,
        )
    return found


class Exporters:
    """The exporters of one run, by process; none without telemetry.

    Knows settings and addresses; not actors, nor who lives."""

    def __init__(self, planned: Mapping[str, ExporterSettings], bind: str, certificates: Certificates) -> None:
        """``planned``: see ``plan_exporters``. ``bind``: of ``TelemetryConfig``. ``certificates``: what they ask of
        clients."""
        self._settings, self._bind, self._certificates = dict(planned), bind, certificates
        self._targets: dict[str, Target] = {}  # of those that are open

    @property
    def targets(self) -> tuple[Target, ...]:
        """Where those are that are open, the coordinator's first."""
        return tuple(self._targets.values())

    def of(self, who: str) -> ExporterSettings | None:
        """How a process opens its exporter by now; None: it has none."""
        settings = self._settings.get(who)
        return None if settings is None else self._protected(settings)

    def again(self, who: str) -> ExporterSettings | None:
        """How a process that has been started again opens the exporter that it had: where Prometheus and the user look
        for it."""
        settings = self.of(who)
        if settings is None:
            return None
        return replace(settings, port=int(self._targets[who].address.rpartition(":")[2]))

    def for_owner(
        self, owner: int, address: str, *, beside_first: bool, coming: Iterable[ExporterSettings]
    ) -> ExporterSettings:
        """How an owner that joins opens its exporter, if the others have any: where those have ports of their own, at
        the first one behind them. ``address``: of its node. ``beside_first``: whether that is the first owner's.
        ``coming``: of others that join."""
        first = self._settings[optimizer_name(0)]
        known = [*self._settings.values(), *coming]
        at_home = self._bind == "loopback" or (first.host == LOOPBACK and beside_first)
        joining = replace(
            first,
            who=optimizer_name(owner),
            index=owner,
            node=address,
            host=LOOPBACK if at_home else address,
            port=first.port and max(settings.port for settings in known) + 1,
        )
        return self._protected(joining)

    def _protected(self, settings: ExporterSettings) -> ExporterSettings:
        return replace(settings, protection=self._certificates.of_exporter(settings.host, self._bind))

    def opened(self, targets: Iterable[Target]) -> None:
        """These are open, also in the places of earlier ones."""
        self._targets |= {target.who: target for target in targets}

    def enter(self, settings: ExporterSettings, target: Target | None) -> None:
        self._settings[settings.who] = settings
        if target is not None:
            self.opened([target])

    def leave(self, who: str) -> None:
        self._settings.pop(who, None)
        self._targets.pop(who, None)


# ---- certificates ---------------------------------------------------------------------------------------------------


class Certificates:
    """The token and the credentials of one run, and what opens its exporters. They stay with the driver, and travel as
    arguments of actors alone.

    Knows ranks and owners by number; not their processes, nor when they get newer ones."""

    def __init__(self, run: str, security: SecurityConfig, access: MetricsAccess | None = None) -> None:
        """``access``: to the run's metrics; None: everybody has it. Raises ConfigError if files of the user's cannot be
        used."""
        self.token = secrets.token_hex(32)  # owners require it in every call
        self._issuer = issuer(run, security)
        self._access = access

    def of_owner(self, owner: int) -> Credentials | None:
        """What an owner shows to ranks and other owners; None: it uses no TLS."""
        return None if self._issuer is None else self._issuer.issue(optimizer_name(owner), [OWNER])

    def of_rank(self, rank: int | None) -> Credentials | None:
        """What a rank shows to owners; None: it uses no TLS. ``rank``: None: any."""
        who, name = ("any rank", ANY_RANK) if rank is None else (rank_name(rank), name_of_rank(rank))
        return None if self._issuer is None else self._issuer.issue(who, [name])

    def of_follower(self) -> FollowerKey:
        """What any follower shows to owners."""
        shown = None if self._issuer is None else self._issuer.issue("a follower", [FOLLOWER])
        return FollowerKey(token=follower_token(self.token), tls=shown)

    def of_exporter(self, host: str, bind: str) -> Protection | None:
        """What an exporter that listens on ``host`` asks of its clients: what the web config says, or what only the
        run's own tools can show; None: nothing. ``bind``: of ``TelemetryConfig``."""
        access = self._access
        if access is None:
            return None
        return access.given or (access.own if bind == "auto" and not is_loopback(host) else None)

    @property
    def viewer(self) -> Viewer:
        """What opens the run's exporters to the coordinator's live page."""
        return Viewer() if self._access is None else self._access.viewer

    def refresh(self) -> bool:
        """Whether there is something newer for everybody than before. Called once a minute. Raises ConfigError if files
        of the user's cannot be used."""
        access = self._access is not None and self._access.refresh()
        return (self._issuer is not None and self._issuer.refresh()) or access

    @property
    def warnings(self) -> list[str]:
        sources = [source for source in (self._issuer, self._access) if source is not None]
        return [source.warning for source in sources if source.warning is not None]


_KILL_S = 20.0  # how long the kernel may take to free a killed process: a machine out of memory or CPUs is slow

_END_S = 5.0  # how long it may take to free one that this process has killed


class LocalProcesses:
    """The processes by name, the coordinator's and those of spares too, and the janitor that knows them.

    Knows processes; not actors, nor why one has to end."""

    def __init__(self) -> None:
        self._processes: dict[str, psutil.Process] = {}
        self._ending: list[psutil.Process] = []  # told to end, and missed by nobody
        self.janitor: Janitor | None = None  # watches the processes. freed by: close()

    def find(self, everyone: Mapping[str, Member], here: str) -> None:
        """Note those of ``everyone`` that are on the node ``here``, for the janitor too."""
        for who, member in everyone.items():
            if member.node == here:
                with suppress(psutil.NoSuchProcess):  # it died after it answered; the next call to it reports that
                    self._processes[who] = psutil.Process(member.pid)
        if self.janitor is not None:
            self.janitor.watch(self._processes.values())

    def rename(self, before: str, now: str) -> None:
        process = self._processes.pop(before, None)
        if process is not None:
            self._processes[now] = process

    def pid(self, who: str) -> int | None:
        """The id of a process; None: it is on another node."""
        process = self._processes.get(who)
        return None if process is None else process.pid

    @property
    def stopped(self) -> list[str]:
        """Whose processes are stopped (SIGSTOP, a debugger)."""
        stopped = [(who, process) for who, process in self._processes.items() if is_stopped(process.pid)]
        return [who for who, process in stopped if process.is_running()]  # else it is dead, and another has its pid

    def standing_still(self, members: Mapping[str, Member]) -> list[Failure]:
        """The ``members`` that are stopped; other processes only see that they do not answer."""
        return [
            Failure(
                who=who,
                what=f"makes no progress: its process (pid {self.pid(who)} on {members[who].host}) is stopped",
            )
            for who in self.stopped
            if who in members
        ]

    # ---- ends

    def kill(self, who: str) -> None:
        process = self._processes.get(who)
        if process is not None:
            kill(process)

    def kill_stopped(self) -> None:
        """Kill those that are stopped: they react to no other signal, and waiting for them takes long."""
        for who in self.stopped:
            self.kill(who)

    def let_end(self, who: str) -> None:
        """A process was told to end, and another one may have its name; ``see_gone`` waits for both."""
        process = self._processes.pop(who, None)
        if process is not None:
            self._ending.append(process)

    def await_ending(self, timeout_s: float) -> None:
        """Wait until those that were told to end are gone."""
        psutil.wait_procs(self._ending, timeout=timeout_s)

    def await_all(self, timeout_s: float) -> None:
        """Wait until nobody is left but those that were told to end before."""
        psutil.wait_procs(self._processes.values(), timeout=timeout_s)

    def see_gone(self, patience_s: float = _KILL_S) -> None:
        """Wait ``patience_s`` until all are gone, and kill those that are not. Nobody is known after that."""
        wait_or_kill([*self._processes.values(), *self._ending], patience_s, _END_S)
        self._processes, self._ending = {}, []

    def close(self) -> None:
        if self.janitor is not None:
            self.janitor.close()
