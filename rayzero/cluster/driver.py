"""``ZeroTrainer``: run a training loop on ranks and optimizer actors, from ``fit()`` to ``Result``. ``drive``: one run
from the driver's side, which starts the actors, follows them to the end, and takes everything down."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import ray

from rayzero.cluster.actor_calls import STOP_S, refuse_name_in_use
from rayzero.cluster.continuation import Successor
from rayzero.cluster.files.key_files import viewable
from rayzero.cluster.files.logger_feed import Loggers
from rayzero.cluster.files.logger_reporter import flat_settings
from rayzero.cluster.files.metrics_log import MakeRow, MetricsLog, row_of_report, trim_log, written_rows
from rayzero.cluster.files.run_dir import RunDirectory
from rayzero.cluster.files.run_record import RECORD
from rayzero.cluster.files.tracing import TRACE_FILE, write_trace
from rayzero.cluster.janitor import Remains, announced
from rayzero.cluster.nodes.local_ray import LocalRay
from rayzero.cluster.nodes.places import Places, placed
from rayzero.cluster.nodes.resources import plan_resources, rescaled
from rayzero.cluster.nodes.session import alive_nodes, ray_session
from rayzero.cluster.processes.rank_worker import pack_loop
from rayzero.cluster.roster import Certificates
from rayzero.cluster.run import Recovery, RunState, rank_name
from rayzero.cluster.run_actors import RunActors
from rayzero.cluster.status import OnPhase, OnReport, OnStart, RecordWriter, RunRequest, RunStatus
from rayzero.cluster.supervision import Verdict, interruptible, postponed, run_failed
from rayzero.cluster.upkeep.follower import Follower
from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
from rayzero.config.choices import require_loggers
from rayzero.config.zero import Placement
from rayzero.elastic.controller import still_outlived, wait_before_restart
from rayzero.errors import ConfigError, RayZeroError, RunFailedError, UnsupportedError
from rayzero.protocol.ownership import device_owners
from rayzero.quantities import count
from rayzero.security.authority import issuer
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry.names import TRANSFER_BYTES
from rayzero.telemetry.recorder import Measurements
from rayzero.telemetry.scrape import service_discovery
from rayzero.telemetry.spans import last_steps

_LOOK_S = 1.0  # between two looks for places
_GONE_S = 60.0  # until the processes of a driver that was killed have left the cluster

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run."""

    metrics: dict[str, Any]  # rank 0's last report
    path: Path  # the run's directory
    checkpoint: Path | None  # its newest complete checkpoint, in its directory or where a report said
    error: RunFailedError | None  # why it failed; None if it succeeded
    metrics_per_rank: tuple[dict[str, Any], ...]  # each rank's last report
    measured: dict[str, Measurements] = field(repr=False)  # counters and timings by process: "rank 0", "optimizer 1"
    seconds: float  # from fit() to its end

    @property
    def transfers(self) -> dict[str, float]:
        """Payload bytes that the ranks moved, by direction: fetch, push, load."""
        moved: dict[str, float] = {}
        for who, measured in self.measured.items():
            if who.startswith("rank"):
                for direction, size in measured.by_label(TRANSFER_BYTES, "direction").items():
                    moved[direction] = moved.get(direction, 0) + size
        return moved


