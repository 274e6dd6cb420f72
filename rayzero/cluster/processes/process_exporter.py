"""Serves one process's metrics as Prometheus reads them: its recorder, its memory and its node's memory."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rayzero.cluster.run import TRACE_PATH
from rayzero.errors import ConfigError
from rayzero.memory.process_memory import (
    LedgerCount,
    give_back_freed,
    heap_use,
    ledger_rest,
    node_limits,
    process_memory,
    without_model,
)
from rayzero.security.clients import Refusals
from rayzero.security.credentials import Credentials
from rayzero.telemetry.metric import METRICS_PATH, Kind, Metric, Role
from rayzero.telemetry.names import (
    HEAP_BYTES,
    HOST_MEMORY_HEADROOM_BYTES,
    HOST_MEMORY_LIMIT_BYTES,
    MEMORY_BYTES,
    METRICS,
    OPTIMIZER_UPDATE_SECONDS,
    PROCESS_MEMORY_BYTES,
    SHM_LIMIT_BYTES,
    SHM_USED_BYTES,
)
from rayzero.telemetry.pages import Guard, Page, Protection, Refused
from rayzero.telemetry.recorder import Labels, MemoryRecorder, Reading
from rayzero.telemetry.scrape import Target, Viewer
from rayzero.telemetry.spans import SpanRing


class RecorderCollector(Collector):
    """A recorder's values as prometheus_client's families, read again at every collection.

    Knows metrics and series; not ports. Counters without labels that this role has are 0 before they are counted."""

    def __init__(self, recorder: MemoryRecorder, role: Role) -> None:
        self._recorder = recorder
        self._zeros = [m for m in METRICS if m.kind is Kind.COUNTER and role in m.roles and not (m.labels or m.only)]

    def collect(self) -> Iterator[Family]:
        """A family for each metric that has series. Counted values are read at one moment, slow sources afterwards."""
        sums: dict[Metric, Mapping[Labels, float]] = {metric: {(): 0.0} for metric in self._zeros}
        counters, histograms = self._recorder.counters(), self._recorder.timings()
        sums |= counters
        sums |= self._recorder.gauges()
        for metric, series in sums.items():
            make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = make(metric.name, metric.help, labels=metric.labels)
            for labels, value in series.items():
                family.add_metric(_values(metric, labels), value)
            yield family
        for metric, timings in histograms.items():
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            bounds = [*map(str, metric.buckets), "+Inf"]
            for labels, timing in timings.items():
                counts = map(float, accumulate(timing.buckets))
                histogram.add_metric(_values(metric, labels), list(zip(bounds, counts, strict=True)), timing.total)
            yield histogram


def _values(metric: Metric, labels: Labels) -> list[str]:
    found = dict(labels)
    return [found[name] for name in metric.labels]


class Exporter:
    """Serves one recorder on ``/metrics``, and other pages, until ``close``; two in a process do not mix."""

    def __init__(
        self,
        recorder: MemoryRecorder,
        role: Role,
        *,
        host: str,
        port: int = 0,
        who: str = "an exporter",
        pages: Mapping[str, Page] | None = None,
        protection: Protection | None = None,
        refused: Refused = lambda reason, client, why: None,
    ) -> None:
        """Listen on ``port`` (0: any free one); ``address`` says where. ``who``: this process's name in messages.
        ``protection``: what is asked of clients; None: nothing. ``refused``: see ``PageServer``.

        Raises ConfigError if the port is not available, or passwords cannot be compared here."""
        from rayzero.telemetry.http import PageServer, listen  # only here: it brings aiohttp

        guard = None if protection is None else Guard(protection)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(RecorderCollector(recorder, role))
        page = Page(CONTENT_TYPE_PLAIN_0_0_4, lambda: generate_latest(registry))
        try:
            listening, self.address = listen(host, port)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise ConfigError(
                f"telemetry of {who} cannot listen on {host}:{port}: {why}; choose other ports "
                "with run.telemetry.port and run.telemetry.exporter_ports (0: any free one)"
            ) from error
        self._server = PageServer(listening, {METRICS_PATH: page} | dict(pages or {}), guard, refused)

    def renew(self, protection: Protection) -> None:
        if self._server.guard is not None:
            self._server.guard.renew(protection)

    def close(self) -> None:
        """Free the port. Idempotent."""
        self._server.close()


LOOPBACK = "127.0.0.1"
BEAT_S = 2.0  # between two heartbeats of a process

_MEASURE_S = 5.0  # a process's pages are counted at most this often: the kernel walks all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterSettings:
    """The settings of one process's exporter."""

    run: str
    role: Role
    who: str  # "rank 0", "optimizer 1", "coordinator"
    index: int | None  # of a rank or an owner
    node: str  # its host's address
    host: str  # to listen on
    port: int  # 0: any free one
    slab_dir: Path  # where this run's slabs are made
    trace: bool  # keep spans from the start, not only on request
    protection: Protection | None = None  # what is asked of clients; None: nothing

    def target(self, address: str) -> Target:
        scheme = "http" if self.protection is None else self.protection.scheme
        return Target(address=address, run=self.run, role=self.role, node=self.node, index=self.index, scheme=scheme)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """What a process shows from now on. None: it shows nothing of the kind."""

    tls: Credentials | None = None  # to owners and ranks
    beside: Credentials | None = None  # the same as the owner beside a rank
    metrics: Protection | None = None
    viewer: Viewer | None = None  # to exporters: what the coordinator's live page reads


