"""A rank of ``run_ranks``: its number, what its context says, and how its loop ends."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.errors import RankLeftError
from rayzero.protocol.store import ParameterStore
from rayzero.telemetry.recorder import MemoryRecorder, Recorder

T = TypeVar("T")
Loop = Callable[[RankContext], T]
Connect = Callable[[int, Recorder, int], ParameterStore]  # (rank, recorder, number of the model) -> its store
LivingConnect = Callable[[int, Recorder, int, int], ParameterStore]  # the same, and how often the rank has died


class Killed(BaseException):
    """Raise it in a rank that is a thread: the rank dies as a process dies that is killed, without a word to anyone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank's number, and what its context says."""

    rank: int
    world_size: int
    run: str
    lineage: str  # of the run's states in shared memory
    config: ZeroConfig | None
    resume: Path | None
    run_dir: Path | None
    threads: int

    def context(self, connect: LivingConnect, ending: Ending, life: int) -> RankContext:
        recorder = MemoryRecorder()
        context = RankContext(
            rank=self.rank,
            world_size=self.world_size,
            life=life,
            run=self.run,
            lineage=self.lineage,
            run_dir=self.run_dir,
            resume=self.resume,
            config=self.config,
            recorder=recorder,
        )
        context.connect = partial(_connected, context, connect, ending)
        return context


@dataclass(slots=True)
class Ending:
    """Why ranks may no longer connect, once one has failed."""

    reason: str | None = None


def _connected(context: RankContext, connect: LivingConnect, ending: Ending, model: int) -> ParameterStore:
    """A store that closes with its rank's context, because another rank's failure may close the context while
    prepare() runs."""
    store = connect(context.rank, context.recorder, model, context.life)
    context.on_close(store.close)
    if ending.reason is not None:  # the context was closed before the store existed
        store.close(ending.reason)
    return store


@dataclass(slots=True)
class RankResult:
    """How one rank ended: with a result, or with an error and its traceback."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    trace: str = ""

    def name_rank(self) -> BaseException:
        """The error, with a note that names the rank, and with the traceback if the error has lost its own."""
        assert self.error is not None
        lost = self.trace and self.error.__traceback__ is None
        self.error.add_note(f"on rank {self.rank}" + (f":\n{self.trace}" if lost else ""))
        return self.error


def outcome_of(fn: Loop[Any], context: RankContext) -> RankResult:
    """Run the loop in its context. The outcome has its result, or the error that it raised."""
    outcome = RankResult(context.rank)
    try:
        outcome.result = fn(context)
    except BaseException as exc:  # run_ranks raises it again
        outcome.error, outcome.trace = exc, traceback.format_exc()
    return outcome


def results_of(outcomes: Sequence[RankResult]) -> list[Any]:
    """The results by rank; ``outcomes``: in the order in which loops ended. Raises the first error: one that says that
    a rank has left only if there is no other, because that rank may leave before its own error is noted."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in sorted(failed, key=lambda outcome: isinstance(outcome.error, RankLeftError)):
        raise outcome.name_rank()
    return [outcome.result for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]