class ZeroTrainer:
    """Runs ``train_loop`` on every rank, beside optimizer actors that hold the model's states.

    Args:
        train_loop: ``train_loop(config)`` or ``train_loop()``; it finds its rank with ``rayzero.get_context()``.
        train_loop_config: handed to the loop; anything that can be pickled.
        zero_config: the config of ``rayzero.prepare`` calls in the loop that pass none.
        scaling_config: how many processes, and what each may use.
        run_config: where the run's files go and what it resumes from.
        on_report: called in this process with every report of every rank, in each rank's order.
        on_start: called in this process once every process is up, with the run's record (``run.json``) so far; again
            if the run starts again from a checkpoint.
        on_phase: called in this process with a short description of each phase of the start; None: write them to
            stderr, with the seconds since ``fit()`` was called.
        make_row: returns the row of ``metrics.jsonl`` that a report completes, or None; called with every report of
            every rank, in the coordinator's process. By default each report is a row.

    Creating one checks the settings; nothing is started or written before ``fit()``.
    """

    def __init__(
        self,
        train_loop: Callable[..., Any],
        *,
        train_loop_config: Any = None,
        zero_config: ZeroConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        on_report: OnReport | None = None,
        on_start: OnStart | None = None,
        on_phase: OnPhase | None = None,
        make_row: MakeRow = row_of_report,
    ) -> None:
        self._zero = zero_config or ZeroConfig()
        self._scaling = scaling_config or ScalingConfig()
        self._run = run_config or RunConfig()
        self._on_phase = on_phase
        if self._zero.transport == "inproc":
            raise UnsupportedError(
                "transport='inproc' only reaches owners in the same process, but a trainer's owners are separate "
                "processes; use transport='auto' or 'grpc'"
            )
        if self._run.warm_spares and self._zero.shared_directory is None:
            raise ConfigError(
                f"run_config.warm_spares is {self._run.warm_spares}, but with transport={self._zero.transport!r} an "
                "optimizer actor's states die with its process, so no spare takes its place; leave it at 0"
            )
        require_loggers(self._run.report_to)
        telemetry = self._run.telemetry
        access = MetricsAccess(self._run.name, telemetry.web_config) if telemetry.enabled else None
        issuer(self._run.name, self._run.security)  # given files that cannot be used are refused before anything starts
        self._request = partial(
            RunRequest,
            packed_loop=pack_loop(train_loop, train_loop_config),
            fewest_optimizers=self._scaling.num_optimizers,
            zero=self._zero,
            scaling=self._scaling,
            run=self._run,
            access=access,
            make_row=make_row,
            settings=_shown(train_loop_config, self._zero, self._scaling),
            on_report=on_report,
            on_start=on_start,
        )

    def fit(
        self,
        *,
        raise_on_error: bool = True,
        saves_checkpoints: bool = False,
        directory: RunDirectory | None = None,
        ray: LocalRay | None = None,
    ) -> Result:
        """Run the loop on every rank to its end. Nothing is left behind: no actor, process, port or shared memory.

        Joins the Ray at hand or starts a local one. A failed run raises RunFailedError with the process, the cause and
        its traceback; with ``raise_on_error=False`` the result holds it instead. Wrong settings (ConfigError,
        CheckpointError) and signals (KeyboardInterrupt; SIGTERM: SystemExit(143)) are raised either way, signals after
        one logged line on how to go on. ``saves_checkpoints``: the loop surely saves some, so a host that does not see
        the run's folder is refused at the start; otherwise it is only named. ``directory``: the run's directory, if the
        caller has already opened it; the caller then closes it, and says how to resume after a signal. ``ray``: one
        that the caller has begun to start on this machine, which ends with the run.
        """
        if directory is not None:
            return self._fit(directory, ray, raise_on_error, saves_checkpoints)
        with RunDirectory.open(self._run, Successor.of(self._zero, self._scaling)) as opened:
            try:
                return self._fit(opened, ray, raise_on_error, saves_checkpoints)
            except (KeyboardInterrupt, SystemExit):
                log.warning("run %r %s", self._run.name, self._stopped(opened))
                raise

    def _stopped(self, directory: RunDirectory) -> str:
        newest = directory.checkpoints.catalog().newest()
        if newest is None:
            return f"was stopped before its first checkpoint; {directory.path} holds nothing to resume from"
        settings = f"name={self._run.name!r}, storage_path={str(self._run.storage_path)!r}, resume=True"
        return f"was stopped; continue from {newest} with RunConfig({settings})"

    def _fit(
        self, directory: RunDirectory, ray: LocalRay | None, raise_on_error: bool, saves_checkpoints: bool
    ) -> Result:
        status = RunStatus()
        record = RecordWriter(status, directory, self._zero, self._scaling, self._run)
        trim_log(directory.path, directory.rows_until)
        error: RunFailedError | None = None
        refused = False  # nothing was started: an earlier run's record stays
        request = self._request(
            directory=directory,
            record=record,
            ray=ray,
            saves_checkpoints=saves_checkpoints,
            on_phase=self._on_phase or phase_lines(),
        )
        earlier = directory.read_record_file()
        try:
            with interruptible():
                record.write()
                drive(request, status)
            status.state = RunState.FINISHED
        except RunFailedError as failed:
            status.state, error = RunState.FAILED, failed
        except (KeyboardInterrupt, SystemExit):
            status.state = RunState.STOPPED
            raise
        except BaseException:
            refused = status.state is RunState.STARTING and not status.restarts
            status.state = RunState.FAILED
            raise
        finally:
            if refused:
                directory.restore_record_file(earlier)
            else:
                directory.checkpoints.latest = directory.checkpoints.catalog().newest()
                record.write(error)
            self._write_trace(directory, status)
        if error is not None and raise_on_error:
            raise error
        return _result(directory, status, error, record.seconds)

    def _write_trace(self, directory: RunDirectory, status: RunStatus) -> None:
        """Write the trace, if the run keeps one, from the processes that could still send their spans."""
        steps = self._run.telemetry.trace_steps
        traces = {who: measured.trace for who, measured in status.measured.items() if measured.trace is not None}
        if steps is not None and traces:
            try:
                write_trace(directory.path / TRACE_FILE, self._run.name, last_steps(traces, steps))
            except ConfigError as error:  # the training itself has succeeded
                log.warning("%s", error)


