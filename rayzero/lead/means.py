"""Means over ranks: what each rank gives, and the one answer for all, of the same bits."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fractions import Fraction

from rayzero.concurrency.futures import chain
from rayzero.errors import ConfigError, RankLeftError, RayZeroError, StepMismatchError, StoreError
from rayzero.lead.round import have
from rayzero.protocol.messages import MeanInput, quoted

Mean = tuple[float, ...]


@dataclass(eq=False)
class _Call:
    number: int
    given: dict[int, MeanInput] = field(default_factory=dict)  # per rank that asked
    outcome: Future[Mean] = field(default_factory=Future)
    over: bool = False  # the outcome is on its way

    def missing(self, world_size: int) -> list[int]:
        return [rank for rank in range(world_size) if rank not in self.given]


class Means:
    """The means that ranks ask for: the ranks' nth calls belong together.

    Knows numbers and who gave them; not steps or owners. One thread at a time calls it."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}  # by number. freed by: every rank's next call
        self._newest: dict[int, int] = {}  # rank -> number of its last call
        self._forgotten = 0  # the highest number that is no longer kept

    def ask(self, rank: int, number: int, given: MeanInput) -> Future[Mean]:
        """What becomes of a rank's ``number``th call. A repeat changes nothing and has the same answer; raises
        StoreError for one whose answer every rank has had."""
        if number <= self._forgotten:
            raise StoreError(f"rank {rank} repeats call {number} of mean_over_ranks(), whose result is no longer kept")
        call = self._calls.setdefault(number, _Call(number))
        call.given.setdefault(rank, given)
        self._newest[rank] = max(number, self._newest.get(rank, 0))
        mine: Future[Mean] = Future()
        chain(call.outcome, mine)  # a future of its own: a rank that gives up fails nobody else's
        return mine

    def end(self, world_size: int, left: Mapping[int, str]) -> list[tuple[Future[Mean], Mean | RayZeroError]]:
        """The calls whose outcome is known now, each once: the future to settle, and with what. ``left``: rank -> why
        it has left."""
        ended = []
        for call in [call for call in self._calls.values() if not call.over]:
            outcome = _outcome(call, world_size, left)
            if outcome is not None:
                call.over = True
                ended.append((call.outcome, outcome))
        self._forget(world_size)
        return ended

    def _forget(self, world_size: int) -> None:
        """Drop what no rank will ask for again: all have gone on to a later call."""
        oldest = min(self._newest.get(rank, 0) for rank in range(world_size))
        for number in [number for number, call in self._calls.items() if number < oldest and call.over]:
            del self._calls[number]
            self._forgotten = max(self._forgotten, number)

    def end_all(self) -> list[Future[Mean]]:
        """No mean will be made any more: the futures of those that are open."""
        calls = [call for call in self._calls.values() if not call.over]
        for call in calls:
            call.over = True
        return [call.outcome for call in calls]

    def waiting(self) -> list[frozenset[int]]:
        """The ranks that wait in each open call."""
        return [
            frozenset(rank for rank in call.given if self._newest[rank] == call.number)
            for call in self._calls.values()
            if not call.over
        ]

    def waits_for(self, world_size: int) -> str | None:
        """Who is waited for, for messages about waits; None: nobody."""
        call = next((call for call in self._calls.values() if not call.over), None)
        if call is None:
            return None
        first = min(call.given)
        return (
            f"{have(call.missing(world_size))} not made call {call.number} of mean_over_ranks(), which rank {first} "
            f"makes with {call.given[first]}"
        )


def _outcome(call: _Call, world_size: int, left: Mapping[int, str]) -> Mean | RayZeroError | None:
    """What becomes of an open call; None: that is not known yet."""
    error = _misfit(call) or _left(call, world_size, left)
    if error is not None:
        return error
    return None if call.missing(world_size) else _weighted(call.given)


def _weighted(given: Mapping[int, MeanInput]) -> Mean | ConfigError:
    """The means by weight; an error where the weights are 0 in sum."""
    counted = [given[rank] for rank in sorted(given) if given[rank].weight]  # the mean of no samples may well be NaN
    if not counted:
        return no_weight(given[0])
    weights = [each.weight for each in counted]
    return tuple(_mean(values, weights) for values in zip(*(each.values for each in counted), strict=True))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """fp64 sums in rank order over the sum of the weights (> 0). Where one of them overflows, the mean of finite
    values, which is never past the largest of them, comes from exact fractions."""
    total, so_far = 0.0, 0.0
    for value, weight in zip(values, weights, strict=True):
        total += weight
        so_far += weight * value
    if math.isfinite(total) and math.isfinite(so_far):
        return so_far / total
    endless = [value for value in values if not math.isfinite(value)]
    if endless:
        return sum(endless)  # inf, -inf or nan, without what finite values overflow to
    exact = [Fraction(weight) for weight in weights]
    return float(sum(map(operator.mul, exact, map(Fraction, values)), Fraction()) / sum(exact))


def no_weight(given: MeanInput) -> ConfigError:
    """What a mean of nothing raises."""
    return ConfigError(f"mean_over_ranks() of {given}: the weights of all ranks add up to 0, so there is no mean")


def _misfit(call: _Call) -> StepMismatchError | None:
    """Two ranks gave what does not belong together."""
    first = min(call.given)
    ours = call.given[first]
    for rank in sorted(call.given):
        theirs = call.given[rank]
        if (ours.names, ours.shape) != (theirs.names, theirs.shape):
            return StepMismatchError(
                f"call {call.number} of mean_over_ranks(): {_difference(first, ours, rank, theirs)}; every rank must "
                "make the same calls in the same order, with the same names and shapes"
            )
    return None


def _difference(first: int, ours: MeanInput, rank: int, theirs: MeanInput) -> str:
    if not (ours.names and theirs.names):
        return f"rank {first} gave {ours}, rank {rank} gave {theirs}"
    mine, other = set(ours.names), set(theirs.names)
    alone = {first: sorted(mine - other), rank: sorted(other - mine)}
    return ", ".join(f"only rank {who} gave {quoted(names)}" for who, names in alone.items() if names)


def _left(call: _Call, world_size: int, left: Mapping[int, str]) -> RankLeftError | None:
    """A rank is gone that has not called."""
    gone = [rank for rank in call.missing(world_size) if rank in left]
    if not gone:
        return None
    first = min(call.given)
    return RankLeftError(
        f"rank {gone[0]} left ({left[gone[0]]}) before call {call.number} of mean_over_ranks(), which rank {first} "
        f"makes with {call.given[first]}; every rank must call it the same number of times"
    )
