"""Removes the slabs that a killed process has left on a host where no driver would.

[Note: hosts without a driver] A process that is killed cannot remove its slabs. On the driver's host the driver or its
janitor does (cluster/janitor.py). Each process on another host has a janitor of its own, which waits until no successor
can need the slabs any more, and until no other process of the run has any on that host: those may still be read.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rayzero.concurrency.survivor import Maker, Survivor
from rayzero.slabs.sweep import list_slabs, sweep

__all__ = ["SlabJanitor", "clear_up"]

_LOOK_S = 5.0  # between two looks for other processes of the run


class SlabJanitor:
    """A process's end: starts the janitor, and releases it."""

    def __init__(self, directory: Path, run: str, patience_s: float) -> None:
        """``directory``: of the slabs. ``run``: the name in their headers. ``patience_s``: how long a successor may
        take to come, if this process is killed."""
        self._directory = directory
        self._survivor = Survivor(__name__, str(directory.absolute()), run, str(patience_s), detached=True)

    def close(self) -> None:
        """The process has removed its own slabs. It now removes those that killed ones have left. Idempotent."""
        self._survivor.close()
        sweep(self._directory)


def clear_up(directory: Path, run: str, patience_s: float) -> None:
    """Remove what dead processes of a run have left, once a successor would have come. Returns when nothing is left."""
    if _has_dead(directory, run):
        time.sleep(patience_s)
        sweep(directory)
    while _has_dead(directory, run):
        time.sleep(_LOOK_S)
        sweep(directory)


def _has_dead(directory: Path, run: str) -> bool:
    slabs = [slab for slab in list_slabs(directory) if slab.header is not None and slab.header.facts.run == run]
    return any(not slab.alive for slab in slabs)


def main() -> None:
    """Wait for the maker's death."""
    maker = Maker(sys.argv)
    for _ in maker.told():
        pass
    directory, run, patience_s = maker.arguments
    clear_up(Path(directory), run, float(patience_s))


if __name__ == "__main__":
    main()
