"""The coordinator: one named actor a run, which knows where everything is and how far the run has come.

It is told, it never acts: the driver writes the routing table and the run's state, ranks send their reports, which it
writes to metrics.jsonl, and ``rayzero status`` reads. No training step waits for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import ray

from rayzero.cluster.files.metrics_log import MetricsLog
from rayzero.cluster.processes.exposure import ExposeSettings, Exposure
from rayzero.cluster.processes.heartbeats import Heartbeats
from rayzero.cluster.processes.reports import Report
from rayzero.telemetry.discovery import Target, service_discovery
from rayzero.telemetry.pages import Page
from rayzero.telemetry.recorder import MemoryRecorder

__all__ = [
    "DISCOVERY_PATH",
    "NAMESPACE",
    "Coordinator",
    "Member",
    "Routing",
    "RunLedger",
    "RunState",
    "coordinator_name",
    "this_process",
]

NAMESPACE = "rayzero"
DISCOVERY_PATH = "/sd"  # of the coordinator's exporter: Prometheus' http_sd
REPORTS_KEPT = 10_000  # between two reads of the driver; older ones are dropped, counted in `reports_dropped`


def coordinator_name(run: str) -> str:
    """The name of a run's coordinator actor, in ``NAMESPACE``."""
    return f"{run}/coordinator"


class RunState(StrEnum):
    """Where a run stands. The last three are final."""

    STARTING = "starting"  # processes are placed and started
    RUNNING = "running"  # every rank is in its training loop
    FINISHED = "finished"  # every loop returned
    FAILED = "failed"  # a process failed; the record's `error` says which
    STOPPED = "stopped"  # interrupted by the user

    @property
    def is_open(self) -> bool:
        """Whether the run has not ended."""
        return self in (RunState.STARTING, RunState.RUNNING)