class MemorySource:
    """Measures this process's and its node's memory at each scrape. See ``Recorder.watch``.

    Adds to the memory ledger what no other source reports: the process before the run, and the rest of its heap. [Note:
    the ledger]"""

    def __init__(self, slab_dir: Path, recorder: MemoryRecorder) -> None:
        """``recorder``: its other sources report bytes of the heap by purpose."""
        self._slab_dir, self._recorder = slab_dir, recorder
        self._now = self._before = LedgerCount(process_memory(), heap_use(), 0.0)
        self._measured = monotonic()

    def begin_run(self, model_bytes: int) -> None:
        """Take the process's present memory, less ``model_bytes`` of its heap, as its memory before the run."""
        give_back_freed()  # else it would count as the process's for ever
        self._before = without_model(self._before, LedgerCount(process_memory(), heap_use(), 0.0), model_bytes)
        self._measured = -_MEASURE_S  # the next scrape sees both values of the same moment

    def __call__(self) -> Iterator[Reading]:
        now = self._count()
        for kind, size in ledger_rest(self._before, now).items():
            yield Reading(MEMORY_BYTES, size, {"kind": kind, "tier": "ram"})
        for kind in ("rss", "pss", "uss", "shm"):
            yield Reading(PROCESS_MEMORY_BYTES, getattr(now.process, kind), {"kind": kind})
        if now.heap is not None:
            yield Reading(HEAP_BYTES, now.heap.used, {"kind": "used"})
        shm, (limits, headroom) = shutil.disk_usage(self._slab_dir), node_limits()
        yield Reading(SHM_USED_BYTES, shm.used, {})
        yield Reading(SHM_LIMIT_BYTES, shm.total, {})
        yield Reading(HOST_MEMORY_HEADROOM_BYTES, headroom, {})
        for source, limit in limits.items():
            yield Reading(HOST_MEMORY_LIMIT_BYTES, limit, {"source": source})

    def _count(self) -> LedgerCount:
        if monotonic() - self._measured >= _MEASURE_S:
            self._now = LedgerCount(process_memory(), heap_use(), self._told())
            self._measured = monotonic()
        return self._now

    def _told(self) -> float:
        """Bytes of the heap that the recorder's other sources report by purpose."""
        series = self._recorder.gauges(without=self).get(MEMORY_BYTES, {})
        return sum(size for labels, size in series.items() if dict(labels)["tier"] == "ram")


class ProcessExporter(Exporter):
    """One process's exporter and, if there is a coordinator, its heartbeat."""

    def __init__(
        self,
        settings: ExporterSettings,
        recorder: MemoryRecorder,
        *,
        coordinator: Any = None,
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        """Listen; ``target`` has the address. Also serves the recorder's spans; a request makes it keep spans for a
        while.

        ``coordinator``: the actor to which a heartbeat goes every ``BEAT_S``; no answer is waited for. Raises
        ConfigError if the port is not available."""
        if settings.trace:
            recorder.spans.keep()
        super().__init__(
            recorder,
            settings.role,
            host=settings.host,
            port=settings.port,
            who=settings.who,
            pages={TRACE_PATH: Page("application/json", partial(_spans, recorder.spans))} | dict(pages or {}),
            protection=settings.protection,
            refused=Refusals("metrics", recorder).note,
        )
        memory = MemorySource(settings.slab_dir, recorder)
        recorder.watch(memory)
        self.begin_run = memory.begin_run
        self.target = settings.target(self.address)
        self._ended, self._pulse = threading.Event(), None
        if coordinator is not None:
            beat = partial(self._beat, settings, coordinator, recorder)
            self._pulse = threading.Thread(target=beat, name="rayzero-pulse", daemon=True)
            self._pulse.start()

    def _beat(self, settings: ExporterSettings, coordinator: Any, recorder: MemoryRecorder) -> None:
        is_owner = settings.role is Role.OPTIMIZER
        while True:
            worked = recorder.timing(OPTIMIZER_UPDATE_SECONDS).total if is_owner else None
            coordinator.beat.options(max_task_retries=0).remote(settings.who, worked)  # the next one comes soon
            if self._ended.wait(BEAT_S):
                return

    def close(self) -> None:
        """Free the port, end the heartbeat. Idempotent."""
        super().close()
        self._ended.set()
        if self._pulse is not None:
            self._pulse.join()


def _spans(ring: SpanRing) -> bytes:
    ring.ask()
    return json.dumps(ring.recorded().to_json()).encode()
