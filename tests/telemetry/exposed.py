"""A rank's exporter on a free port of this host, and what exporters serve as Prometheus' own parser reads it."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from rayzero.cluster.processes.process_exporter import LOOPBACK, ExporterSettings
from rayzero.telemetry.metric import Role


def rank_settings(slab_dir: Path) -> ExporterSettings:
    """Rank 0's of the run "demo"."""
    return ExporterSettings(
        run="demo",
        role=Role.RANK,
        who="rank 0",
        index=0,
        node="n",
        host=LOOPBACK,
        port=0,
        slab_dir=slab_dir,
        trace=False,
    )


Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]  # by name and sorted labels


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def series_of(text: str) -> Series:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}
