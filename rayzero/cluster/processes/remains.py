"""What a killed process of a run leaves in the shared memory of its host, and who removes it there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ray

from rayzero.slabs.janitor import SlabJanitor

__all__ = ["Remains"]


_SUCCEEDS_S = 150.0  # until a death is noticed and its successor is up, on a loaded machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What the driver says of them to every process that makes slabs."""

    run: str
    driver_node: str  # where the driver's janitor removes them
    needed_s: float  # how long a successor may take to come

    @classmethod
    def of_run(cls, run: str, driver_node: str, *, replaces: bool) -> Remains:
        """Those of a run. ``replaces``: whoever dies is started again."""
        return cls(run=run, driver_node=driver_node, needed_s=_SUCCEEDS_S if replaces else 0.0)

    def janitor(self, share: Path | None) -> SlabJanitor | None:
        """For the calling process, which makes slabs in ``share``. None: it needs none on the driver's node, or without
        shared memory. Raises OSError if it cannot be started."""
        if share is None or ray.get_runtime_context().get_node_id() == self.driver_node:
            return None
        return SlabJanitor(share, self.run, self.needed_s)
