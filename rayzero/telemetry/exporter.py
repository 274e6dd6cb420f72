"""A recorder's measurements as Prometheus reads them: one exporter a process and run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rayzero.errors import ConfigError
from rayzero.telemetry.guard import Guard, Protection
from rayzero.telemetry.http import Page, PageServer, Refused, listen
from rayzero.telemetry.metric import METRICS_PATH, Kind, Metric, Role
from rayzero.telemetry.names import METRICS
from rayzero.telemetry.recorder import Labels, MemoryRecorder


class RecorderCollector(Collector):
    """A recorder's values as prometheus_client's families, read again at every collection.

    Knows metrics and series; not ports. Counters without labels that this role has are 0 before they are counted."""

    def __init__(self, recorder: MemoryRecorder, role: Role) -> None:
        self._recorder = recorder
        self._zeros = [m for m in METRICS if m.kind is Kind.COUNTER and role in m.roles and not (m.labels or m.only)]

    def describe(self) -> Iterable[Family]:
        """Nothing: the metrics are not known yet."""
        return []

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