def _shown(loop_config: Any, zero: ZeroConfig, scaling: ScalingConfig) -> dict[str, Any]:
    of_the_loop = loop_config if isinstance(loop_config, Mapping) else {}
    ours = {"zero": zero.model_dump(mode="json"), "scaling": scaling.model_dump(mode="json")}
    return flat_settings({str(name): value for name, value in of_the_loop.items()} | ours)


def phase_lines() -> OnPhase:
    """Writes each phase as a line on stderr, with the seconds since this call."""
    started = monotonic()
    return lambda phase: print(f"{monotonic() - started:5.1f} s  {phase}", file=sys.stderr, flush=True)


def _result(directory: RunDirectory, status: RunStatus, error: RunFailedError | None, seconds: float) -> Result:
    latest = status.latest
    num_ranks = sum(member.who.startswith("rank") for member in status.members)
    return Result(
        metrics=dict(latest[0].metrics) if 0 in latest else {},
        path=directory.path,
        checkpoint=directory.checkpoints.latest,
        error=error,
        metrics_per_rank=tuple(dict(latest[rank].metrics) if rank in latest else {} for rank in range(num_ranks)),
        measured=dict(status.measured),
        seconds=seconds,
    )


# ---- one run --------------------------------------------------------------------------------------------------------


def drive(request: RunRequest, status: RunStatus) -> None:
    """Run to the end and leave nothing behind; keeps ``status`` up to date.

    A run that has lost what only a checkpoint brings back starts again from the newest one, ``max_failures`` times at
    most. Raises RunFailedError with the cause, ConfigError when the cluster has no place for the run, and what a signal
    raises (KeyboardInterrupt, SystemExit) or ``on_report`` raised, once the ranks have been stopped. Call it inside
    ``interruptible()``.
    """
    start = request.directory.start
    with ray_session(request.on_phase, request.ray):
        status.ray_address = ray.get_runtime_context().gcs_address
        refuse_name_in_use(request.run.name, _GONE_S if start.is_after_kill else 0.0)
        if start.step or start.why:
            request.on_phase(str(start))
        scaling, owned = request.scaling, start.ownership
        scaling = scaling if owned is None else _of(scaling, owned.num_optimizers)
        lost = _run_once(replace(request, scaling=scaling), status)
        while lost is not None:
            lost = _again(request, status, lost)


def _of(scaling: ScalingConfig, num_optimizers: int) -> ScalingConfig:
    most = scaling.max_optimizers
    return scaling.replace(num_optimizers=num_optimizers, max_optimizers=most and max(most, num_optimizers))


