"""One attempt at one step: the ranks' reports, the futures that wait, and the calls of ranks that are ahead of it;
and owners as the lead asks them.

[Note: a hearing] What a lead that has died knew beyond the records was only in its process. So its successor hears from
every rank how far it was, before it goes on: each rank asks again what it has had no answer to, and gives the history
of its answers (``LeadHistory``). Until all ranks have, the successor takes none of their calls: so it takes no rank for
one that has gone on without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rayzero.concurrency.futures import chain
from rayzero.errors import StepMismatchError, StoreError
from rayzero.protocol.messages import (
    AttemptHistory,
    Decision,
    FileEntry,
    FinishReport,
    LeadHistory,
    Norm,
    NormParts,
    Record,
    StepHistory,
    StepInputs,
    Write,
)


class OwnerPeer(Protocol):
    """An owner as the lead sees it: the lead's own service, or one behind a transport."""

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        """See ``ShardService.collect``."""
        ...

    def apply(self, decision: Decision) -> Future[None]:
        """See ``ShardService.apply``; done when the owner has accepted the decision, not when it has updated."""
        ...

    def redo(self, record: Record) -> Future[None]:
        """See ``ShardService.redo``."""
        ...

    def begin_checkpoint(self, step: int, directory: Path) -> Future[None]:
        """See ``ShardService.begin_checkpoint``."""
        ...

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        """See ``ShardService.write_checkpoint``."""
        ...

    def write(self, number: int, write: Write) -> Future[None]:
        """See ``ShardService.write``."""
        ...

    def trouble(self) -> str | None:
        """Why the owner cannot be asked anything now, for errors about waits; None: nothing is known to be wrong."""
        ...

    def abort(self, error: StoreError) -> None:
        """See ``ShardService.abort``."""
        ...


T = TypeVar("T")

_NAMED = 16  # ranks or owners in a message


@dataclass(eq=False)
class Pass:
    """One norm that all ranks ask for: first that of the averaged gradients, then that after clipping by value."""

    reports: dict[int, FinishReport] = field(default_factory=dict)
    norms: dict[int, Future[Norm]] = field(default_factory=dict)  # each rank's finish
    asked: tuple[Future[NormParts], ...] = ()  # owners, by index
    parts: tuple[NormParts, ...] | None = None
    norm: Norm | None = None


