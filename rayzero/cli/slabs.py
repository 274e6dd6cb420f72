"""Slabs on this host, for people: whose they are, and which have lost their maker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a command that does not look at slabs does not load torch
    from rayzero.slabs.slab import FoundSlab


def slab_lines(slabs: Sequence[FoundSlab]) -> list[str]:
    """One line each."""
    return [f"{slab.path}: {_size(slab.bytes)}, {_whose(slab)}, {'in use' if slab.alive else 'DEAD'}" for slab in slabs]


def slab_sum(slabs: Sequence[FoundSlab], directory: Path) -> str:
    """All of them in one line, with what to do about the dead."""
    dead = [slab for slab in slabs if not slab.alive]
    said = f"{len(slabs)} in {directory}, {_size(sum(slab.bytes for slab in slabs))}"
    if not dead:
        return said
    return f"{said}; {len(dead)} of dead processes, {_size(sum(s.bytes for s in dead))}: rayzero doctor --sweep"


def dead_run_lines(slabs: Sequence[FoundSlab]) -> list[str]:
    """One line for each run that has lost an owner: what its shared memory is still good for."""
    from rayzero.store.shm.recovery import assess, dead_runs
    from rayzero.store.shm.signals import available

    if available() is not None:  # nobody shared memory here
        return []
    found = [(run.run, assess(run)) for run in dead_runs(slabs)]
    return [f"run {run}: {verdict.outcome}: {verdict.reason}" for run, verdict in found]


def swept(directory: Path) -> list[str]:
    """Remove the slabs of dead processes: one line each, and their sum."""
    from rayzero.slabs.slab import list_slabs, sweep

    runs = dead_run_lines(list_slabs(directory))
    removed = sweep(directory)
    lines = [f"removed {path}: {_size(size)}" for path, size in removed]
    return [
        *runs,
        *lines,
        f"slabs of dead processes removed: {len(removed)}, {_size(sum(size for _, size in removed))}",
    ]


def _whose(slab: FoundSlab) -> str:
    if slab.header is None:
        return "not filled, or of another version"
    facts = slab.header.facts
    return f"{facts.role} {facts.index} of run {facts.run}, pid {slab.header.pid}"


def _size(size: int) -> str:
    from rayzero.quantities import format_bytes

    return format_bytes(size)
