"""Removes the slabs that a killed process has left on a host where no driver would.

[Note: hosts without a driver] A process that is killed cannot remove its slabs. On the driver's host the driver or its
janitor does (cluster/janitor.py). Each process on another host has a janitor of its own, which waits until no successor
can need the slabs any more, and until no other process of the run has any on that host: those may still be read.

[Note: slabs that are awaited] Between a death and its successor, a host may have no process of the run, but others'
sweeps have to leave its slabs alone. So a janitor holds them (slabs/hold.py) from its start until its patience is over;
on the driver's host the driver's janitor does.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType

from rayzero.concurrency.survivor import Maker, Survivor
from rayzero.slabs.hold import Hold, hold_or_none
from rayzero.slabs.sweep import list_slabs, sweep

__all__ = ["SlabJanitor", "clear_up"]

_LOOK_S = 5.0  # between two looks for other processes of the run


class SlabJanitor:
    """A process's end: starts the janitor, and releases it. Leaving the ``with`` block closes it."""

    def __init__(self, directory: Path, lineage: str, patience_s: float) -> None:
        """``directory``: of the slabs. ``lineage``: in their headers. ``patience_s``: how long a successor may take to
        come, if this process is killed; 0: there is none. Raises OSError."""
        self._directory, self._lineage = directory, lineage
        self._survivor = Survivor(__name__, str(directory.absolute()), lineage, str(patience_s), detached=True)

    def close(self) -> None:
        """The process has removed its own slabs. It now removes those that killed ones of its run have left, unless a
        janitor still holds them for a successor. Idempotent."""
        self._survivor.close()
        sweep(self._directory, self._lineage)

    def __enter__(self) -> SlabJanitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def clear_up(directory: Path, lineage: str, patience_s: float, hold: Hold | None = None) -> None:
    """Remove what dead processes of a run have left, once a successor would have come. Returns when nothing is left.
    ``hold``: keeps it until then; freed here."""
    if _has_dead(directory, lineage):
        time.sleep(patience_s)
    if hold is not None:
        hold.close()
    sweep(directory, lineage)
    while _has_dead(directory, lineage):
        time.sleep(_LOOK_S)
        sweep(directory, lineage)


def _has_dead(directory: Path, lineage: str) -> bool:
    dead = [slab.header for slab in list_slabs(directory) if not slab.alive]
    return any(header is not None and header.facts.lineage == lineage for header in dead)


def main() -> None:
    """Wait for the maker's death."""
    maker = Maker(sys.argv)
    directory, lineage, patience_s = Path(maker.arguments[0]), maker.arguments[1], float(maker.arguments[2])
    hold = hold_or_none(directory, lineage) if patience_s else None
    try:
        for _ in maker.told():
            pass
        clear_up(directory, lineage, patience_s, hold)
    finally:
        if hold is not None:
            hold.close()


if __name__ == "__main__":
    main()
