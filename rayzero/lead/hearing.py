"""A lead's successor hears from every rank how far it was, before it goes on.

What its predecessor knew beyond the records was only in that process. Each rank asks again what it has had no answer
to, and says what it has had an answer to (``Told``). Until all ranks have said it, the successor takes none of their
calls: so it takes no rank for one that has gone on without the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import Future

from rayzero.lead.round import Round
from rayzero.protocol.messages import Norm, Told, ToldAttempt, ToldStep, Write


class Hearing:
    """Which ranks have been heard, and what they have told.

    Knows ranks; not what follows from it. Only one thread at a time may call it."""

    def __init__(self) -> None:
        self._told: dict[int, Told] = {}
        self._met: set[int] = set()  # ranks that have attached, in their present lives
        self.lasts = False  # ranks' calls wait
        self._over = False

    def meet(self, rank: int, told: Told | None, *, succeeds: bool = False) -> None:
        """A rank has attached. ``told``: None: it has told a former life of the lead nothing. ``succeeds``: the lead
        had one: also if this rank, which has just begun, knows nothing of it, the others may."""
        self._met.add(rank)
        if (succeeds or told is not None) and not self._over:
            self.lasts = True
        if told is not None and self.lasts:
            self._told[rank] = told

    def forget(self, rank: int) -> None:
        """A rank has died, and comes back."""
        self._met.discard(rank)
        self._told.pop(rank, None)

    def missing(self, world_size: int, left: Collection[int]) -> list[int]:
        """The ranks that have not been heard. ``left``: those that will not be."""
        return [rank for rank in range(world_size) if rank not in self._met and rank not in left]

    def end(self, world_size: int, left: Collection[int]) -> dict[int, Told] | None:
        """What each rank has told, returned once, when all have been heard; None before and after."""
        if not self.lasts or self.missing(world_size, left):
            return None
        self.lasts, self._over = False, True
        return self._told


def open_steps(step: int, told: Mapping[int, Told]) -> dict[int, ToldStep]:
    """What each rank has told of the open step, by rank."""
    return {
        rank: next((each for each in told[rank].steps if each.step == step), ToldStep(step=step))
        for rank in sorted(told)
    }


def rounds_of(step: int, told: Mapping[int, ToldStep]) -> tuple[Round, Round | None]:
    """The open attempt at a step, and the next one of ranks that have discarded it while others have not. ``told``: by
    rank."""
    current, following = Round(step), None
    over = min((each.discards for each in told.values()), default=0)  # attempts that every rank has discarded
    for rank, each in told.items():
        if each.discards == over:
            _put(current, rank, each.attempt)
            continue
        _put(current, rank, each.discarded)
        current.discarded[rank] = each.discarded.reports[0].attempt
        if each.attempt.reports:
            following = following or Round(step)
            _put(following, rank, each.attempt)
    return current, following


def _put(into: Round, rank: int, attempt: ToldAttempt) -> None:
    """Let a round know what a rank has told of it."""
    for number, report in enumerate(attempt.reports):
        asked = into.pass_of(report)
        asked.reports[rank] = report
        asked.norms[rank] = Future[Norm]()
        if number < len(attempt.norms):
            asked.norm = attempt.norms[number]
    if attempt.inputs is not None:
        into.commit(rank, attempt.inputs)


def writes_made(told: Mapping[int, ToldStep]) -> tuple[list[Write], dict[int, int]]:
    """The writes to the open version that are made, because some rank has had the answer; and how many of them each
    rank has asked for."""
    made = max((each.written for each in told.values()), key=len, default=())
    return list(made), {rank: len(each.written) for rank, each in told.items()}
