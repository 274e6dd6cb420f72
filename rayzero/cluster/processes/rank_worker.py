"""The rank worker: a process that runs the user's training loop once; the Ray shell around a context and a loop. What
the loop reports goes to Prometheus, if it is a number, and all of it to the coordinator.

A report is queued at once and sent in order by a thread; no step waits for it."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from rayzero.concurrency.processes import uncollected

with uncollected():  # a process of a run does nothing else meanwhile
    import torch

    from rayzero.cluster.janitor import Remains, leaving_nothing
    from rayzero.cluster.nodes.numa import bind, cpus_near_gpu
    from rayzero.cluster.processes.coordinator import Received, this_process
    from rayzero.cluster.processes.owner_process import MemberProcess, OwnerSettings, ServedOwner
    from rayzero.cluster.processes.process_exporter import ExporterSettings, ProcessExporter, Renewed
    from rayzero.cluster.run import Load, Member, Report, rank_name
    from rayzero.cluster.supervision import RankOutcome, failure_of
    from rayzero.config import CheckpointErrors, ZeroConfig
    from rayzero.engine.context import RankContext, running_in
    from rayzero.engine.loop.tracked import LoopReport, RecentReports
    from rayzero.errors import ConfigError, StoreClosedError
    from rayzero.memory.process_memory import map_blocks
    from rayzero.modes import load_compiler_only_to_compile
    from rayzero.protocol.ownership import Ownership
    from rayzero.security.credentials import Credentials, Identity, identity_of
    from rayzero.store.remote.owner_table import OwnerTable, connect_store
    from rayzero.telemetry.names import EXPOSED_WAIT_SECONDS, MAX_REPORTED, REPORTED, STEP_SECONDS, TRAIN_LOSS
    from rayzero.telemetry.recorder import Measurements, MemoryRecorder, Recorder
    from rayzero.telemetry.scrape import Target

_FLUSH_S = 30.0  # how long a finished loop waits for its last reports to be sent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What every rank of a run begins with."""

    addresses: tuple[str, ...]  # of the owners, by index
    ownership: Ownership  # who owns what by now
    lineage: str  # of the run's states in shared memory
    life: int = 0  # how often the rank has died and was started again
    repeats: int | None = None  # see RankContext
    resume: Path | None  # the checkpoint that gave the run its first values
    token: str = field(repr=False)  # every call to an owner must carry it
    tls: Credentials | None = None  # what the rank shows to owners; None: it uses no TLS
    remains: Remains | None = None  # what becomes of its slabs if it is killed; None: others see to them


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The settings of one rank's loop."""

    rank: int
    world_size: int
    ranks_here: tuple[int, ...]  # the ranks on this rank's node
    run: str
    run_dir: Path
    on_checkpoint_error: CheckpointErrors
    use_gpu: bool
    bind_numa: bool
    config: ZeroConfig
    outlives_owners: bool = False  # an owner that dies gets a successor
    start: RankStart