@dataclass(eq=False)
class Attempt:
    """One attempt at one step, until it is decided or every rank has discarded it.

    Knows what each rank has reported, committed or discarded; not owners or decisions."""

    step: int
    passes: list[Pass] = field(default_factory=lambda: [Pass()])  # only the last one may be unanswered
    inputs: dict[int, StepInputs] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)  # of all inputs so far: two, and ranks may not agree
    commits: dict[int, Future[Decision]] = field(default_factory=dict)  # each rank's commit
    discarded: dict[int, int] = field(default_factory=dict)  # rank -> attempt

    @property
    def reports(self) -> dict[int, FinishReport]:
        """What each rank pushed."""
        return self.passes[0].reports

    @property
    def norm(self) -> Norm | None:
        """The norm of the averaged gradients; None if it is not known yet."""
        return self.passes[0].norm

    def commit(self, rank: int, inputs: StepInputs) -> None:
        """A rank has said with what the step is to be decided."""
        self.inputs[rank] = inputs
        self.digests.add(inputs.digest)

    @property
    def gone_on(self) -> set[int]:
        """Ranks that committed or discarded while others wait for their part of the last pass."""
        return (
            (set(self.inputs) | set(self.discarded)) - set(self.passes[-1].reports) if len(self.passes) > 1 else set()
        )

    @property
    def futures(self) -> list[Future[Any]]:
        """Every future that waits for this attempt, or has waited."""
        return [norm for each in self.passes for norm in each.norms.values()] + list(self.commits.values())

    def forget(self, rank: int) -> None:
        """A rank has died: what it reported, committed or discarded counts no more. Owners will be asked for the norm's
        parts again, because another attempt of the rank will count; a norm that is known stays the norm."""
        for each in self.passes:
            each.reports.pop(rank, None)
            each.norms.pop(rank, None)
            each.asked, each.parts = (), None
        self.passes = [each for each in self.passes if each is self.passes[0] or each.reports]
        for what in (self.inputs, self.commits, self.discarded):
            what.pop(rank, None)

    @property
    def to_collect(self) -> Pass:
        """The first pass whose parts the owners have not been asked for, or else the last one."""
        return next((each for each in self.passes if each.parts is None), self.passes[-1])

    @property
    def is_collected(self) -> bool:
        """Whether the owners have answered for every pass."""
        return all(each.parts for each in self.passes)

    def pass_of(self, report: FinishReport) -> Pass:
        """The pass that a report belongs to: the one that it repeats, or the rank's next. Raises StepMismatchError."""
        mine = [each for each in self.passes if report.rank in each.reports]
        if any(each.reports[report.rank] == report for each in mine):
            return next(each for each in mine if each.reports[report.rank] == report)
        if mine and (report.clamp is None or replace(mine[0].reports[report.rank], clamp=report.clamp) != report):
            raise StepMismatchError(
                f"rank {report.rank} finished step {report.step} twice with different counts; a backward between "
                "clip_grad_norm_() and step() cannot be represented: call zero_grad() first"
            )
        if len(mine) == len(self.passes):
            self.passes.append(Pass())
        return self.passes[len(mine)]

    def gone_on_without(self, waiting: frozenset[int]) -> list[int]:
        """Ranks that will not join what the ``waiting`` ranks wait for: they have committed, or wait for a norm that
        the waiting ranks have not finished."""
        tried = set(self.reports) - set(self.discarded)
        stuck = tried if self.norm is None and not waiting <= tried else set()
        return sorted((stuck | set(self.inputs)) - waiting)

    def waits_for(self, world_size: int) -> str:
        """The ranks or owners that the attempt waits for, for errors about waits."""
        for what, seen in (("finished", self.passes[-1].reports), ("committed", self.inputs)):
            missing = [rank for rank in range(world_size) if rank not in seen]
            if missing and not (what == "committed" and self.norm is None):
                return f"{have(missing)} not {what} step {self.step}"
            if what == "finished" and self.passes[-1].norm is None:
                return f"{owing(self.passes[-1].asked)} not answered with the norm of step {self.step}"
        return f"step {self.step} is being decided"


class CallsAhead:
    """Calls for steps that are not open yet: a rank that uses no parameters waits for no other rank and may be ahead.

    Knows steps and the order of the calls; not their content. Only one thread at a time may call it."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, Callable[[], None]]] = []  # rank, step, call

    def wait(self, rank: int, step: int, call: Callable[[], Future[T]]) -> Future[T]:
        """A future of the result of a rank's ``call``, which is made when ``step`` opens."""
        future: Future[T] = Future()
        self._calls.append((rank, step, lambda: chain(call(), future)))
        return future

    def forget(self, rank: int) -> None:
        """A rank has died: drop its calls."""
        self._calls = [each for each in self._calls if each[0] != rank]

    def take(self, step: int) -> list[Callable[[], None]]:
        """Remove and return the calls for ``step``, which opens now."""
        ready = [call for _, at, call in self._calls if at <= step]
        self._calls = [each for each in self._calls if each[1] > step]
        return ready

    def take_all(self) -> list[Callable[[], None]]:
        """Remove and return all calls, by step: no further step will open, or they are made again."""
        calls, self._calls = self._calls, []
        return [call for _, _, call in sorted(calls, key=lambda each: each[1])]


