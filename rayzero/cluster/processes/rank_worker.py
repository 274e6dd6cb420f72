"""The rank worker: a process that runs the user's training loop once; the Ray shell around a context and a loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rayzero.concurrency.uncollected import uncollected

with uncollected():  # a process of a run does nothing else meanwhile
    import torch

    from rayzero.cluster.loop import PackedLoop, unpack_loop
    from rayzero.cluster.nodes.numa import bind, cpus_near_gpu
    from rayzero.cluster.processes.coordinator import Received, this_process
    from rayzero.cluster.processes.owner_process import MemberProcess, OwnerSettings, ServedOwner
    from rayzero.cluster.processes.process_exporter import ExporterSettings, ProcessExporter, Renewed
    from rayzero.cluster.processes.remains import Remains, leaving_nothing
    from rayzero.cluster.processes.report_channel import ReportChannel, ReportGauges, ReportSender, RunGoneError
    from rayzero.cluster.run import Load, Member, Report, rank_name
    from rayzero.cluster.supervision import RankOutcome, failure_of
    from rayzero.config import CheckpointErrors, ZeroConfig
    from rayzero.elastic.reform import Step
    from rayzero.engine.context import RankContext, running_in
    from rayzero.engine.loop.reports import LoopReport, RecentReports
    from rayzero.engine.private_torch import load_compiler_only_to_compile
    from rayzero.memory.malloc import map_blocks
    from rayzero.protocol.ownership import Ownership
    from rayzero.protocol.store import ParameterStore
    from rayzero.security.credentials import Credentials, Identity, identity_of
    from rayzero.store.rank.owner_table import OwnerTable, connect_store
    from rayzero.telemetry.discovery import Target
    from rayzero.telemetry.names import EXPOSED_WAIT_SECONDS, STEP_SECONDS
    from rayzero.telemetry.recorder import Measurements, MemoryRecorder

_FLUSH_S = 30.0  # how long a finished loop waits for its last reports to be sent


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """The settings of one rank's loop."""

    rank: int
    world_size: int
    ranks_here: tuple[int, ...]  # the ranks on this rank's node
    run: str
    run_dir: Path
    resume: Path | None
    on_checkpoint_error: CheckpointErrors
    use_gpu: bool
    bind_numa: bool
    config: ZeroConfig
    addresses: tuple[str, ...]  # of the owners, by index
    ownership: Ownership | None = None  # who owns what by now; None: it is the run's first epoch
    lineage: str  # of the run's states in shared memory
    life: int = 0  # how often the rank has died and was started again
    repeats: int | None = None  # see RankContext
    outlives_owners: bool = False  # an owner that dies gets a successor
    token: str = field(repr=False)  # every call to an owner must carry it
    tls: Credentials | None = None  # what it shows to owners; None: it uses no TLS
    remains: Remains | None = None  # what becomes of its slabs if it is killed; None: others see to them


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
        told by ``succeed_beside``: while owners change, it enters the next epoch before the rank does."""
        with self._moving:
            self._successors.append((owner, address))
            if self._table is not None:
                self._table.succeed(owner, address)

    def succeed_beside(self, owner: int, address: str) -> None:
        """Tell the owner beside this rank what ``succeed`` tells the rank."""
        self._served.server.succeed(owner, address)

    def carry_out(self, step: Step, arguments: Sequence[Any]) -> Any:
        """Take a step of a change of the owners. As a rank, go over to other ones: the addresses and the ownership of
        the next epoch (``OwnerTable.go_over``). The other steps are those of the owner beside it."""
        if step is not Step.CHANGE:
            return super().carry_out(step, arguments)
        addresses, ownership = arguments
        with self._moving:
            self._owners, self._successors = (addresses, ownership), []
            over = None if self._table is None else self._table.go_over(addresses, ownership)
        if over is not None:
            over.result()  # a successor may be told of meanwhile, and it may need it
        return None

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
        sender = ReportSender(partial(_ask, coordinator), recent, partial(_report, settings))
        channel = self._channel = ReportChannel(sender.send)
        context = self._context = _context(settings, table, self._identity, channel, recent, self._recorder)
        context.handing_over = None if self._exporter is None else self._exporter.begin_run
        failure = None
        with leaving_nothing(settings.remains, settings.config.shared_directory):
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
            addresses, ownership = self._owners or (settings.addresses, settings.ownership)
            table = OwnerTable(addresses, ownership)
            for owner, address in self._successors:
                table.succeed(owner, address)
            self._table = table
            if self._identity is None:
                self._identity = identity_of(settings.tls)
        return table

    def stop(self, reason: str) -> None:
        """Make the loop end: refuse its reports, and fail everything it waits for with ``reason``."""
        if self._channel is not None:
            self._channel.refuse()
        if self._context is not None:
            self._context.close(reason)


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
        life=settings.life,
        step=made.step,
        number=made.number,
        metrics=made.metrics,
        checkpoint=made.checkpoint,
    )


def _context(
    settings: RankSettings,
    table: OwnerTable,
    shown: Identity | None,
    channel: ReportChannel,
    recent: RecentReports,
    recorder: MemoryRecorder,
) -> RankContext:
    gauges = ReportGauges(recorder)

    def sink(made: LoopReport) -> None:
        gauges.show(made.metrics)
        channel.put(_report(settings, made))

    def connect(model: int) -> ParameterStore:
        return connect_store(
            settings.rank,
            table,
            token=settings.token,
            tls=shown,
            config=settings.config,
            recorder=recorder,
            model=model,
            life=settings.life,
            ranks_here=settings.ranks_here,
            outlives_owners=settings.outlives_owners,
        )

    context = RankContext(
        rank=settings.rank,
        world_size=settings.world_size,
        life=settings.life,
        lineage=settings.lineage,
        repeats=settings.repeats,
        device=torch.device("cuda:0" if settings.use_gpu else "cpu"),
        run=settings.run,
        run_dir=settings.run_dir,
        resume=settings.resume,
        on_checkpoint_error=settings.on_checkpoint_error,
        config=settings.config,
        connect=connect,
        sink=sink,
        recent=recent,
        recorder=recorder,
    )
    return context