class RankWorker(MemberProcess):
    """One rank: a context, the user's loop in it and the channel for its reports; also an owner, if part of the
    optimizer stays on the rank's device."""

    def __init__(self, rank: int, threads: int, owner: OwnerSettings | None) -> None:
        """``owner``: settings of the owner beside this rank; None: there is none."""
        self._rank = rank
        self._threads = threads
        self._recorder = MemoryRecorder()
        self._owner = ServedOwner(owner, self._recorder) if owner is not None else None
        self._context: RankContext | None = None
        self._table: OwnerTable | None = None  # while the loop runs
        self._owners: tuple[Sequence[str], Ownership] | None = None  # those of the last change that this rank heard of
        self._successors: list[tuple[int, str]] = []  # of owners, since that, or since the loop's addresses were sent
        self._identity: Identity | None = None  # while the loop runs, or once it was renewed
        self._moving = threading.Lock()  # guards these
        self._sender: ReportSender | None = None
        self._channel: ReportChannel | None = None
        self._exporter: ProcessExporter | None = None  # open to the end: a loop that has returned still shows

    def hello(self) -> Member:
        return this_process(rank_name(self._rank))

    def open_exporter(self, settings: ExporterSettings, coordinator: Any) -> Target:
        """Open this process's exporter and begin its heartbeat. Raises ConfigError where it has no port."""
        self._exporter = ProcessExporter(settings, self._recorder, coordinator=coordinator)
        return self._exporter.target

    def take_place(self, exporter: ExporterSettings | None, coordinator: Any) -> tuple[Member, str, Target | None]:
        """Begin in the place of a rank that has died: who this is, no address, and its exporter."""
        return self.hello(), "", None if exporter is None else self.open_exporter(exporter, coordinator)

    def renew(self, new: Renewed) -> None:
        """Show what is new from now on; connections stay open."""
        with self._moving:
            if new.tls is not None and self._identity is not None:
                self._identity.renew(new.tls)
            elif new.tls is not None:
                self._identity = Identity(new.tls)
        if new.beside is not None:
            self._served.renew(new.beside)
        if new.metrics is not None and self._exporter is not None:
            self._exporter.renew(new.metrics)

    def succeed(self, owner: int, address: str) -> None:
        """Tell the rank that an owner has died, and that its successor is at ``address``. The owner beside the rank is
        told by ``call_owner``: while owners change, it enters the next epoch before the rank does."""
        with self._moving:
            self._successors.append((owner, address))
            if self._table is not None:
                self._table.succeed(owner, address)

    def change(self, addresses: Sequence[str], ownership: Ownership) -> None:
        """Go over to the owners of the next epoch (``OwnerTable.go_over``)."""
        with self._moving:
            self._owners, self._successors = (addresses, ownership), []
            over = None if self._table is None else self._table.go_over(addresses, ownership)
        if over is not None:
            over.result()  # a successor may be told of meanwhile, and it may need it

    def load(self) -> Load:
        steps = self._recorder.timing(STEP_SECONDS)
        return Load(steps.count, steps.total, self._recorder.total(EXPOSED_WAIT_SECONDS, cause="optimizer"))

    def stop_owner(self) -> None:
        """End the owner beside this rank, if there is one: after every rank's loop. Idempotent."""
        if self._owner is not None:
            self._owner.stop()

    def run(self, settings: RankSettings, packed_loop: PackedLoop, coordinator: Any) -> RankOutcome:
        """Run the loop to its end. An exception of the loop is part of the outcome and is not raised here."""
        if settings.bind_numa:
            near = cpus_near_gpu(0) if settings.use_gpu else None
            bind(rank_name(self._rank), self._rank, self._threads, near)
        load_compiler_only_to_compile()
        map_blocks()
        torch.set_num_threads(self._threads)  # here: torch counts threads for each thread that computes
        table = self._open_table(settings)
        recent = RecentReports()
        sender = self._sender = ReportSender(partial(_ask, coordinator), recent, partial(_report, settings))
        channel = self._channel = ReportChannel(sender.send)
        gauges = ReportGauges(self._recorder)

        def sink(made: LoopReport) -> None:
            gauges.show(made.metrics)
            channel.put(_report(settings, made))

        context = self._context = rank_context(
            settings.rank,
            settings.start,
            table,
            self._identity,
            config=settings.config,
            ranks_here=settings.ranks_here,
            outlives_owners=settings.outlives_owners,
            recorder=self._recorder,
            world_size=settings.world_size,
            device=torch.device("cuda:0" if settings.use_gpu else "cpu"),
            run=settings.run,
            run_dir=settings.run_dir,
            on_checkpoint_error=settings.on_checkpoint_error,
            sink=sink,
            recent=recent,
        )
        context.handing_over = None if self._exporter is None else self._exporter.begin_run
        failure = None
        with leaving_nothing(settings.start.remains, settings.config.shared_directory):
            try:
                with running_in(context):
                    unpack_loop(packed_loop)()
            except BaseException as error:  # supervision: report to the driver whatever the user's loop raised
                failure = failure_of(rank_name(self._rank), error)
        channel.close(_FLUSH_S)
        return RankOutcome(rank=self._rank, failure=failure, measured=Measurements.of(self._recorder))

    def _open_table(self, settings: RankSettings) -> OwnerTable:
        """The owners as they are by now: the loop may be long on its way here."""
        with self._moving:
            addresses, ownership = self._owners or (settings.start.addresses, settings.start.ownership)
            table = OwnerTable(addresses, ownership)
            for owner, address in self._successors:
                table.succeed(owner, address)
            self._table = table
            if self._identity is None:
                self._identity = identity_of(settings.start.tls)
        return table

    def report_again(self) -> None:
        """Send another coordinator the last reports, also those of a loop that makes no more, or has ended."""
        if self._sender is not None:
            self._sender.send([])

    def stop(self, reason: str) -> None:
        """Make the loop end: refuse its reports, and fail everything it waits for with ``reason``."""
        if self._channel is not None:
            self._channel.refuse()
        if self._context is not None:
            self._context.close(reason)


