"""Who the owners of a run are: the settings of each, also of those that come later, and where it listens. And spares:
processes that have imported what an owner needs, and wait to become the successor of one that dies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from rayzero.cluster.actors.certificates import Certificates
from rayzero.cluster.janitor import Remains
from rayzero.cluster.nodes.resources import ResourcePlan
from rayzero.cluster.processes.owner_process import OwnerSettings
from rayzero.cluster.processes.process_exporter import LOOPBACK
from rayzero.cluster.run import Member, optimizer_name, rank_name
from rayzero.config import TelemetryConfig
from rayzero.protocol.ownership import Ownership

DOOR_THREADS = 1  # of an optimizer actor without shards, which computes nothing

log = logging.getLogger(__name__)


def plan_owners(
    plan: ResourcePlan,
    certificates: Certificates,
    *,
    memory: int | None,
    share: Path | None,
    telemetry: TelemetryConfig,
    network: str | None = None,
    beside_ranks: str | None = None,
    replaces_members: bool = False,
    succeeds: bool = False,
    ownership: Ownership | None = None,
    remains: Remains | None = None,
) -> dict[str, OwnerSettings]:
    """Each owner's settings by the name of its process, in order of owner index: optimizer actors, those without shards
    last, then the owners beside ranks.

    memory: bytes each may allocate; None: what its host has. beside_ranks: the device on which owners beside the ranks
    have their states; None: there are none. replaces_members: the dead are started again. succeeds: they take over
    what an earlier run has left. ownership: who owns what; None: there are no optimizer actors but those of the plan.
    The others: see ``OwnerSettings``."""
    beside = plan.num_workers if beside_ranks is not None else 0
    num_actors = plan.num_optimizers if ownership is None else ownership.num_owners

    def settings(owner: int, threads: int, device: str) -> OwnerSettings:
        return OwnerSettings(
            owner=owner,
            num_owners=num_actors + beside,
            threads=threads,
            memory_budget=memory,
            share=share,
            norms_every=telemetry.norms_every if telemetry.enabled else None,
            device=device,
            ownership=ownership,
            replaces_members=replaces_members,
            succeeds=succeeds,
            token=certificates.token,
            tls=certificates.of_owner(owner),
            network=network,
            remains=remains,
        )

    threads = [plan.optimizer.threads if owner < plan.num_optimizers else DOOR_THREADS for owner in range(num_actors)]
    found = {optimizer_name(owner): settings(owner, own, "cpu") for owner, own in enumerate(threads)}
    for rank in range(beside):
        assert beside_ranks is not None, "there are owners beside ranks"
        found[rank_name(rank)] = settings(num_actors + rank, plan.worker.threads, beside_ranks)
    return found


class OwnerRoster:
    """The owners of one run by the names of their processes: "optimizer 0", and "rank 0" for one beside a rank.

    Knows settings and addresses; not actors, nor who lives."""

    def __init__(self, planned: Mapping[str, OwnerSettings], certificates: Certificates) -> None:
        """``planned``: see ``plan_owners``. ``certificates``: with those of owners that come later."""
        self._settings, self._certificates = dict(planned), certificates
        self._hosts: dict[str, str] = {}
        self.num_beside = sum(who.startswith("rank") for who in planned)

    @property
    def names(self) -> list[str]:
        """Of all of them, in order of owner index."""
        return [*map(optimizer_name, range(len(self._settings) - self.num_beside)), *self.beside]

    @property
    def ownership(self) -> Ownership | None:
        """Who owns what by now; None: it is the first epoch, without doors."""
        return self._settings[optimizer_name(0)].ownership

    @property
    def with_shards(self) -> list[str]:
        num = len(self._settings) - self.num_beside if self.ownership is None else self.ownership.num_optimizers
        return list(map(optimizer_name, range(num)))

    @property
    def beside(self) -> list[str]:
        return list(map(rank_name, range(self.num_beside)))

    def of(self, who: str) -> OwnerSettings | None:
        """The settings of a process; None: it is no owner."""
        return self._settings.get(who)

    def number(self, who: str) -> int:
        return self._settings[who].owner

    def of_successor(self, who: str) -> OwnerSettings:
        """The settings of a process that takes the place of this owner, which has died."""
        settings = self._settings[who]
        return replace(settings, succeeds=True, tls=self._certificates.of_owner(settings.owner))

    def of_joining(self, owner: int, ownership: Ownership) -> OwnerSettings:
        """The settings of a process that becomes an owner in the epoch of ``ownership``."""
        first = self._settings[optimizer_name(0)]
        return replace(
            first,
            owner=owner,
            threads=DOOR_THREADS if owner in ownership.door_numbers else first.threads,
            num_owners=ownership.num_owners + self.num_beside,
            ownership=ownership,
            succeeds=True,
            tls=self._certificates.of_owner(owner),
        )

    def enter(self, settings: OwnerSettings, host: str) -> None:
        """A process that has joined is an owner, and listens on ``host``."""
        who = optimizer_name(settings.owner)
        self._settings[who], self._hosts[who] = settings, host

    def leave(self, who: str) -> OwnerSettings:
        """A process is no owner any more. Returns the settings that it had."""
        self._hosts.pop(who, None)
        return self._settings.pop(who)

    def begin_epoch(self, ownership: Ownership, num_owners: int) -> None:
        """A successor of an owner belongs from now on to the epoch of ``ownership``. ``num_owners``: those
        beside ranks included."""
        for who in self._settings.keys() - set(self.beside):
            self._settings[who] = replace(self._settings[who], num_owners=num_owners, ownership=ownership)

    # ---- where they listen

    def host(self, who: str) -> str:
        return self._hosts[who]

    def listen(self, hosts: Mapping[str, str]) -> None:
        self._hosts |= hosts

    @property
    def on_loopback(self) -> list[str]:
        """Those that no other node reaches."""
        return [who for who, host in self._hosts.items() if host == LOOPBACK]


# ---- spares ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Spare:
    actor: Any
    node: str  # node id
    member: Member | None = None  # once it has imported everything


class Spares:
    """The spare processes of one run, on the nodes of its owners.

    Knows actors that have no work yet; not who dies, or how one becomes an owner."""

    def __init__(self, number: int, nodes: Sequence[str], make: Callable[[int], tuple[Any, Sequence[Any]]]) -> None:
        """``number``: how many there shall be. ``nodes``: of each owner. ``make``: starts a process at the place of an
        owner (by index), and returns its actor and its calls, see ``calls``."""
        self._number, self._nodes, self._make = number, tuple(nodes), make
        self._spares: dict[str, _Spare] = {}
        self._made = 0
        self.calls: dict[Any, str] = {}  # for ``take``: one answers when a process is up, one when it has died

    @property
    def actors(self) -> list[Any]:
        return [spare.actor for spare in self._spares.values()]

    @property
    def members(self) -> list[Member]:
        return [spare.member for spare in self._spares.values() if spare.member is not None]

    def fill(self) -> None:
        """Start the missing ones, where the fewest are."""
        while len(self._spares) < self._number:
            there = Counter(spare.node for spare in self._spares.values())
            owner = min(range(len(self._nodes)), key=lambda index: there[self._nodes[index]])
            who = f"spare {self._made}"
            actor, calls = self._make(owner)
            self._spares[who] = _Spare(actor, self._nodes[owner])
            self.calls |= dict.fromkeys(calls, who)
            self._made += 1

    def take(self, call: Any) -> Member | None:
        """Take a call that has ended: the process that is up now, or None if it has died. A dead one is replaced by the
        next ``fill``, not at once: it may have died of what will kill the next one too."""
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
