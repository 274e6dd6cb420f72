"""The coordinator: one named actor per run that takes the ranks' reports and serves discovery and the live page.

It only records. Ranks send reports, which it writes to metrics.jsonl and passes on to the driver; the driver says who
takes part and what happens. No training step waits for it.

[Note: another coordinator] If its process dies, Ray starts another one, which knows nothing. It has a *life* of its
own, which its answers name: so the driver notices, tells it who takes part, and has each rank send its last reports
again, also one whose loop has ended. Their receivers know which they have had: the log by its rows, the driver by their
numbers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from time import monotonic, time
from typing import NamedTuple

import ray

from rayzero.cluster.files.metrics_log import MetricsLog
from rayzero.cluster.processes.live_page import Known, LivePage, RunEvent
from rayzero.cluster.processes.process_exporter import ExporterSettings, ProcessExporter, Renewed
from rayzero.cluster.run import DISCOVERY_PATH, Member, Report, RunState
from rayzero.concurrency.processes import raise_open_files
from rayzero.quantities import count
from rayzero.telemetry.names import (
    ACTORS,
    HEARTBEAT_AGE_SECONDS,
    LOGGER_ROWS,
    RECOVERIES,
    RECOVERY_SECONDS,
    RESCALE_MOVED_BYTES,
    RESCALE_PAUSE_SECONDS,
    RESCALE_SECONDS,
    RESCALES,
    SHARD_IMBALANCE,
)
from rayzero.telemetry.pages import Page
from rayzero.telemetry.recorder import MemoryRecorder, Reading
from rayzero.telemetry.scrape import Target, Viewer, service_discovery

LATE_S = 10.0  # a process without a heartbeat for this long is late
EVENTS_KEPT = 50  # on the live page
REPORTS_KEPT = 10_000  # kept between two reads of the driver; older ones are dropped


def this_process(who: str) -> Member:
    """This process, as a member of the run. It may open as many files as this host allows from here on."""
    context = ray.get_runtime_context()
    return Member(
        who=who,
        pid=os.getpid(),
        node=context.get_node_id(),
        host=ray.util.get_node_ip_address(),
        open_files=raise_open_files(),
    )


@dataclass(frozen=True, slots=True)
class News:
    """Reports for the driver, and the life of the coordinator that has them."""

    reports: list[Report]
    life: str


class Received(NamedTuple):
    """What a coordinator says to a batch of reports."""

    life: str  # of the coordinator
    passed_on: tuple[int, int] | None = None  # step and number of the rank's last report that the driver has had


class HeardReports:
    """Knows which of the ranks' reports have come before: a rank's next life, and ranks whose coordinator is a new
    process, send the last ones again."""

    def __init__(self) -> None:
        self._newest: dict[int, Report] = {}  # by rank
        self._before: dict[int, Report] = {}  # by rank: the newest that may come again

    def is_new(self, report: Report) -> bool:
        """Whether a rank has not made this report before. Ask once for each, in the rank's order."""
        heard = self._newest.get(report.rank)
        if heard is not None and heard.life < report.life:
            self._before[report.rank] = heard
        before = self._before.get(report.rank)
        if before is not None and (report.step, report.number) <= (before.step, before.number):
            return False
        self._newest[report.rank] = report
        return True

    def come_again(self) -> None:
        self._before = dict(self._newest)


