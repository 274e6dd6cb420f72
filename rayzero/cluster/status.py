"""What a run needs, checked and packed, what its driver knows of it so far, and the record that it writes of that."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayzero.cluster.continuation import States
from rayzero.cluster.files.logger_feed import Loggers
from rayzero.cluster.files.metrics_log import MakeRow
from rayzero.cluster.files.run_dir import RunDirectory
from rayzero.cluster.files.run_record import (
    DriverProcess,
    ExporterAddress,
    RunRecord,
    TelemetryAddresses,
)
from rayzero.cluster.nodes.local_ray import LocalRay
from rayzero.cluster.processes.live_page import PAGE_PATH
from rayzero.cluster.processes.rank_worker import PackedLoop
from rayzero.cluster.run import DISCOVERY_PATH, OPEN_STATES, Member, Recovery, Report, Rescaled, RunState
from rayzero.cluster.run_actors import RunActors
from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
from rayzero.errors import RunFailedError
from rayzero.security.metrics_access import MetricsAccess
from rayzero.store.shm.signals import why_no_sharing
from rayzero.telemetry.recorder import Measurements
from rayzero.telemetry.scrape import Target

OnReport = Callable[[Report], None]
OnPhase = Callable[[str], None]  # called with a short description of each phase as it begins
OnStart = Callable[[dict[str, Any]], None]  # called with the run's record

log = logging.getLogger(__name__)

_RECORD_EVERY_S = 1.0  # how old run.json may be while reports come in


@dataclass(slots=True)
class RunStatus:
    """What the driver knows of a run so far; complete once ``drive`` has ended, even by an error."""

    state: RunState = RunState.STARTING
    members: list[Member] = field(default_factory=list)
    spares: list[Member] = field(default_factory=list)  # processes that wait to become an owner's successor
    ray_address: str | None = None
    addresses: tuple[str, ...] = ()  # of the owners, by index
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
    say: OnPhase = log.info  # called with what happens
    changed: Callable[[], object] = lambda: None  # called when that is to be seen in the record at once

    def enter(self, addresses: Sequence[str], actors: RunActors) -> None:
        """Take who the run's processes are now. ``addresses``: of the owners."""
        self.addresses, self.members = tuple(addresses), list(actors.members.values())
        self.targets = actors.exporters.targets


class RecordWriter:
    """Writes ``run.json``, the record of one run, from what its driver knows.

    Knows the run's settings, its directory and the status; not when something happens."""

    def __init__(
        self, status: RunStatus, directory: RunDirectory, zero: ZeroConfig, scaling: ScalingConfig, run: RunConfig
    ) -> None:
        """The run begins now."""
        self._status, self._directory = status, directory
        self._zero, self._scaling, self._run = zero, scaling, run
        self._started = time.time()
        self._written = -math.inf  # monotonic seconds

    @property
    def seconds(self) -> float:
        return time.time() - self._started

    def write_now_and_then(self) -> None:
        if time.monotonic() - self._written >= _RECORD_EVERY_S:
            self.write()

    def write(self, error: RunFailedError | None = None) -> dict[str, Any]:
        """Write it, and return what is in it. ``error``: why the run has failed."""
        self._written = time.monotonic()
        record = self._record(error)
        try:
            self._directory.write_record(record)
        except OSError as failed:  # a full disk is no reason to end a training
            log.warning("%s/run.json is not up to date: %s", self._directory.path, failed.strerror)
        return record.model_dump()

    def _record(self, error: RunFailedError | None) -> RunRecord:
        status, directory = self._status, self._directory
        is_up = status.state is not RunState.STARTING  # what it had before a restart is gone
        latest, resumed = directory.checkpoints.latest, directory.start.checkpoint
        return RunRecord(
            run=self._run.name,
            state=status.state,
            error=None if error is None else str(error),
            started_at=self._started,
            ended_at=None if status.state in OPEN_STATES else time.time(),
            driver=DriverProcess(pid=os.getpid(), host=socket.gethostname()),
            ray_address=status.ray_address,
            members=status.members if is_up else [],
            spares=status.spares if is_up else [],
            addresses=list(status.addresses),
            recoveries=status.recoveries,
            replacing=status.replacing,
            rescaling=status.rescaling,
            rescales=status.rescales,
            telemetry=self._telemetry() if is_up else None,
            loggers=[] if status.loggers is None else status.loggers.states,
            metrics={str(rank): dict(report.metrics) for rank, report in sorted(status.latest.items())},
            checkpoint=None if latest is None else str(latest),
            checkpoints_elsewhere=[str(path) for path in directory.checkpoints.elsewhere],
            resumed_from=None if resumed is None else str(resumed),
            states=self._states(),
            measured={who: measured.to_json() for who, measured in status.measured.items()},
            config={
                "zero": self._zero.model_dump(mode="json"),
                "scaling": self._scaling.model_dump(mode="json"),
                "run": self._run.model_dump(mode="json"),
            },
        )

    def _states(self) -> States | None:
        """Where the run's states are in shared memory, for a run that continues it; None: they are not kept."""
        shared = self._zero.shared_directory
        if shared is None or not self._run.keep_states or why_no_sharing(shared) is not None:
            return None
        return States.in_directory(self._directory.start.lineage, shared)

    def _telemetry(self) -> TelemetryAddresses | None:
        """The addresses of the run's exporters and of its live page; None without telemetry. A browser cannot show what
        the run's own tools show, so where they alone are let in there is no page."""
        targets = self._status.targets
        if not targets:
            return None
        has_page = targets[0].scheme == "http" or self._run.telemetry.web_config is not None
        return TelemetryAddresses(
            http_sd=targets[0].url(DISCOVERY_PATH),
            page=targets[0].url(PAGE_PATH) if has_page else None,
            targets=[ExporterAddress(address=target.address, labels=target.discovered) for target in targets],
        )


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
    record: RecordWriter
    make_row: MakeRow  # rows of metrics.jsonl from reports
    saves_checkpoints: bool  # whether the loop surely does
    settings: Mapping[str, Any]  # what loggers show as the run's, by dotted names
    on_report: OnReport | None
    on_phase: OnPhase  # called with each phase, while the run starts
    on_start: OnStart | None  # called when every rank is about to enter its loop, each time the run starts
    ray: LocalRay | None = None  # one that has begun to start on this machine
