"""One run from the driver's side: start the actors, follow them to the end, take everything down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from rayzero.cluster.actors import ANSWER_S, STOP_S, Former, RunActors, refuse_name_in_use
from rayzero.cluster.files.file_discovery import announced
from rayzero.cluster.files.metrics_log import MakeRow, MetricsLog, trim_log, written_rows
from rayzero.cluster.files.run_dir import RunDirectory, StartPoint
from rayzero.cluster.interrupts import postponed, shielded
from rayzero.cluster.janitor import KeptStates
from rayzero.cluster.loop import PackedLoop
from rayzero.cluster.nodes.placement import placed
from rayzero.cluster.nodes.resources import Placement, plan_resources, rescaled
from rayzero.cluster.nodes.session import alive_nodes, ray_session
from rayzero.cluster.processes.coordinator import HeardReports, News
from rayzero.cluster.processes.rank_worker import RankSettings
from rayzero.cluster.replacement import Replacement
from rayzero.cluster.run import Member, Recovery, Report, Routing, RunState, optimizer_name, rank_name
from rayzero.cluster.supervision import Failure, RankOutcome, Verdict, Watch, is_lost, run_failed
from rayzero.config import RunConfig, ScalingConfig, ZeroConfig
from rayzero.elastic.controller import (
    Controller,
    Kind,
    MemberId,
    Run,
    still_outlived,
    wait_before_restart,
)
from rayzero.errors import RayZeroError, RunFailedError
from rayzero.protocol.ownership import device_owners
from rayzero.quantities import count
from rayzero.telemetry.discovery import Target, service_discovery
from rayzero.telemetry.recorder import Measurements

__all__ = ["Journal", "OnPhase", "OnReport", "RunRequest", "drive"]

_LOOK_S = 1.0  # between two looks for places
_GONE_S = 60.0  # until the processes of a driver that was killed have left the cluster

OnReport = Callable[[Report], None]
OnPhase = Callable[[str], None]  # called with a short description of each phase as it begins


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Everything that a run needs, checked and packed."""

    packed_loop: PackedLoop
    zero: ZeroConfig
    scaling: ScalingConfig
    run: RunConfig
    directory: RunDirectory
    make_row: MakeRow  # rows of metrics.jsonl from reports
    on_report: OnReport | None
    on_phase: OnPhase  # called with each phase, while the run starts
    on_start: Callable[[], None]  # called when every rank is about to enter its loop, each time the run starts
    on_restart: Callable[[], None]  # called when the run starts again from a checkpoint, before it does
    on_change: Callable[[], None]  # called after reports
    on_stop: Callable[[], None]  # called if the run is interrupted, before anything is taken down


@dataclass(slots=True)
class Journal:
    """What the driver knows of a run so far; complete once ``drive`` has ended, even by an error."""

    state: RunState = RunState.STARTING
    members: list[Member] = field(default_factory=list)
    spares: list[Member] = field(default_factory=list)  # processes that wait to become an owner's successor
    ray_address: str | None = None
    routing: Routing = field(default_factory=lambda: Routing(epoch=0, addresses=()))
    targets: tuple[Target, ...] = ()  # exporters, the coordinator's first; none without telemetry
    latest: dict[int, Report] = field(default_factory=dict)  # by rank
    recoveries: list[Recovery] = field(default_factory=list)  # failures that the run has outlived
    outlived: int = 0  # failures, of ``max_failures``
    restarts: int = 0  # from a checkpoint
    lost_at: float | None = None  # monotonic seconds: since when the run has to start again
    measured: dict[str, Measurements] = field(default_factory=dict)  # by process

    def note(self, report: Report) -> None:
        """Take one report."""
        self.latest[report.rank] = report


def drive(request: RunRequest, journal: Journal) -> None:
    """Run to the end and leave nothing behind; keeps ``journal`` up to date.

    A run that has lost what only a checkpoint brings back starts again from the newest one, ``max_failures`` times at
    most. Raises RunFailedError with the cause, ConfigError when the cluster has no place for the run, and what a signal
    raises (KeyboardInterrupt, SystemExit) or ``on_report`` raised, once the ranks have been stopped. Call it inside
    ``interruptible()``.
    """
    start = request.directory.start
    with ray_session(request.on_phase):
        journal.ray_address = ray.get_runtime_context().gcs_address
        refuse_name_in_use(request.run.name, _GONE_S if start.former is not None else 0.0)
        if start.step or start.why:
            request.on_phase(str(start))
        lost = _attempt(request, journal)
        while lost is not None:
            lost = _again(request, journal, lost)


