"""The exporters of a run's processes: where each listens, what it asks of its clients, where Prometheus finds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rayzero.cluster.actors.certificates import Certificates
from rayzero.cluster.processes.process_exporter import LOOPBACK, ExporterSettings
from rayzero.cluster.run import Member, optimizer_name
from rayzero.config import TelemetryConfig
from rayzero.telemetry.metric import Role
from rayzero.telemetry.scrape import Target


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
        """A process that has joined has this exporter."""
        self._settings[settings.who] = settings
        if target is not None:
            self.opened([target])

    def leave(self, who: str) -> None:
        """A process ends, and its exporter with it."""
        self._settings.pop(who, None)
        self._targets.pop(who, None)