def have(ranks: Sequence[int]) -> str:
    """Which ranks have (done something), for messages."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {_some(ranks)} have"


def owing(asked: Sequence[Future[Any]]) -> str:
    """Which owners have (not answered), for messages. ``asked``: their answers, by owner index."""
    late = [owner for owner, answer in enumerate(asked) if not answer.done()]
    if not late:
        return "owners have"
    return f"optimizer {late[0]} has" if len(late) == 1 else f"optimizers {_some(late)} have"


def _some(numbers: Sequence[int]) -> str:
    """The first numbers, and how many more: every rank that waits gets this text, and a thousand would get a
    thousand. It changes whenever one is done, which counts as progress (store/host/waits.py)."""
    more = len(numbers) - _NAMED
    return f"{list(numbers[:_NAMED])}" + (f" and {more} more" if more > 0 else "")


# ---- a successor: [Note: a hearing] ---------------------------------------------------------------------------------


class Hearing:
    """Which ranks have been heard, and their histories.

    Knows ranks; not what follows from it. Only one thread at a time may call it."""

    def __init__(self) -> None:
        self._histories: dict[int, LeadHistory] = {}
        self._met: set[int] = set()  # ranks that have attached, in their present lives
        self.lasts = False  # ranks' calls wait
        self._over = False

    def meet(self, rank: int, history: LeadHistory | None, *, succeeds: bool = False) -> None:
        """A rank has attached. ``history``: with a former life of the lead; None: it has none. ``succeeds``: there was
        one: if this rank has just begun, others may have a history."""
        self._met.add(rank)
        if (succeeds or history is not None) and not self._over:
            self.lasts = True
        if history is not None and self.lasts:
            self._histories[rank] = history

    def forget(self, rank: int) -> None:
        """A rank has died, and comes back."""
        self._met.discard(rank)
        self._histories.pop(rank, None)

    def missing(self, world_size: int, left: Collection[int]) -> list[int]:
        """The ranks that have not been heard. ``left``: those that will not be."""
        return [rank for rank in range(world_size) if rank not in self._met and rank not in left]

    def end(self, world_size: int, left: Collection[int]) -> dict[int, LeadHistory] | None:
        """Each rank's history, returned once, when all have been heard; None before and after."""
        if not self.lasts or self.missing(world_size, left):
            return None
        self.lasts, self._over = False, True
        return self._histories


def open_steps(step: int, histories: Mapping[int, LeadHistory]) -> dict[int, StepHistory]:
    """Each rank's history of the open step, by rank."""
    return {
        rank: next((each for each in histories[rank].steps if each.step == step), StepHistory(step=step))
        for rank in sorted(histories)
    }


def attempts_of(step: int, histories: Mapping[int, StepHistory]) -> tuple[Attempt, Attempt | None]:
    """The open attempt at a step, and the next one of ranks that have discarded it while others have not.
    ``histories``: by rank."""
    current, following = Attempt(step), None
    over = min((each.discards for each in histories.values()), default=0)  # attempts that every rank has discarded
    for rank, each in histories.items():
        if each.discards == over:
            _put(current, rank, each.attempt)
            continue
        _put(current, rank, each.discarded)
        current.discarded[rank] = each.discarded.reports[0].attempt
        if each.attempt.reports:
            following = following or Attempt(step)
            _put(following, rank, each.attempt)
    return current, following


def _put(into: Attempt, rank: int, attempt: AttemptHistory) -> None:
    """Have an attempt as a rank's history has it."""
    for number, report in enumerate(attempt.reports):
        asked = into.pass_of(report)
        asked.reports[rank] = report
        asked.norms[rank] = Future[Norm]()
        if number < len(attempt.norms):
            asked.norm = attempt.norms[number]
    if attempt.inputs is not None:
        into.commit(rank, attempt.inputs)


def writes_made(histories: Mapping[int, StepHistory]) -> tuple[list[Write], dict[int, int]]:
    """The writes to the open version that are made, because some rank has had the answer; and how many of them each
    rank has asked for."""
    made = max((each.written for each in histories.values()), key=len, default=())
    return list(made), {rank: len(each.written) for rank, each in histories.items()}