class Heartbeats:
    """The last heartbeat of each process, and the owners' update seconds.

    Knows names such as "rank 0"; not what a late process means for the run (supervision.py)."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}  # by process
        self._worked: dict[str, float] = {}  # owners: update seconds in total
        self._before: dict[str, float] = {}  # the same when the imbalance was last computed
        self._imbalance: float | None = None

    def enlist(self, everyone: Sequence[str]) -> None:
        """Set the processes that must send heartbeats from now on."""
        now = monotonic()
        self._heard = {who: self._heard.get(who, now) for who in everyone}
        self._worked = {who: seconds for who, seconds in self._worked.items() if who in self._heard}

    def beat(self, who: str, update_seconds: float | None) -> None:
        if who not in self._heard:
            return
        self._heard[who] = monotonic()
        if update_seconds is not None:
            self._worked[who] = update_seconds
            self._compare()

    def _compare(self) -> None:
        owners = [who for who in self._heard if kind_of(who) == "optimizer"]
        done = [self._worked.get(who, 0.0) - self._before.get(who, 0.0) for who in owners]
        if done and min(done) > 0:
            self._imbalance = max(done) / fmean(done)
            self._before = dict(self._worked)

    def readings(self) -> Iterator[Reading]:
        now, states = monotonic(), Counter[tuple[str, str]]()
        for who, heard in list(self._heard.items()):
            age = now - heard
            states[kind_of(who), "late" if age > LATE_S else "ready"] += 1
            yield Reading(HEARTBEAT_AGE_SECONDS, age, {"process": who})
        for kind in ("rank", "optimizer"):
            counts = {state: states[kind, state] for state in ("ready", "late")}
            for state, number in {"desired": sum(counts.values()), **counts}.items():
                yield Reading(ACTORS, number, {"kind": kind, "state": state})
        if self._imbalance is not None:
            yield Reading(SHARD_IMBALANCE, self._imbalance, {})


def kind_of(who: str) -> str:
    return who.partition(" ")[0]


class Coordinator:
    """The actor: an event loop. All its calls but ``next_reports`` are short."""

    def __init__(self, run: str, log: MetricsLog | None, started_at: float) -> None:
        """``log``: where only this process writes reports; None if ranks report to another library. ``started_at``: of
        the run, seconds since 1970."""
        self._life = secrets.token_hex(4)
        self._known = Known(run=run, started_at=started_at)  # replaced as a whole: other threads read it
        self._heard, self._unread = HeardReports(), deque[Report](maxlen=REPORTS_KEPT)  # that the driver has not had
        self._checkpoints: set[str] = set()  # that were reported
        self._log = log
        self._heartbeats = Heartbeats()
        self._recorder = MemoryRecorder()
        self._exporter: ProcessExporter | None = None
        self._live: LivePage | None = None
        self._passed_on: dict[int, tuple[int, int]] = {}  # rank -> step and number of its last report the driver has
        self._passing_on: dict[int, tuple[int, int]] = {}  # the same, of those on their way to the driver
        self._news = asyncio.Event()
        self._ended = False
        self._ready = asyncio.Event()  # the driver has told this process of the run: reports are taken

    async def hello(self) -> Member:
        return this_process("coordinator")

    async def life(self) -> str:
        """This process's. See [Note: another coordinator]."""
        return self._life

    async def open_exporter(self, settings: ExporterSettings, viewer: Viewer) -> Target:
        """Open this process's exporter, which also serves discovery and the live page. ``viewer``: opens the others'.
        Raises ConfigError where it has no port."""
        self._recorder.watch(self._heartbeats.readings)
        page = Page("application/json", lambda: service_discovery(self._known.targets))
        pages = {DISCOVERY_PATH: page}
        if self._log is not None:
            self._live = LivePage(self._log.run_dir, lambda: self._known, viewer)
            pages |= self._live.pages
        self._exporter = ProcessExporter(settings, self._recorder, pages=pages)
        return self._exporter.target

    async def renew(self, new: Renewed) -> None:
        if new.metrics is not None and self._exporter is not None:
            self._exporter.renew(new.metrics)
        if new.viewer is not None and self._live is not None:
            self._live.renew(new.viewer)

    def _happened(self, text: str, *, bad: bool = False) -> None:
        events = (*self._known.events, RunEvent(time(), text, bad))[-EVENTS_KEPT:]
        self._known = replace(self._known, events=events)

    async def beat(self, who: str, update_seconds: float | None) -> None:
        self._heartbeats.beat(who, update_seconds)

    async def move(self, state: RunState) -> None:
        self._known = replace(self._known, state=state)
        self._happened(f"the run is {state}", bad=state is RunState.FAILED)
        if state is RunState.RUNNING:
            self._ready.set()

    async def enlist(self, members: Sequence[Member], targets: Sequence[Target] = ()) -> None:
        """Set who takes part, and the exporters that discovery lists."""
        hosts = {member.who: member.host for member in members}
        self._heartbeats.enlist(list(hosts))
        self._known = replace(self._known, hosts=hosts, targets=targets)

    async def resume(
        self,
        members: Sequence[Member],
        targets: Sequence[Target],
        exporter: ExporterSettings | None,
        viewer: Viewer,
    ) -> Member:
        """Take the place of a coordinator that has died: who takes part, and where this process's exporter listens.
        Raises ConfigError where it has no port, DataError if metrics.jsonl cannot be read. May be called again: the
        driver may have meant a life that died over it."""
        if self._log is not None:
            self._log.go_on()
        self._known = replace(self._known, state=RunState.RUNNING)
        await self.enlist(members, targets)
        if exporter is not None and self._exporter is None:
            await self.open_exporter(exporter, viewer)
        self._ready.set()
        return await self.hello()

    async def recovered(self, what: str, who: str, seconds: Mapping[str, float]) -> None:
        """Another process has taken a dead one's place, or the run has started again. ``what``: see
        ``names.RECOVERIES``. ``who``: the dead one's name. ``seconds``: by phase, see ``names.RECOVERY_SECONDS``."""
        self._recorder.add(RECOVERIES, what=what)
        total = sum(seconds.values())
        again = "the run started again from a checkpoint"
        self._happened(again if what == "run" else f"{who} died and was replaced within {total:.1f} s", bad=True)
        for phase, took in seconds.items():
            self._recorder.add(RECOVERY_SECONDS, took, phase=phase)

    async def rescaled(self, outcome: str, seconds: Mapping[str, float], pause: float, moved_bytes: int) -> None:
        """The owners have changed, or stay as they are (``names.RESCALES``). ``seconds``: by step, ``pause``: in which
        no step was decided."""
        self._recorder.add(RESCALES, outcome=outcome)
        for step, took in seconds.items():
            self._recorder.add(RESCALE_SECONDS, took, step=step)
        self._recorder.add(RESCALE_MOVED_BYTES, moved_bytes)
        changed = f"the optimizer actors have changed; no step was decided for {pause:.2f} s"
        self._happened(changed if outcome == "done" else "a change of the optimizer actors was given up")
        if outcome == "done":
            self._recorder.set(RESCALE_PAUSE_SECONDS, pause)

    async def logged(self, logger: str, sent: int, lost: int) -> None:
        """A logger has taken rows, or refused some (``names.LOGGER_ROWS``)."""
        if lost:
            self._happened(f"{logger} refused {count(lost, 'row')}", bad=True)
        for result, rows in (("sent", sent), ("lost", lost)):
            if rows:
                self._recorder.add(LOGGER_ROWS, rows, logger=logger, result=result)

    async def report(self, reports: Sequence[Report], life: str | None) -> Received:
        """Take a batch of one rank's reports. They are in metrics.jsonl when this returns. Takes none if ``life``, the
        last one of a coordinator that the rank knew (None: none yet), was another: the rank then sends its last reports
        again, first."""
        await self._ready.wait()
        if life not in (None, self._life):
            return Received(self._life)
        new = [report for report in reports if self._heard.is_new(report)]
        self._unread.extend(new)
        for checkpoint in (report.checkpoint for report in new):
            if checkpoint is not None and checkpoint not in self._checkpoints:
                self._checkpoints.add(checkpoint)
                self._happened(f"checkpoint {checkpoint.rpartition('/')[2]}")
        if self._log is not None:
            self._log.add(new)
        self._news.set()
        return Received(self._life, self._passed_on.get(reports[0].rank) if reports else None)

    async def next_reports(self, life: str) -> News:
        """Reports the driver has not had yet; waits until there are some, or ``end_news``. Answers at once if ``life``,
        which the driver knows, was another coordinator's. The driver has then had what the call before returned."""
        if life != self._life:
            return News([], self._life)
        self._passed_on |= self._passing_on
        await self._news.wait()
        if not self._ended:
            self._news.clear()
        unread = list(self._unread)
        self._unread.clear()
        self._passing_on = {report.rank: (report.step, report.number) for report in unread}
        return News(unread, self._life)

    async def rouse(self) -> None:
        """Make ``next_reports`` return now, perhaps with no reports: the driver waits for nothing else that would wake
        it."""
        self._news.set()

    async def end_news(self) -> None:
        """Every loop has ended: make ``next_reports`` return without waiting."""
        self._ended = True
        self._news.set()
