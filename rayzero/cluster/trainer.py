"""``ZeroTrainer``: run a training loop on ranks and optimizer actors, from ``fit()`` to ``Result``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from rayzero.cluster.continuation import Successor
from rayzero.cluster.driver import drive
from rayzero.cluster.files.metrics_log import MakeRow, row_of_report, trim_log
from rayzero.cluster.files.run_dir import RunDirectory
from rayzero.cluster.files.tracing import TRACE_FILE, write_trace
from rayzero.cluster.interrupts import interruptible
from rayzero.cluster.journal import Journal, OnPhase, OnReport, OnStart, RecordWriter, RunRequest
from rayzero.cluster.loggers.reporter import flat_settings
from rayzero.cluster.nodes.local_ray import LocalRay
from rayzero.cluster.processes.rank_worker import pack_loop
from rayzero.cluster.run import RunState
from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
from rayzero.config.choices import require_loggers
from rayzero.errors import ConfigError, RunFailedError, UnsupportedError
from rayzero.security.issuer import issuer
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry.names import TRANSFER_BYTES
from rayzero.telemetry.recorder import Measurements
from rayzero.telemetry.spans import last_steps

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
        journal = Journal()
        record = RecordWriter(journal, directory, self._zero, self._scaling, self._run)
        trim_log(directory.path, directory.rows_until)
        error: RunFailedError | None = None
        refused = False  # nothing was started: an earlier run's record stays
        request = self._request(
            directory=directory,
            record=record,
            ray=ray,
            saves_checkpoints=saves_checkpoints,
            on_phase=self._on_phase or PhaseLines(),
        )
        earlier = directory.read_record_file()
        try:
            with interruptible():
                record.write()
                drive(request, journal)
            journal.state = RunState.FINISHED
        except RunFailedError as failed:
            journal.state, error = RunState.FAILED, failed
        except (KeyboardInterrupt, SystemExit):
            journal.state = RunState.STOPPED
            raise
        except BaseException:
            refused = journal.state is RunState.STARTING and not journal.restarts
            journal.state = RunState.FAILED
            raise
        finally:
            if refused:
                directory.restore_record_file(earlier)
            else:
                directory.checkpoints.latest = directory.checkpoints.catalog().newest()
                record.write(error)
            self._write_trace(directory, journal)
        if error is not None and raise_on_error:
            raise error
        return _result(directory, journal, error, record.seconds)

    def _write_trace(self, directory: RunDirectory, journal: Journal) -> None:
        """Write the trace, if the run keeps one, from the processes that could still send their spans."""
        steps = self._run.telemetry.trace_steps
        traces = {who: measured.trace for who, measured in journal.measured.items() if measured.trace is not None}
        if steps is not None and traces:
            try:
                write_trace(directory.path / TRACE_FILE, self._run.name, last_steps(traces, steps))
            except ConfigError as error:  # the training itself has succeeded
                log.warning("%s", error)


def _shown(loop_config: Any, zero: ZeroConfig, scaling: ScalingConfig) -> dict[str, Any]:
    of_the_loop = loop_config if isinstance(loop_config, Mapping) else {}
    ours = {"zero": zero.model_dump(mode="json"), "scaling": scaling.model_dump(mode="json")}
    return flat_settings({str(name): value for name, value in of_the_loop.items()} | ours)


class PhaseLines:
    """Writes each phase as a line on stderr, with the seconds since this object was made.

    Knows texts and a clock; not what a run is."""

    def __init__(self) -> None:
        self._started = monotonic()

    def __call__(self, phase: str) -> None:
        print(f"{monotonic() - self._started:5.1f} s  {phase}", file=sys.stderr, flush=True)


def _result(directory: RunDirectory, journal: Journal, error: RunFailedError | None, seconds: float) -> Result:
    latest = journal.latest
    num_ranks = sum(member.who.startswith("rank") for member in journal.members)
    return Result(
        metrics=dict(latest[0].metrics) if 0 in latest else {},
        path=directory.path,
        checkpoint=directory.checkpoints.latest,
        error=error,
        metrics_per_rank=tuple(dict(latest[rank].metrics) if rank in latest else {} for rank in range(num_ranks)),
        measured=dict(journal.measured),
        seconds=seconds,
    )
