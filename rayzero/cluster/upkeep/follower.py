"""Follows a run whose processes are up to its end: waits for events, and passes each on. Measures how long ranks wait
for updates meanwhile, and asks for as many optimizer actors as elastic/scaling.py wants."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

import ray

from rayzero.cluster.actor_calls import ANSWER_S, STOP_S, control
from rayzero.cluster.files.key_files import FOLLOWER_FILE, VIEWER_FILE, write_key
from rayzero.cluster.nodes.session import answered
from rayzero.cluster.processes.coordinator import HeardReports, News
from rayzero.cluster.processes.rank_worker import RankSettings, RankStart
from rayzero.cluster.run import Load, Recovery, Rescaled, RunState, rank_name
from rayzero.cluster.run_actors import RunActors
from rayzero.cluster.status import RunRequest, RunStatus
from rayzero.cluster.supervision import Failure, RankOutcome, Verdict, Watch, is_lost, postponed, shielded
from rayzero.cluster.upkeep.ray_processes import RayProcesses
from rayzero.cluster.upkeep.renewal import Renewal
from rayzero.cluster.upkeep.replacement import Replacement
from rayzero.cluster.upkeep.rescaling import Rescaling
from rayzero.elastic.controller import Controller, still_outlived
from rayzero.elastic.members import Ended, MemberId, MemberKind
from rayzero.elastic.scaling import Bounds, History, ScaleRequest, StepWindow, given_up, look, take
from rayzero.errors import RunFailedError
from rayzero.protocol.ownership import device_owners

log = logging.getLogger(__name__)

_REQUEST_S = 0.5  # between two looks for a request for other optimizers
_ASK_S = 2.0  # between two questions what the processes have measured
_STEPS = 5  # of a window between two answers, at least

Loads = Mapping[str, Load]  # by process


def _rank_settings(request: RunRequest, actors: RunActors, addresses: tuple[str, ...]) -> list[RankSettings]:
    begins = request.directory.start
    start = RankStart(
        addresses=addresses,
        ownership=actors.ownership,
        lineage=begins.lineage,
        life=begins.life,
        repeats=None if begins.continuation is None else begins.continuation.repeats,
        resume=begins.checkpoint,
        token=actors.certificates.token,
        remains=actors.remains,
    )
    nodes = [actors.members[rank_name(rank)].node for rank in range(request.scaling.num_workers)]
    return [
        RankSettings(
            rank=rank,
            world_size=request.scaling.num_workers,
            ranks_here=tuple(other for other, node in enumerate(nodes) if node == nodes[rank]),
            run=request.run.name,
            run_dir=request.directory.path,
            on_checkpoint_error=request.run.on_checkpoint_error,
            use_gpu=request.scaling.use_gpu,
            bind_numa=request.scaling.bind_numa,
            config=request.zero,
            outlives_owners=request.run.max_failures > 0 and request.zero.shared_directory is not None,
            start=start,
        )
        for rank in range(request.scaling.num_workers)
    ]


def _bound(request: RunRequest) -> frozenset[MemberId]:
    bound: list[MemberId] = []
    if request.zero.shared_directory is None:
        bound += [MemberId(MemberKind.OWNER, owner) for owner in range(request.scaling.num_optimizers)]
    for rank in range(_beside(request)):
        bound += [MemberId(MemberKind.RANK, rank), MemberId(MemberKind.BESIDE, rank)]
    return frozenset(bound)


def _beside(request: RunRequest) -> int:
    return device_owners(request.scaling.num_workers, request.zero.host_fraction)


def _limits(request: RunRequest) -> Bounds | None:
    """How many optimizer actors a run may have; None: it is not to change them by itself."""
    scaling = request.scaling
    if scaling.max_optimizers is None:
        return None
    fewest = min(request.fewest_optimizers, scaling.num_optimizers)
    return Bounds(fewest=fewest, most=scaling.max_optimizers, target_exposed=scaling.target_exposed)


class Follower:
    """Waits for the next event of a run and passes it on: deaths to the Replacement, ends of loops to the Watch,
    reports to the user.

    Knows the Ray calls of loops and reports; not what a death or an end means for the run."""

    def __init__(self, actors: RunActors, status: RunStatus, request: RunRequest) -> None:
        self._actors = actors
        settings = _rank_settings(request, actors, status.addresses)
        self._controller = Controller(
            request.scaling.num_workers,
            status.addresses,
            max_failures=request.run.max_failures,
            bound=_bound(request),
            beside=_beside(request),
            outlived=status.outlived,
            rank_life=request.directory.start.life,
            ownership=actors.ownership,
        )
        self._watch = Watch(request.scaling.num_workers)
        self._run_dir = request.directory.path
        self._processes = RayProcesses(
            actors,
            {member: self._controller.life(member) for member in self._controller.running},
            replaces=request.run.max_failures > 0,
            stall_timeout=request.zero.stall_timeout,
            settings=settings,
            packed_loop=request.packed_loop,
            join_s=request.scaling.placement_timeout,
        )
        self._loops = self._processes.loops
        for own in settings:
            self._loops[actors.run_loop(own, request.packed_loop)] = rank_name(own.rank)
        status.say, status.changed = request.on_phase, request.record.write
        self._replacement = Replacement(actors, self._controller, self._processes, status)
        self._rescaling = self._replacement.rescaling = Rescaling(
            actors,
            self._replacement.supervisor,
            self._processes,
            status,
            zero=request.zero,
            scaling=request.scaling,
        )
        access, folder, of_follower = request.access, request.directory.path, actors.certificates.of_follower
        tools = {} if access is None else {"rayzero top": lambda: write_key(folder, VIEWER_FILE, access.viewer)}
        tools["followers"] = lambda: write_key(folder, FOLLOWER_FILE, of_follower())
        self._renewal = Renewal(actors, say=request.on_phase, others=tools)
        self._autoscaling = Autoscaling(actors, _limits(request), self._controller, self._rescaling)
        self._heard, self._life = HeardReports(), actors.coordinator_life
        self._again: list[Any] = []  # calls in which ranks send another coordinator their last reports
        self._news = actors.coordinator.next_reports.remote(self._life)
        self._status = status
        self._recovered, self._rescaled = len(status.recoveries), len(status.rescales)
        self._on_report = request.on_report
        self._record = request.record
        self._on_phase = request.on_phase
        self._checkpoints = request.directory.checkpoints

    def follow(self) -> Watch:
        """Run until every loop has returned, or the run has failed and its cause is known."""
        with closing(self._replacement), closing(self._rescaling):
            self._take_events()
        if self._watch.failures and self._watch.cause.consequence:  # anything but a death
            for still in self._actors.local.standing_still(self._actors.members):
                self._watch.failed(still, time.monotonic())
        return self._watch

    def _take_events(self) -> None:
        while self._watch.verdict(time.monotonic()) is Verdict.RUNNING:
            waiting = [*self._loops, *self._processes.calls, *self._actors.spares.calls, *self._autoscaling.calls]
            waiting.append(self._news)
            ready, _ = ray.wait(waiting, num_returns=1, timeout=self._patience_s(time.monotonic()))
            with postponed():  # reports that were fetched but not passed on would be lost
                for call in ready:
                    self._take(call)
            self._replacement.act()
            for failure in self._replacement.failed():
                self._watch.failed(failure, time.monotonic())
            self._note_changes()
            self._renewal.act()
            self._take_request()
            self._autoscaling.act(time.monotonic())

    def _take_request(self) -> None:
        requests = take(self._run_dir)
        for request in requests[:-1]:
            self._rescaling.replace(request)
        for request in requests[-1:]:
            self._rescaling.request(request)

    def _patience_s(self, now: float) -> float | None:
        """How long the next event may take before there is something to do without one."""
        patience = (self._watch.patience_s(now), self._processes.patience_s(now), _REQUEST_S)
        return min((seconds for seconds in patience if seconds is not None), default=None)

    def starts_again(self) -> bool:
        """After a bad end: whether the run may start again from a checkpoint. Call it once: it may be one more failure
        to outlive."""
        cause, died = self._watch.cause, self._controller.outlived > self._status.outlived
        counted = cause.restarts and died and cause.who != "coordinator"  # which the controller does not know
        restarts = is_lost(cause, after_a_death=died)
        if restarts and not counted:
            restarts = self._controller.spend() is None
        self._status.outlived = self._controller.outlived
        if restarts and self._status.lost_at is None:
            self._status.lost_at = time.monotonic()
        return restarts

    def finish(self) -> None:
        """After a good end: take the last reports and the owners' measurements."""
        with postponed():  # as in follow()
            self._read_rest()
        self._actors.move(RunState.FINISHED)
        self._status.measured |= self._actors.stop_owners()

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
        self._actors.local.kill_stopped()
        with suppress(RunFailedError):  # the coordinator may be what failed
            self._actors.move(state)
        for call in self._actors.stop_ranks(self._loops, reason):
            self._take_outcome(call, self._loops.pop(call))
        with suppress(forgives):
            self._read_rest()
        self._status.measured |= self._actors.stop_owners(STOP_S)

    def _tell_stopped(self) -> None:
        """Record the stop at once: a Ray that got the same signal is ending, and may end this process a minute
        later."""
        self._status.state = RunState.STOPPED
        self._record.write()

    def _take(self, call: Any) -> None:
        if call in self._loops:
            self._take_outcome(call, self._loops.pop(call))
        elif call == self._news:
            self._take_news(call)
        elif call in self._actors.spares.calls:
            self._actors.take_spare(call)
            self._note_spares()
        elif not self._autoscaling.take(call):
            self._replacement.take(call)

    def _take_outcome(self, call: Any, who: str) -> None:
        answer = self._processes.answer(call, who)
        if isinstance(answer, RankOutcome):
            self._status.measured[who] = answer.measured
            self._replacement.do(Ended(self._processes.present(who)))
            self._watch.finished(answer, time.monotonic())

    def _take_news(self, call: Any) -> None:
        news = self._processes.answer(call, "coordinator")
        if news is not None:
            self._hear(news)

    # ---- other processes that take places

    def _note_changes(self) -> None:
        """Do what follows from recoveries and changes of the owners that were entered just now."""
        recovered, rescales = len(self._status.recoveries), len(self._status.rescales)
        if recovered > self._recovered and self._watch.verdict(time.monotonic()) is Verdict.RUNNING:
            self._actors.fill_spares()  # now: a process that imports would have slowed the one that others waited for
            self._note_spares()
        for rescaled in self._status.rescales[self._rescaled :]:
            self._autoscaling.ended(rescaled)
        self._recovered, self._rescaled = recovered, rescales

    def _note_spares(self) -> None:
        self._status.spares = self._actors.spares.members

    def _take_coordinator(self) -> None:
        """Ray has started another coordinator; see [Note: another coordinator]."""
        began = time.monotonic()
        self._heard.come_again()
        if (over := self._controller.spend()) is not None:
            self._watch.failed(Failure(who="coordinator", what=f"died: {over}."), began)
            return
        pid = self._actors.resume_coordinator()
        self._again = self._actors.report_again()
        seconds = time.monotonic() - began
        self._actors.coordinator.recovered.remote("coordinator", "the coordinator", {"re-form": seconds})
        self._status.recoveries.append(Recovery(who="coordinator", pid=pid, seconds=seconds))
        left = still_outlived(self._controller.max_failures, self._controller.outlived)
        self._on_phase(f"coordinator died, and is back as pid {pid} {left}")

    def _read_rest(self) -> None:
        """Read the reports sent before the loops ended. The open call may have been answered before the last ones came;
        the next call has those, unless it finds another coordinator, which ranks then send them again."""
        reads = 2
        while reads:
            if self._again:
                answered(self._again, ANSWER_S)
            self._actors.ask({"coordinator": self._actors.coordinator.end_news.remote()}, ANSWER_S)
            news = self._actors.ask({"coordinator": self._news}, ANSWER_S)["coordinator"]
            reads = reads - 1 if news.life == self._life else 2
            self._hear(news)

    def _hear(self, news: News) -> None:
        before, self._life = self._life, news.life
        if news.life != before:
            self._take_coordinator()
        self._news = self._actors.coordinator.next_reports.remote(self._life)
        for report in filter(self._heard.is_new, news.reports):
            self._status.latest[report.rank] = report
            self._checkpoints.note(report.checkpoint)
            on_report, self._on_report = self._on_report, None  # one that raises is not called again
            if on_report is not None:
                on_report(report)
            self._on_report = on_report
        self._record.write_now_and_then()