# ---- reports on their way --------------------------------------------------------------------------------------------


class RunGoneError(Exception):
    """The coordinator is gone for good, and so is the driver: Ray ends this process, too."""


class ReportGauges:
    """Exports the numbers that a loop reports; the one called loss is the rank's training loss.

    Knows one rank's recorder; not steps or files."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._names: set[str] = set()
        self._refused = False

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Set the gauge of each number. Only the first MAX_REPORTED names have one; a warning says so once."""
        for name, value in metrics.items():
            if isinstance(value, int | float) and self._has_room(name):
                self._recorder.set(REPORTED, float(value), name=name)
                if name == "loss":
                    self._recorder.set(TRAIN_LOSS, float(value))

    def _has_room(self, name: str) -> bool:
        if name not in self._names and len(self._names) < MAX_REPORTED:
            self._names.add(name)
        known = name in self._names
        if not known and not self._refused:
            log.warning(
                "report: %r and later names are not shown in Prometheus, which takes at most %d names",
                name,
                MAX_REPORTED,
            )
            self._refused = True
        return known


class ReportSender:
    """Sends batches of one rank's reports to the coordinator, and the last ones again to another one.

    Knows how to ask; not when (``ReportChannel``), nor who is asked."""

    def __init__(
        self,
        ask: Callable[[list[Report], str | None], Received],
        recent: RecentReports,
        report_of: Callable[[LoopReport], Report],
    ) -> None:
        """``ask``: ``Coordinator.report``."""
        self._ask, self._recent, self._report_of = ask, recent, report_of
        self._life: str | None = None  # of the coordinator
        self._sent = (-1, -1)  # step and number of the last report that a coordinator has had
        self._sending = threading.Lock()  # guards these: a rank's reports arrive in order

    def send(self, batch: list[Report]) -> None:
        """Send a batch, after the last reports that another coordinator than before lacks; blocks until the coordinator
        has them. See [Note: another coordinator]."""
        with self._sending:
            received = self._ask(batch, self._life)
            while self._life is not None and received.life != self._life:
                self._life = received.life
                lately = [made for made in self._recent.made if (made.step, made.number) <= self._sent]
                received = self._ask([*map(self._report_of, lately), *batch], self._life)
            self._life = received.life
            if batch:
                self._sent = batch[-1].step, batch[-1].number
            if received.passed_on is not None:  # until the driver has a report, it may be lost with the coordinator
                self._recent.arrived(*received.passed_on)


class ReportChannel:
    """Sends one rank's reports without holding up its training loop.

    ``put`` only queues; a thread sends what is queued, one batch at a time. At most ``limit`` reports are queued: if
    the receiver is slower than the loop, ``put`` waits for it. Knows ``send``; not who receives."""

    def __init__(self, send: Callable[[list[Report]], None], *, limit: int = 1000) -> None:
        self._send = send
        self._limit = limit
        self._waiting: deque[Report] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._carry, name="rayzero-reports", daemon=True)
        self._thread.start()

    def put(self, report: Report) -> None:
        """Queue a report. Raises the error of an earlier send, and StoreClosedError after close()."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._limit or self._over)
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StoreClosedError("the run is being stopped; no more reports are taken")
            self._waiting.append(report)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Send what is queued, then stop; waits at most ``timeout_s``. Idempotent."""
        self.refuse()
        self._thread.join(timeout_s)

    def refuse(self) -> None:
        """Take no more reports; what is queued is still sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def _over(self) -> bool:
        return self._closed or self._error is not None

    def _carry(self) -> None:
        while batch := self._next_batch():
            try:
                self._send(batch)
            except RunGoneError as error:  # the loop must not end by itself: that would remove what a resume needs
                log.warning("reports are no longer sent, and Ray will end this process: %s", error)
                return
            except Exception as error:  # the edge to Ray: any error is raised in the loop that reports
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return

    def _next_batch(self) -> list[Report]:
        """Everything queued; waits until there is something. Empty once closed and all is sent."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            batch = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
            return batch


