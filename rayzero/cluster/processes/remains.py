"""What a killed process of a run leaves in the shared memory of its host, and who removes it there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import ray

from rayzero.slabs.sweep import SlabJanitor, sweep

_SUCCEEDS_S = 150.0  # until a death is noticed and its successor is up, on a loaded machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What the driver says of them to every process that makes slabs."""

    lineage: str  # of the run's states in shared memory
    driver_node: str  # where the driver's janitor removes them
    needed_s: float  # how long a successor may take to come
    over: str | None = None  # the lineage before, which nobody continues

    @classmethod
    def of_run(cls, lineage: str, driver_node: str, *, replaces: bool, over: str | None = None) -> Remains:
        """Those of a run. ``replaces``: the dead are started again."""
        return cls(lineage=lineage, driver_node=driver_node, needed_s=_SUCCEEDS_S if replaces else 0.0, over=over)

    def janitor(self, share: Path | None) -> SlabJanitor | None:
        """For the calling process, which makes slabs in ``share``, and first removes those of the lineage before. None:
        it needs none on the driver's node, or without shared memory. Raises OSError if it cannot be started."""
        if share is None or ray.get_runtime_context().get_node_id() == self.driver_node:
            return None
        if self.over is not None:
            sweep(share, self.over, is_over=True)
        return SlabJanitor(share, self.lineage, self.needed_s)


def leaving_nothing(remains: Remains | None, share: Path | None) -> AbstractContextManager[object]:
    """A context in which the calling process may make slabs in ``share`` and be killed: see ``Remains.janitor``. None:
    others see to them."""
    janitor = None if remains is None else remains.janitor(share)
    return nullcontext() if janitor is None else janitor
