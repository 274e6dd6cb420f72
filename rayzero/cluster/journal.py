"""What a run needs, checked and packed, and what its driver knows of it so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rayzero.cluster.actors.run_actors import RunActors
from rayzero.cluster.files.metrics_log import MakeRow
from rayzero.cluster.files.run_dir import RunDirectory
from rayzero.cluster.loggers.children import Loggers
from rayzero.cluster.loop import PackedLoop
from rayzero.cluster.nodes.local_ray import LocalRay
from rayzero.cluster.run import Member, Recovery, Report, Rescaled, Routing, RunState
from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry.discovery import Target
from rayzero.telemetry.recorder import Measurements

__all__ = ["Journal", "OnPhase", "OnReport", "RunRequest"]

OnReport = Callable[[Report], None]
OnPhase = Callable[[str], None]  # called with a short description of each phase as it begins


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Everything that a run needs, checked and packed."""

    packed_loop: PackedLoop
    zero: ZeroConfig
    scaling: ScalingConfig
    fewest_optimizers: int  # as the config says; ``scaling`` has as many as a run begins with that goes on
    run: RunConfig
    directory: RunDirectory
    access: MetricsAccess | None  # to the run's metrics; None: it serves none
    make_row: MakeRow  # rows of metrics.jsonl from reports
    saves_checkpoints: bool  # whether the loop surely does
    settings: Mapping[str, Any]  # what loggers show as the run's, by dotted names
    on_report: OnReport | None
    on_phase: OnPhase  # called with each phase, while the run starts
    on_start: Callable[[], None]  # called when every rank is about to enter its loop, each time the run starts
    on_restart: Callable[[], None]  # called when the run starts again from a checkpoint, before it does
    on_change: Callable[[], None]  # called after reports
    on_rescale: Callable[[], None]  # called with each step of a change of the optimizers
    on_stop: Callable[[], None]  # called if the run is interrupted, before anything is taken down
    ray: LocalRay | None = None  # one that has begun to start on this machine


@dataclass(slots=True)
class Journal:
    """What the driver knows of a run so far; complete once ``drive`` has ended, even by an error."""

    state: RunState = RunState.STARTING
    members: list[Member] = field(default_factory=list)
    spares: list[Member] = field(default_factory=list)  # processes that wait to become an owner's successor
    ray_address: str | None = None
    routing: Routing = field(default_factory=lambda: Routing(epoch=0, addresses=()))
    targets: tuple[Target, ...] = ()  # exporters, the coordinator's first; none without telemetry
    loggers: Loggers | None = None  # since the run's processes are up
    latest: dict[int, Report] = field(default_factory=dict)  # by rank
    recoveries: list[Recovery] = field(default_factory=list)  # failures that the run has outlived
    rescales: list[Rescaled] = field(default_factory=list)  # requests for other optimizers, and what came of them
    outlived: int = 0  # failures, of ``max_failures``
    replacing: list[str] = field(default_factory=list)  # whose places other processes are taking now
    rescaling: str | None = None  # what is done now to change the optimizers
    num_optimizers: int | None = None  # after a change of them; None: as the config says
    restarts: int = 0  # from a checkpoint
    lost_at: float | None = None  # monotonic seconds: since when the run has to start again
    measured: dict[str, Measurements] = field(default_factory=dict)  # by process

    def enter(self, routing: Routing, actors: RunActors) -> None:
        """Take who the run's processes are now."""
        self.routing, self.members = routing, list(actors.members.values())
        self.targets = actors.exporters.targets

    def note(self, report: Report) -> None:
        """Take one report."""
        self.latest[report.rank] = report
