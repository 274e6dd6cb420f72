"""A rank's exporter on a free port of this host."""

from __future__ import annotations

from pathlib import Path

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