def _again(request: RunRequest, status: RunStatus, lost: RunFailedError) -> RunFailedError | None:
    status.state = RunState.STARTING
    status.restarts += 1
    try:
        _prepare_again(request, status, lost)
        scaling = _of(request.scaling, status.num_optimizers or request.scaling.num_optimizers)
        scaling = _places_left(scaling, request.zero.placement)
        return _run_once(replace(request, scaling=scaling), status)
    except (RayZeroError, OSError) as failed:
        if status.state is not RunState.STARTING:
            raise
        if not isinstance(failed, RunFailedError) or status.outlived >= request.run.max_failures:
            raise RunFailedError(f"{lost}\nThe run cannot start again: {failed}") from failed
        status.outlived += 1
        return failed


def _prepare_again(request: RunRequest, status: RunStatus, lost: RunFailedError) -> None:
    directory, wait_s = request.directory, wait_before_restart(status.restarts)
    directory.restart()
    trim_log(directory.path, directory.rows_until)
    left = still_outlived(request.run.max_failures, status.outlived)
    why = str(lost).partition("\n")[0]
    request.on_phase(f"{why}; {directory.start}, in {wait_s:g} s {left}")
    request.record.write()
    time.sleep(wait_s)  # whatever ended the run may not be over: a host that restarts, a cluster that shrinks
    refuse_name_in_use(request.run.name, _GONE_S)  # Ray frees a name some time after its actor has ended


def _places_left(scaling: ScalingConfig, placement: Placement) -> ScalingConfig:
    """The processes that a run may start again; waits for the cluster to have a place for all of them."""
    until = time.monotonic() + scaling.placement_timeout
    while scaling.rescale_on_failure and rescaled(scaling, alive_nodes(), placement) != scaling:
        if time.monotonic() >= until:
            return rescaled(scaling, alive_nodes(), placement)
        time.sleep(_LOOK_S)
    return scaling


def _run_once(request: RunRequest, status: RunStatus) -> RunFailedError | None:
    """Start the run and follow it. Returns None at its good end, and what ended it if it may start again."""
    scaling, run = request.scaling, request.run.name
    plan = plan_resources(scaling, alive_nodes(), request.zero.placement)
    request.on_phase(
        f"starting {count(scaling.num_workers, 'rank')} and {count(scaling.num_optimizers, 'optimizer actor')}"
    )
    continues = request.directory.start.continuation is not None
    log = MetricsLog(
        request.directory.path, request.make_row, written_rows(request.directory.path) if continues else None
    )
    reserved = placed(plan, timeout_s=scaling.placement_timeout)
    if request.access is not None:
        request.access.refresh()  # it may have been made long ago
    certificates = Certificates(run, request.run.security, request.access)
    viewer = None if request.access is None else request.access.viewer
    tools = viewable(request.directory.path, viewer, certificates.of_follower())
    loggers = _loggers(request, status)
    with (
        loggers,
        reserved as places,
        tools,
        RunActors(run, places, certificates, log) as actors,
    ):
        _start(request, actors, status)
        loggers.start(actors.coordinator.logged.remote)
        try:
            with _discoverable(request, actors):
                lost = _follow(request, actors, status)
                if lost is not None:
                    loggers.state = "restarting"
                    actors.end(politely=False)
                return lost
        finally:
            status.rescaling, status.replacing = None, []
            request.directory.let_go()  # now that the owners have them; the actors' end sweeps


def _loggers(request: RunRequest, status: RunStatus) -> Loggers:
    """Of this start of the run. They begin anew where the run does: not if it starts again by itself."""
    anew = request.directory.rows_until < 0 and not status.restarts
    path = request.directory.path
    status.loggers = Loggers(request.run.report_to, request.run.name, path, request.settings, anew)
    return status.loggers