def _again(request: RunRequest, journal: Journal, lost: RunFailedError) -> RunFailedError | None:
    """Start the run again from its newest checkpoint; see ``_attempt``."""
    journal.state = RunState.STARTING
    journal.restarts += 1
    try:
        _prepare_again(request, journal, lost)
        scaling = _places_left(request.scaling, request.zero.placement)
        return _attempt(replace(request, scaling=scaling), journal)
    except (RayZeroError, OSError) as failed:
        if journal.state is not RunState.STARTING:
            raise
        if not isinstance(failed, RunFailedError) or journal.outlived >= request.run.max_failures:
            raise RunFailedError(f"{lost}\nThe run cannot start again: {failed}") from failed
        journal.outlived += 1
        return failed


def _prepare_again(request: RunRequest, journal: Journal, lost: RunFailedError) -> None:
    """Find what the run starts from, and wait."""
    directory, wait_s = request.directory, wait_before_restart(journal.restarts)
    directory.restart()
    trim_log(directory.path, directory.rows_until)
    left = still_outlived(request.run.max_failures, journal.outlived)
    why = str(lost).partition("\n")[0]
    request.on_phase(f"{why}; {directory.start}, in {wait_s:g} s {left}")
    request.on_restart()
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


def _attempt(request: RunRequest, journal: Journal) -> RunFailedError | None:
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
    places = placed(plan, timeout_s=scaling.placement_timeout)
    with places as placement, RunActors(run, placement, log) as actors:
        _start(request, actors, journal)
        try:
            with _discoverable(request, actors):
                lost = _follow(request, actors, journal)
                if lost is not None:
                    actors.end(politely=False)
                return lost
        finally:
            request.directory.let_go()  # now that the owners have them; the actors' end sweeps


def _start(request: RunRequest, actors: RunActors, journal: Journal) -> None:
    journal.routing = actors.start(
        owner_memory=request.zero.cpu_memory_budget,
        share=request.zero.shared_directory,
        slab_dir=Path(request.zero.slab_dir),
        telemetry=request.run.telemetry,
        beside_ranks=_beside_ranks(request),
        discovery_dir=request.run.discovery_dir if request.run.telemetry.enabled else None,
        max_failures=request.run.max_failures,
        warm_spares=request.run.warm_spares,
        keep=_kept(request),
        former=_former(request.directory.start),
    )
    journal.members = list(actors.members.values())
    journal.latest = {rank: report for rank, report in journal.latest.items() if rank_name(rank) in actors.members}
    journal.measured = {who: measured for who, measured in journal.measured.items() if who in actors.members}
    journal.targets = actors.targets
    actors.move(RunState.RUNNING)
    journal.state = RunState.RUNNING
    if journal.lost_at is not None:
        seconds, journal.lost_at = time.monotonic() - journal.lost_at, None
        actors.coordinator.recovered.remote("run", {"restart": seconds})
        journal.recoveries.append(Recovery(who="the run", pid=None, seconds=seconds))
    request.on_start()
    request.on_phase("every process is up; starting the training loops")


def _kept(request: RunRequest) -> KeptStates | None:
    if request.zero.shared_directory is None:
        return None
    return KeptStates(run=request.run.name, lineage=request.directory.start.lineage, seconds=request.run.keep_states)


def _former(start: StartPoint) -> Former | None:
    return None if start.former is None else Former(start.former, start.continuation is not None)


def _beside_ranks(request: RunRequest) -> str | None:
    """The device of owners beside the ranks; None: there are none."""
    if not device_owners(request.scaling.num_workers, request.zero.host_fraction):
        return None
    return "cuda:0" if request.scaling.use_gpu else "cpu"


def _discoverable(request: RunRequest, actors: RunActors) -> AbstractContextManager[object]:
    """A context in which the run is announced in the directory that Prometheus watches."""
    if not actors.targets:
        return nullcontext()
    return announced(request.run.discovery_dir, request.run.name, service_discovery(actors.targets))


def _follow(request: RunRequest, actors: RunActors, journal: Journal) -> RunFailedError | None:
    """Follow the run to its end; see ``_attempt``."""
    follower = _Follower(actors, journal, request)
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


def _rank_settings(request: RunRequest, actors: RunActors, routing: Routing) -> list[RankSettings]:
    start = request.directory.start
    goes_on = start.continuation
    return [
        RankSettings(
            rank=rank,
            world_size=request.scaling.num_workers,
            run=request.run.name,
            run_dir=request.directory.path,
            resume=start.checkpoint,
            lineage=start.lineage,
            life=_rank_life(start),
            repeats=goes_on.step if goes_on is not None and goes_on.repeats else None,
            on_checkpoint_error=request.run.on_checkpoint_error,
            use_gpu=request.scaling.use_gpu,
            bind_numa=request.scaling.bind_numa,
            config=request.zero,
            addresses=routing.addresses,
            outlives_owners=request.run.max_failures > 0 and request.zero.shared_directory is not None,
            token=actors.token,
        )
        for rank in range(request.scaling.num_workers)
    ]


