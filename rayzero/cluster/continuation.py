"""Whether a run that was killed can be continued from what its processes have left in this host's shared memory.

A run that is killed as a whole leaves shards, the lead's record, gradients and the states of its ranks' loops. A run
that continues it has owners that take all of that over, and ranks in their next life, which begin the open step. If a
rank had not ended the iteration before, all ranks do its end again: they may wait for each other there (a mean, a
checkpoint), and nobody alive has those answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.protocol.messages import AT_COMMIT, AT_FORWARD
from rayzero.protocol.ownership import Ownership, device_owners
from rayzero.quantities import count
from rayzero.slabs.sweep import FoundSlab, list_slabs
from rayzero.store.shm.recovery import DeadRun, Outcome, assess, read_run
from rayzero.store.shm.signals import host_identity, why_no_sharing

_LOOK_S = 0.1  # between two looks at processes that still run


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Where a run has its states: what ``run.json`` says for a run that continues it."""

    lineage: str  # in the header of every slab; a name alone may be another run's
    directory: str  # of the slabs
    memory: str  # ``host_identity``: host, boot, mount and user

    @classmethod
    def in_directory(cls, lineage: str, directory: Path) -> States:
        return cls(lineage=lineage, directory=str(directory), memory=host_identity(directory))


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """A run that would continue another one."""

    directory: Path | None  # of its slabs; None: it shares no memory
    num_workers: int
    num_owners: int  # those beside ranks included

    @classmethod
    def of(cls, zero: ZeroConfig, scaling: ScalingConfig) -> Successor:
        beside = device_owners(scaling.num_workers, zero.host_fraction)
        return cls(
            directory=zero.shared_directory,
            num_workers=scaling.num_workers,
            num_owners=scaling.num_optimizers + beside,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """How a run goes on from memory."""

    step: int  # that is open: as many are decided
    life: int  # of every rank
    repeats: int | None = None  # ``step``, if ranks do the last decided iteration's end again
    ownership: Ownership | None = None  # who owned what, which stays so: it is in the memory; None: nobody knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A run cannot go on from memory."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a run has left in this host's shared memory."""

    run: DeadRun | None  # None: no slab of an owner
    alive: tuple[str, ...] = ()  # processes that still run: "params 0 (pid 4711)"
    models: int = 1  # prepared models


def find_continuation(
    record: Mapping[str, Any], successor: Successor, *, patience_s: float = 0.0
) -> Continuation | Lost:
    """How ``successor`` goes on from the memory of the run with this ``run.json``. Its driver is dead; ``patience_s``:
    how long its other processes may take to follow."""
    states, directory = record.get("states"), successor.directory
    if not isinstance(states, dict):
        return Lost(why="it kept no states in shared memory")
    if directory is None:
        return Lost(why="this run shares no memory")
    if why_no_sharing(directory) is not None or states.get("memory") != host_identity(directory):
        return Lost(why=f"its memory was {states.get('directory')} on another host, or this host has been restarted")
    left = await_left(str(record["run"]), str(states.get("lineage")), directory, patience_s)
    return choose(left, num_workers=successor.num_workers, num_owners=successor.num_owners)


def await_left(run: str, lineage: str, directory: Path, patience_s: float) -> Left:
    """``read_left``, once no process of the run lives, or ``patience_s`` later."""
    until = time.monotonic() + patience_s
    while (left := read_left(run, lineage, directory)).alive and time.monotonic() < until:
        time.sleep(_LOOK_S)
    return left


def choose(left: Left, *, num_workers: int, num_owners: int) -> Continuation | Lost:
    why = next(_refusals(left, num_workers, num_owners), None)
    if why is not None or left.run is None:
        return Lost(why=why or "nothing of it is left")
    step = assess(left.run).version
    return Continuation(
        step=step,
        life=left.run.rank_life + 1,
        repeats=None if all(_begun(left.run, step)) else step,
        ownership=left.run.ownership,
    )


def _refusals(left: Left, num_workers: int, num_owners: int) -> Iterator[str]:
    """Every reason against going on, the most telling first."""
    run = left.run
    if left.alive:
        yield f"processes of it still run: {', '.join(left.alive)}"
    if run is None:
        yield "nothing of it is left in this host's shared memory"
        return
    now, first = run.num_owners - len(run.doors), run.ownership
    began = first.first - first.doors if first is not None else now  # a run that says that wants no others
    if run.world_size != num_workers or num_owners not in (began, now):
        yield (
            f"it had {count(run.world_size, 'rank')} and {count(now, 'optimizer')}, and now there are to be "
            f"{num_workers} and {num_owners}"
        )
    if left.models > 1:
        yield f"its loop prepares {count(left.models, 'model')}, whose steps cannot be repeated alone"
    verdict = assess(run)
    if verdict.outcome is Outcome.REFUSED:
        yield verdict.reason
        return
    if verdict.version <= run.began:
        yield "it had decided no step"
        return
    if not all(_begun(run, verdict.version)):
        lost = [str(rank) for rank, can in enumerate(_ended(run, verdict.version)) if not can]
        if lost:
            yield (
                f"the state of the loop at step {verdict.version} was not kept on {_ranks(lost)}; loops that call "
                "rayzero.track() are kept"
            )


def _ranks(numbers: list[str]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _begun(run: DeadRun, step: int) -> list[bool]:
    return [{(step, AT_COMMIT), (step, AT_FORWARD)} <= _kept(run, rank) for rank in range(run.world_size)]


def _ended(run: DeadRun, step: int) -> list[bool]:
    """By rank: whether its loop can do the end of the iteration before ``step`` again."""
    before = {(step - 1, AT_COMMIT), (step - 1, AT_FORWARD)} if step - 1 > run.began else set()
    return [before | {(step, AT_COMMIT)} <= _kept(run, rank) for rank in range(run.world_size)]


def _kept(run: DeadRun, rank: int) -> frozenset[tuple[int, int]]:
    return run.loops.get(rank, frozenset())


# ---- reading the files


def read_left(run: str, lineage: str, directory: Path) -> Left:
    """What is left of a run in ``directory``. If a process of it lives, what it writes may be missed."""
    found = [slab for slab in list_slabs(directory) if slab.header is not None and _is_of(slab, run, lineage)]
    first = [slab for slab in found if slab.header is not None and slab.header.facts.run == run]
    alive = {
        slab.header.pid: f"{slab.header.facts.role} {slab.header.facts.index} (pid {slab.header.pid})"
        for slab in found
        if slab.alive and slab.header is not None
    }
    names = {slab.header.facts.run for slab in found if slab.header is not None}
    return Left(run=read_run(run, first), alive=tuple(alive[pid] for pid in sorted(alive)), models=len(names))


def what_is_left(run: str, lineage: str, directory: Path) -> Continuation | Lost:
    """How a run with the same counts would go on."""
    left = read_left(run, lineage, directory)
    dead = left.run
    counts = (dead.world_size, dead.num_owners - len(dead.doors)) if dead is not None else (0, 0)
    return choose(left, num_workers=counts[0], num_owners=counts[1])


def _is_of(slab: FoundSlab, run: str, lineage: str) -> bool:
    """Whether it is the run's: of its first prepared model, or of a later one, "RUN model 1"."""
    assert slab.header is not None
    facts = slab.header.facts
    return facts.lineage == lineage and (facts.run == run or facts.run.startswith(f"{run} model "))


def main() -> None:
    """Print the step with which a run goes on (arguments: its name, lineage and directory). Exit code 1: it cannot."""
    found = what_is_left(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    if isinstance(found, Lost):
        sys.exit(1)
    print(found.step)


if __name__ == "__main__":
    main()
