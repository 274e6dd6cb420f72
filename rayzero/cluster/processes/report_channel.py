"""Sends what a rank's training loop reports: numbers to Prometheus, everything to the coordinator.

A report is queued at once and sent in order by a thread; no step waits for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rayzero.cluster.processes.coordinator import Received
from rayzero.cluster.run import Report
from rayzero.engine.loop.reports import LoopReport, RecentReports
from rayzero.errors import StoreClosedError
from rayzero.telemetry.names import MAX_REPORTED, REPORTED, TRAIN_LOSS
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)


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

    def send(self, batch: list[Report]) -> None:
        """Send a batch; blocks until the coordinator has it. See [Note: another coordinator]."""
        received = self._ask(batch, self._life)
        while self._life is not None and received.life != self._life:
            self._life = received.life
            first = batch[0].step, batch[0].number
            lately = [self._report_of(made) for made in self._recent.made if (made.step, made.number) < first]
            received = self._ask([*lately, *batch], self._life)
        self._life = received.life
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