def _rank_life(start: StartPoint) -> int:
    return 0 if start.continuation is None else start.continuation.life


def _names(scaling: ScalingConfig, num_owners: int) -> dict[MemberId, str]:
    """The names of all members' processes. Owners beside ranks are in the ranks' processes."""
    names = {MemberId(Kind.RANK, rank): rank_name(rank) for rank in range(scaling.num_workers)}
    for owner in range(num_owners):
        beside = owner - scaling.num_optimizers
        names[MemberId(Kind.OWNER, owner)] = rank_name(beside) if beside >= 0 else optimizer_name(owner)
    return names


def _bound(request: RunRequest, num_owners: int) -> frozenset[MemberId]:
    """The members whose part of the optimizer ends with their process."""
    bound: list[MemberId] = []
    if request.zero.shared_directory is None:
        bound += [MemberId(Kind.OWNER, owner) for owner in range(num_owners)]
    if num_owners > request.scaling.num_optimizers:
        bound += [MemberId(Kind.RANK, rank) for rank in range(request.scaling.num_workers)]
    return frozenset(bound)


class _Follower:
    """Waits for the next event of a run and passes it on: deaths to the Replacement, ends of loops to the Watch,
    reports to the user.

    Knows the Ray calls of loops and reports; not what a death or an end means for the run."""

    def __init__(self, actors: RunActors, journal: Journal, request: RunRequest) -> None:
        self._actors = actors
        self._settings = _rank_settings(request, actors, journal.routing)
        self._packed_loop = request.packed_loop
        self._controller = Controller(
            request.scaling.num_workers,
            journal.routing.addresses,
            max_failures=request.run.max_failures,
            bound=_bound(request, len(journal.routing.addresses)),
            outlived=journal.outlived,
            rank_life=_rank_life(request.directory.start),
        )
        self._watch = Watch(request.scaling.num_workers)
        self._loops = actors.run_loops(self._settings, request.packed_loop)
        coordinator = actors.coordinator
        self._replacement = Replacement(
            actors,
            self._controller,
            _names(request.scaling, len(journal.routing.addresses)),
            loops=self._loops,
            stall_timeout=request.zero.stall_timeout,
            wake=lambda: coordinator.rouse.remote(),
            say=request.on_phase,
            failed=lambda failure: self._watch.failed(failure, time.monotonic()),
            entered=self._enter,
            recovered=self._note_recovery,
            begin=self._begin,
        )
        self._heard, self._life = HeardReports(), actors.coordinator_life
        self._news = actors.coordinator.next_reports.remote(self._life)
        self._journal = journal
        self._on_report = request.on_report
        self._on_change = request.on_change
        self._on_stop = request.on_stop
        self._on_phase = request.on_phase
        self._checkpoints = request.directory.checkpoints

    def follow(self) -> Watch:
        """Run until every loop has returned, or the run has failed and its cause is known."""
        with closing(self._replacement):
            self._take_events()
        if self._watch.failures and self._watch.cause.consequence:  # anything but a death
            for still in self._actors.standing_still():
                self._watch.failed(still, time.monotonic())
        return self._watch

    def _take_events(self) -> None:
        while self._watch.verdict(time.monotonic()) is Verdict.RUNNING:
            waiting = [*self._loops, *self._replacement.calls, *self._actors.spares.calls, self._news]
            ready, _ = ray.wait(waiting, num_returns=1, timeout=self._patience_s(time.monotonic()))
            with postponed():  # reports that were fetched but not passed on would be lost
                for call in ready:
                    self._take(call)
            self._replacement.act()

    def _patience_s(self, now: float) -> float | None:
        """How long the next event may take before there is something to do without one."""
        patience = (self._watch.patience_s(now), self._replacement.patience_s(now))
        return min((seconds for seconds in patience if seconds is not None), default=None)

    def starts_again(self) -> bool:
        """After a bad end: whether the run may start again from a checkpoint. Call it once: it may be one more failure
        to outlive."""
        cause, died = self._watch.cause, self._controller.outlived > self._journal.outlived
        counted = cause.restarts and died and cause.who != "coordinator"  # which the controller does not know
        restarts = is_lost(cause, after_a_death=died)
        if restarts and not counted:
            restarts = self._controller.spend() is None
        self._journal.outlived = self._controller.outlived
        if restarts and self._journal.lost_at is None:
            self._journal.lost_at = time.monotonic()
        return restarts

    def finish(self) -> None:
        """After a good end: take the last reports and the owners' measurements."""
        with postponed():  # as in follow()
            self._read_rest()
        self._actors.move(RunState.FINISHED)
        self._journal.measured |= self._actors.stop_owners()

    def take_down(self, state: RunState, reason: str) -> None:
        """After a bad end: stop every process, wait a little, and keep what can still be read. Signals are
        ignored."""
        with shielded():
            if state is RunState.STOPPED:
                self._tell_stopped()
            self.take_down_at_once(state, reason, forgives=Exception)  # the cause must be reported

    def take_down_at_once(self, state: RunState, reason: str, *, forgives: type[Exception] = RunFailedError) -> None:
        """``take_down``, which signals may end. ``forgives``: errors of the last reports that end nothing, also those
        that ``on_report`` raises."""
        self._actors.kill_stopped()
        with suppress(RunFailedError):  # the coordinator may be what failed
            self._actors.move(state, reason)
        for call in self._actors.stop_ranks(self._loops, reason):
            self._take_outcome(call, self._loops.pop(call))
        with suppress(forgives):
            self._read_rest()
        self._journal.measured |= self._actors.stop_owners(STOP_S)

    def _tell_stopped(self) -> None:
        """Record the stop at once: a Ray that got the same signal is ending, and may end this process a minute
        later."""
        self._journal.state = RunState.STOPPED
        with suppress(OSError):  # it is recorded again at the end
            self._on_stop()

    def _take(self, call: Any) -> None:
        if call in self._loops:
            self._take_outcome(call, self._loops.pop(call))
        elif call == self._news:
            self._take_news(call)
        elif call in self._actors.spares.calls:
            self._actors.take_spare(call)
            self._note_spares()
        else:
            self._replacement.take(call)

    def _take_outcome(self, call: Any, who: str) -> None:
        answer = self._replacement.answer(call, who)
        if isinstance(answer, RankOutcome):
            self._journal.measured[who] = answer.measured
            self._controller.ended(answer.rank, self._controller.life(MemberId(Kind.RANK, answer.rank)))
            self._watch.finished(answer, time.monotonic())

    def _take_news(self, call: Any) -> None:
        news = self._replacement.answer(call, "coordinator")
        if news is None:
            return
        if self._is_of_another(news):
            self._take_coordinator()
        self._news = self._actors.coordinator.next_reports.remote(self._life)
        self._pass_on(news.reports)

    # ---- other processes that take places

    def _begin(self, run: Run) -> None:
        settings = replace(self._settings[run.rank], life=run.life, addresses=run.addresses)
        self._loops |= self._actors.run_loop(settings, self._packed_loop)

    def _enter(self, routing: Routing) -> None:
        self._journal.routing = routing
        self._journal.members = list(self._actors.members.values())
        self._journal.targets = self._actors.targets

    def _note_recovery(self, recovery: Recovery) -> None:
        self._journal.recoveries.append(recovery)
        if self._watch.verdict(time.monotonic()) is Verdict.RUNNING:
            self._actors.spares.fill()  # now: a process that imports would have slowed the one that others waited for
            self._note_spares()

    def _note_spares(self) -> None:
        self._journal.spares = self._actors.spares.members

    def _is_of_another(self, news: News) -> bool:
        """Whether they are the first news of a coordinator that has taken another one's place."""
        before, self._life = self._life, news.life
        return news.life != before

    def _take_coordinator(self) -> None:
        """Ray has started another coordinator; see [Note: another coordinator]."""
        began = time.monotonic()
        self._heard.come_again()
        if (over := self._controller.spend()) is not None:
            self._watch.failed(Failure(who="coordinator", what=f"died: {over}."), began)
            return
        pid = self._actors.resume_coordinator(self._journal.routing)
        seconds = time.monotonic() - began
        self._actors.coordinator.recovered.remote("coordinator", {"re-form": seconds})
        self._journal.recoveries.append(Recovery(who="coordinator", pid=pid, seconds=seconds))
        left = still_outlived(self._controller.max_failures, self._controller.outlived)
        self._on_phase(f"coordinator died, and is back as pid {pid} {left}")

    def _read_rest(self) -> None:
        """Read the reports sent before the loops ended. The open call may have been answered before the last ones came;
        the next call has those."""
        for _ in range(2):
            self._actors.ask({"coordinator": self._actors.coordinator.end_news.remote()}, ANSWER_S)
            news = self._actors.ask({"coordinator": self._news}, ANSWER_S)["coordinator"]
            if self._is_of_another(news):
                self._take_coordinator()
            self._news = self._actors.coordinator.next_reports.remote(self._life)  # take_down() may come after this
            self._pass_on(news.reports)

    def _pass_on(self, reports: Iterable[Report]) -> None:
        for report in filter(self._heard.is_new, reports):
            self._journal.note(report)
            self._checkpoints.note(report.checkpoint)
            on_report, self._on_report = self._on_report, None  # one that raises is not called again
            if on_report is not None:
                on_report(report)
            self._on_report = on_report
        self._on_change()