_S = RunState
_MOVES: dict[RunState, frozenset[RunState]] = {
    _S.STARTING: frozenset({_S.RUNNING, _S.FAILED, _S.STOPPED}),
    _S.RUNNING: frozenset({_S.FINISHED, _S.FAILED, _S.STOPPED}),
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.STOPPED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the run, as ``rayzero status`` shows it."""

    who: str  # "rank 0", "optimizer 1"
    pid: int
    node: str  # node id
    host: str  # node address


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where the owners are: index ``k`` is owner ``k``'s address. A change of either makes a new epoch."""

    epoch: int
    addresses: tuple[str, ...]


def this_process(who: str) -> Member:
    """This process, as a member of the run."""
    context = ray.get_runtime_context()
    return Member(who=who, pid=os.getpid(), node=context.get_node_id(), host=ray.util.get_node_ip_address())


class RunLedger:
    """What is known of one run: state, members, routing, each rank's last metrics, checkpoints, unread reports.

    The plain object behind the actor. Knows values; not Ray, files or time zones (times are seconds since 1970)."""

    def __init__(self, run: str, *, started_at: float) -> None:
        self._run = run
        self._started_at = started_at
        self._state = RunState.STARTING
        self._error: str | None = None
        self._members: tuple[Member, ...] = ()
        self._routing = Routing(epoch=0, addresses=())
        self._latest: dict[int, Report] = {}
        self._checkpoints: list[str] = []
        self._unread: deque[Report] = deque()
        self._dropped = 0

    def move(self, state: RunState, error: str | None = None) -> None:
        """Change the run's state; raises ``ValueError`` on a move that cannot happen."""
        if state not in _MOVES[self._state]:
            raise ValueError(f"run {self._run!r} cannot go from {self._state} to {state}")
        self._state, self._error = state, error

    def enlist(self, members: Sequence[Member]) -> None:
        """Set who takes part."""
        self._members = tuple(members)

    def route(self, addresses: Sequence[str]) -> Routing:
        """Set the owners' addresses; a new epoch when they differ from before."""
        if tuple(addresses) != self._routing.addresses:
            self._routing = Routing(epoch=self._routing.epoch + 1, addresses=tuple(addresses))
        return self._routing

    def add(self, reports: Sequence[Report]) -> None:
        """Take a rank's reports, in its order."""
        for report in reports:
            self._latest[report.rank] = report
            if report.checkpoint is not None and report.checkpoint not in self._checkpoints:
                self._checkpoints.append(report.checkpoint)
            self._unread.append(report)
        while len(self._unread) > REPORTS_KEPT:
            self._unread.popleft()
            self._dropped += 1

    def take_unread(self) -> list[Report]:
        """Reports not taken before, in order of arrival."""
        unread, self._unread = list(self._unread), deque()
        return unread

    def describe(self) -> dict[str, Any]:
        """Everything but the unread reports, as JSON-able values."""
        return {
            "run": self._run,
            "state": str(self._state),
            "error": self._error,
            "started_at": self._started_at,
            "members": [asdict(member) for member in self._members],
            "routing": {"epoch": self._routing.epoch, "addresses": list(self._routing.addresses)},
            "metrics": {str(rank): report.metrics for rank, report in sorted(self._latest.items())},
            "checkpoints": list(self._checkpoints),
            "reports_dropped": self._dropped,
        }


class Coordinator:
    """The actor: an event loop around a :class:`RunLedger`. Its calls are short, but for ``next_reports``."""

    def __init__(self, run: str, log: MetricsLog | None) -> None:
        """``log``: where reports are written, by this process alone; None where ranks report to somebody else."""
        self._ledger = RunLedger(run, started_at=time.time())
        self._log = log
        self._heartbeats = Heartbeats()
        self._targets: tuple[Target, ...] = ()  # replaced as a whole: the exporter's thread reads it
        self._exposure: Exposure | None = None
        self._news = asyncio.Event()
        self._ended = False

    async def hello(self) -> Member:
        """Who and where this is."""
        return this_process("coordinator")

    async def expose(self, settings: ExposeSettings) -> Target:
        """Open this process's exporter, which also serves discovery. Raises ConfigError where it has no port."""
        recorder = MemoryRecorder()
        recorder.watch(self._heartbeats.readings)
        page = Page("application/json", lambda: service_discovery(self._targets))
        self._exposure = Exposure(settings, recorder, pages={DISCOVERY_PATH: page})
        return self._exposure.target

    async def beat(self, who: str, update_seconds: float | None) -> None:
        """See :meth:`Heartbeats.beat`."""
        self._heartbeats.beat(who, update_seconds)

    async def move(self, state: RunState, error: str | None = None) -> None:
        """See :meth:`RunLedger.move`."""
        self._ledger.move(state, error)

    async def enlist(
        self, members: Sequence[Member], addresses: Sequence[str], targets: Sequence[Target] = ()
    ) -> Routing:
        """See :meth:`RunLedger.enlist` and :meth:`RunLedger.route`; ``targets``: the exporters that discovery tells of
        from now on."""
        self._ledger.enlist(members)
        self._heartbeats.enlist([member.who for member in members])
        self._targets = tuple(targets)
        return self._ledger.route(addresses)

    async def report(self, reports: Sequence[Report]) -> None:
        """Take a batch of one rank's reports; they are in metrics.jsonl when this returns."""
        if self._log is not None:
            self._log.add(reports)
        self._ledger.add(reports)
        self._news.set()

    async def next_reports(self) -> list[Report]:
        """Reports the driver has not had yet; waits until there are some, or ``end_news``."""
        await self._news.wait()
        if not self._ended:
            self._news.clear()
        return self._ledger.take_unread()

    async def end_news(self) -> None:
        """From now on ``next_reports`` does not wait: every loop has ended."""
        self._ended = True
        self._news.set()

    async def describe(self) -> dict[str, Any]:
        """See :meth:`RunLedger.describe`."""
        return self._ledger.describe() | {"rows_lost": self._log.lost if self._log is not None else 0}