def _start(request: RunRequest, actors: RunActors, status: RunStatus) -> None:
    start, run = request.directory.start, request.run
    goes_on = start.continuation is not None
    over = None if goes_on else start.former
    ownership = actors.places.add_doors(_nodes_of_doors(request, actors.places), start.ownership, actors.driver_node)
    if doors := len(ownership.door_numbers):
        request.on_phase(
            f"starting {count(doors, 'more optimizer actor')}, without shards, for ranks that have none near"
        )
    status.addresses = actors.start(
        request.zero,
        run,
        ownership,
        Remains.of_run(start.lineage, actors.driver_node, replaces=run.max_failures > 0, over=over),
        succeeds=goes_on,
        beside_ranks=_beside_ranks(request),
    )
    _see_storage(request, actors)
    status.members = list(actors.members.values())
    status.latest = {rank: report for rank, report in status.latest.items() if rank_name(rank) in actors.members}
    status.measured = {who: measured for who, measured in status.measured.items() if who in actors.members}
    status.targets = actors.exporters.targets
    actors.move(RunState.RUNNING)
    status.state = RunState.RUNNING
    if status.lost_at is not None:
        seconds, status.lost_at = time.monotonic() - status.lost_at, None
        actors.coordinator.recovered.remote("run", "the run", {"restart": seconds})
        status.recoveries.append(Recovery(who="the run", pid=None, seconds=seconds))
    record = request.record.write()
    if request.on_start is not None:
        request.on_start(record)
    is_https = any(target.scheme == "https" for target in status.targets)
    if is_https and request.access is not None and request.access.given is None:
        request.on_phase(
            "metrics are readable for rayzero top and rayzero trace alone, because they cross the network; set "
            "run.telemetry.web_config for Prometheus, or run.telemetry.bind=node for everybody"
        )
    request.on_phase("every process is up; starting the training loops")


def _see_storage(request: RunRequest, actors: RunActors) -> None:
    """Say which hosts do not see the run's folder. Raises ConfigError if the loop is known to save checkpoints."""
    without = actors.hosts_without(request.directory.path / RECORD)
    if not without:
        return
    why = (
        f"{', '.join(without)} cannot see {request.directory.path}, so no checkpoint can be completed in it; set "
        "run.storage_path to a folder that all hosts share, the driver's too"
    )
    if request.saves_checkpoints:
        actors.stop_owners(STOP_S)  # killed, they would leave their lobbies in other hosts' memory for a while
        raise ConfigError(why)
    request.on_phase(why)


def _nodes_of_doors(request: RunRequest, places: Places) -> list[str]:
    """The nodes that get an optimizer actor without shards: owners beside ranks are on each, and without shared memory
    it would be no nearer than the others."""
    if request.zero.shared_directory is None or _beside_ranks(request) is not None:
        return []
    return places.nodes_without_optimizer(places.rank_nodes())


def _beside_ranks(request: RunRequest) -> str | None:
    """The device of owners beside the ranks; None: there are none."""
    if not device_owners(request.scaling.num_workers, request.zero.host_fraction):
        return None
    return "cuda:0" if request.scaling.use_gpu else "cpu"


def _discoverable(request: RunRequest, actors: RunActors) -> AbstractContextManager[object]:
    """A context in which the run is announced in the directory that Prometheus watches."""
    if not actors.exporters.targets:
        return nullcontext()
    return announced(request.run.discovery_dir, request.run.name, service_discovery(actors.exporters.targets))


def _follow(request: RunRequest, actors: RunActors, status: RunStatus) -> RunFailedError | None:
    follower = Follower(actors, status, request)
    try:
        watch = follower.follow()
        if watch.verdict(time.monotonic()) is Verdict.FINISHED:
            follower.finish()
            return None
    except (KeyboardInterrupt, SystemExit) as interruption:
        reason = f"the run was interrupted ({type(interruption).__name__})"
        follower.take_down(RunState.STOPPED, reason)
        raise
    except BaseException as error:  # on_report raised, or the coordinator is gone: end the ranks, then re-raise
        follower.take_down(RunState.FAILED, f"the driver failed: {type(error).__name__}: {error}")
        raise
    failed, reason = run_failed(request.run.name, watch.cause, watch.others), f"{watch.cause.who} {watch.cause.what}"
    if follower.starts_again():
        with postponed():  # a signal is to end the run, which would go on without it
            follower.take_down_at_once(RunState.FAILED, reason)
        return failed
    follower.take_down(RunState.FAILED, reason)
    raise failed
