"""Describes the slabs on this host: which process made each one, and whether it is still alive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that do not look at slabs must not load torch
    from rayzero.slabs.sweep import FoundSlab


def slab_lines(slabs: Sequence[FoundSlab]) -> list[str]:
    """A line for each slab."""
    return [f"{slab.path}: {_size(slab.bytes)}, {_whose(slab)}, {'in use' if slab.alive else 'DEAD'}" for slab in slabs]


def slab_sum(slabs: Sequence[FoundSlab], directory: Path) -> str:
    """Sum up the slabs in one line, which says how to remove those of dead processes."""
    dead = [slab for slab in slabs if not slab.alive]
    said = f"{len(slabs)} in {directory}, {_size(sum(slab.bytes for slab in slabs))}"
    if not dead:
        return said
    return f"{said}; {len(dead)} of dead processes, {_size(sum(s.bytes for s in dead))}: rayzero doctor --sweep"


def dead_run_lines(slabs: Sequence[FoundSlab]) -> list[str]:
    """A line for each run that has lost an owner: whether its shared memory can still be used."""
    from rayzero.store.shm.recovery import assess, dead_runs
    from rayzero.store.shm.signals import available

    if available() is not None:  # no process could share memory here
        return []
    found = [(run.run, assess(run)) for run in dead_runs(slabs)]
    return [f"run {run}: {verdict.outcome}: {verdict.reason}" for run, verdict in found]


def swept(directory: Path) -> list[str]:
    """Remove the slabs of dead processes; returns a line for each, and their sum."""
    from rayzero.slabs.hold import end_hold, held_in
    from rayzero.slabs.sweep import list_slabs, sweep

    runs = dead_run_lines(list_slabs(directory))
    for held in held_in(directory):
        if held.step is not None:  # its janitor has nothing to do any more but to keep it
            end_hold(directory, held.lineage)
    removed = sweep(directory)
    lines = [f"removed {path}: {_size(size)}" for path, size in removed]
    return [
        *runs,
        *lines,
        f"slabs of dead processes removed: {len(removed)}, {_size(sum(size for _, size in removed))}",
    ]


def _whose(slab: FoundSlab) -> str:
    if slab.header is None:
        return "incomplete, or of another version"
    facts = slab.header.facts
    return f"{facts.role} {facts.index} of run {facts.run}, pid {slab.header.pid}"


def _size(size: int) -> str:
    from rayzero.quantities import format_bytes

    return format_bytes(size)