def _ask(coordinator: Any, batch: list[Report], life: str | None) -> Received:
    try:
        told: Received = ray.get(coordinator.report.remote(batch, life))
    except ray.exceptions.ActorDiedError as error:  # for good, else Ray would have asked its next process
        raise RunGoneError(str(error).partition("\n")[0]) from error
    return told


def _report(settings: RankSettings, made: LoopReport) -> Report:
    return Report(
        rank=settings.rank,
        world_size=settings.world_size,
        life=settings.start.life,
        step=made.step,
        number=made.number,
        metrics=made.metrics,
        checkpoint=made.checkpoint,
    )


def rank_context(
    rank: int,
    start: RankStart,
    table: OwnerTable,
    shown: Identity | None,
    *,
    config: ZeroConfig,
    ranks_here: Sequence[int],
    outlives_owners: bool,
    recorder: Recorder,
    **place: Any,
) -> RankContext:
    """The context of a rank that begins with ``start``, and whose owners are where ``table`` says. ``shown``: what it
    shows to them. ``ranks_here``, ``outlives_owners``: see ``connect_store``. ``place``: of ``RankContext``."""
    connect = partial(
        connect_store,
        rank,
        table,
        token=start.token,
        tls=shown,
        config=config,
        recorder=recorder,
        life=start.life,
        ranks_here=ranks_here,
        outlives_owners=outlives_owners,
    )
    return RankContext(
        rank=rank,
        life=start.life,
        lineage=start.lineage,
        repeats=start.repeats,
        resume=start.resume,
        config=config,
        connect=connect,
        recorder=recorder,
        **place,
    )


# ---- the user's loop as bytes: checked and packed before Ray starts, unpacked where it runs -------------------------

TrainLoop = Callable[..., Any]  # train_loop(config), or train_loop()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLoop:
    """A loop and its config, packed for the ranks."""

    code: bytes
    paths: tuple[str, ...]  # the driver's sys.path: where the modules that ``code`` names are, on hosts that have it


def pack_loop(train_loop: TrainLoop, config: Any) -> PackedLoop:
    """Pack the loop and its config for the ranks. Functions of ``__main__`` are sent by value, others by name.

    Raises ConfigError when the loop is not a function of at most one argument, or cannot be sent.
    """
    _check_signature(train_loop)
    try:
        code = bytes(cloudpickle.dumps((train_loop, config)))
    except Exception as error:  # a user's object may raise anything when it is pickled
        raise ConfigError(
            f"train_loop and train_loop_config cannot be sent to other processes ({type(error).__name__}: {error}); "
            f"make them picklable"
        ) from error
    return PackedLoop(code=code, paths=tuple(os.path.abspath(path) for path in sys.path))


def unpack_loop(packed: PackedLoop) -> Callable[[], Any]:
    """A call that runs the loop with its config; raises ConfigError when this process cannot import what it needs."""
    sys.path.extend(path for path in packed.paths if path not in sys.path and os.path.isdir(path))
    try:
        train_loop, config = cloudpickle.loads(packed.code)
    except Exception as error:  # importing the user's modules may raise anything
        raise ConfigError(
            f"a rank worker cannot load train_loop: {type(error).__name__}: {error}; the module it is in must be "
            "importable there (ray job submit --working-dir, or an installed package)"
        ) from error
    takes_config = bool(inspect.signature(train_loop).parameters)
    return (lambda: train_loop(config)) if takes_config else train_loop


def _check_signature(train_loop: TrainLoop) -> None:
    if not callable(train_loop):
        raise ConfigError(f"train_loop must be a function, got {type(train_loop).__name__}")
    parameters = inspect.signature(train_loop).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1:
        raise ConfigError(f"train_loop must take one argument, its config, or none; it takes {', '.join(required)}")