# ---- autoscaling ------------------------------------------------------------------------------------------------


def window_of(before: Loads, now: Loads) -> StepWindow | None:
    """Seconds a step between two measurements of the same processes; None: they have taken too few."""
    taken = {who: _difference(before[who], now[who]) for who in now}
    ranks = [load for who, load in taken.items() if who.startswith("rank")]
    owners = [load for who, load in taken.items() if not who.startswith("rank")]
    if not ranks or not owners or min(load.count for load in (*ranks, *owners)) < _STEPS:
        return None
    return StepWindow(
        step_s=max(load.seconds / load.count for load in ranks),
        exposed_s=max(load.exposed / load.count for load in ranks),
        busy_s=max(load.seconds / load.count for load in owners),
    )


def _difference(before: Load, now: Load) -> Load:
    return Load(now.count - before.count, now.seconds - before.seconds, now.exposed - before.exposed)


class Autoscaling:
    """Looks at a run now and then, and asks for other optimizer actors.

    Knows what processes measure; not how owners change."""

    def __init__(
        self,
        actors: RunActors,
        bounds: Bounds | None,
        controller: Controller,
        rescaling: Rescaling,
    ) -> None:
        """``bounds``: None: look at nothing. ``controller``: knows which owners there are. ``rescaling``: gets the
        requests for other ones."""
        self._actors, self._bounds, self._controller, self._rescaling = actors, bounds, controller, rescaling
        self._history = History()
        self._before: Loads | None = None
        self._asked: dict[Any, str] = {}  # calls of the present question -> whose
        self._answers: dict[str, Load] = {}
        self._next_s = 0.0
        self._wanted: ScaleRequest | None = None

    @property
    def calls(self) -> list[Any]:
        """The calls to wait for; give those that end to ``take``."""
        return list(self._asked)

    def act(self, now: float) -> None:
        """Ask every process what it has measured, if it is time, unless the owners change."""
        if self._bounds is None or now < self._next_s or self._asked:
            return
        self._next_s = now + _ASK_S
        if not self._owners():
            self._before = None
            return
        everyone = {**self._actors.with_shards, **self._actors.ranks}
        self._answers = {}
        self._asked = {control(actor.load).remote(): who for who, actor in everyone.items()}

    def take(self, call: Any) -> bool:
        """One of ``calls`` has ended. False: it is none of them."""
        if call not in self._asked:
            return False
        who = self._asked.pop(call)
        try:
            self._answers[who] = ray.get(call)
        except ray.exceptions.RayError as error:  # the watcher of deaths notices it; the window begins anew
            log.debug("%s says nothing of its load: %s", who, error)
        if not self._asked:
            self._look(dict(self._answers))
        return True

    def _owners(self) -> int:
        """How many owners have shards; 0 while they change."""
        settled = not (self._controller.changes or self._controller.awaited)
        return self._controller.ownership.num_optimizers if settled else 0

    def _look(self, now: Loads) -> None:
        before, owners, bounds = self._before, self._owners(), self._bounds
        if not owners or bounds is None:
            self._before = None
            return
        if before is None or before.keys() != now.keys() or any(now[who].count < before[who].count for who in now):
            self._before = now  # the window begins anew
            return
        window = window_of(before, now)
        if window is None:
            return
        self._before = now
        self._history, resize = look(self._history, bounds, owners, window)
        if resize is not None:
            self._wanted = ScaleRequest(num_optimizers=resize.owners)
            self._rescaling.request(self._wanted, resize.why)

    def ended(self, rescaled: Rescaled) -> None:
        self._before = None
        if rescaled.failed is not None and self._wanted is not None and rescaled.id == self._wanted.id:
            self._history = given_up(self._history, rescaled.before)
