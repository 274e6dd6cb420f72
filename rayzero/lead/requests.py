"""What all ranks request together beside their steps, at the lead. A user's writes to parameters and optimizer states:
made once every rank has requested the same write. Means over ranks, which have the same bits on all."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fractions import Fraction

from rayzero.concurrency.futures import chain, settled
from rayzero.errors import ConfigError, RankLeftError, RayZeroError, StateLostError, StepMismatchError
from rayzero.layout.model_layout import ModelLayout
from rayzero.lead.attempt import have, owing
from rayzero.protocol.messages import COMPUTE, MASTER, MEANS_KEPT, GivenMean, MeanInput, Write, quoted


@dataclass(eq=False)
class _WriteRequest:
    write: Write
    number: int
    futures: dict[int, Future[None]] = field(default_factory=dict)  # per rank that asked
    begun: bool = False
    asked: tuple[Future[None], ...] = ()  # owners, by index


class WriteRequests:
    """The write that ranks request, one at a time.

    Knows which rank requested what; not steps or owners. Only one thread at a time may call it."""

    def __init__(self) -> None:
        self._asked: _WriteRequest | None = None
        self._version = -1  # the version of the latest write
        self._made: list[Write] = []  # writes to that version
        self._asked_by: dict[int, int] = {}  # rank -> how many of them it has asked for

    def ask(self, rank: int, write: Write, layout: ModelLayout) -> Future[None]:
        """Note a rank's request. Raises StepMismatchError, naming both ranks, if another one requested something
        else."""
        self._enter(write.version)
        if self._is_made(rank, write):
            return settled(None)
        self._asked_by[rank] = len(self._made) + 1
        if self._asked is None:
            self._asked = _WriteRequest(write, len(self._made) + 1)
        asked = self._asked
        if write != asked.write or rank in asked.futures:
            raise _disagreement(rank, write, min(asked.futures, default=rank), asked.write, layout)
        return asked.futures.setdefault(rank, Future())

    def _is_made(self, rank: int, write: Write) -> bool:
        """Whether a write is one that was made after those which the rank has asked for. (A rank that has come back
        does not ask for what it finds published.)"""
        before = self._asked_by.get(rank, 0)
        if write not in self._made[before:]:
            return False
        self._asked_by[rank] = self._made.index(write, before) + 1
        return True

    def know(self, rank: int, write: Write) -> list[Future[None]]:
        """A rank has found what a write makes published: it is made, though a former life of the lead may have died
        before it said so. Returns the futures of the ranks that wait for it."""
        self._enter(write.version)
        if self._is_made(rank, write):
            return []
        self._asked_by[rank] = len(self._made) + 1
        asked = self._asked
        if asked is None or asked.write != write:
            self._made.append(write)
            return []
        return [] if asked.begun else self._made_now(asked)

    def _enter(self, version: int) -> None:
        if version != self._version:
            self._version, self._made, self._asked_by = version, [], {}

    def _made_now(self, asked: _WriteRequest) -> list[Future[None]]:
        self._asked = None
        self._made.append(asked.write)
        return list(asked.futures.values())

    def go_on(self, version: int, made: list[Write], asked_by: dict[int, int]) -> None:
        """Begin with what a former life of the lead has made. ``asked_by``: how many of them each rank has asked for
        and had."""
        self._version, self._made, self._asked_by = version, made, asked_by

    def forget(self, rank: int) -> None:
        """A rank has died: it will ask for the version's writes again."""
        self._asked_by.pop(rank, None)
        if self._asked is not None:
            self._asked.futures.pop(rank, None)
            if not self._asked.futures and not self._asked.begun:
                self._asked = None

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that wait for a write."""
        return frozenset(self._asked.futures) if self._asked is not None else frozenset()

    @property
    def making(self) -> bool:
        """Whether owners make the write now."""
        return self._asked is not None and self._asked.begun

    def begin(self, world_size: int) -> tuple[int, Write] | None:
        """(number, write) once all ranks have requested it; returned only once. Writes to one version are numbered from
        1."""
        asked = self._asked
        if asked is None or asked.begun or len(asked.futures) < world_size:
            return None
        asked.begun = True
        return asked.number, asked.write

    def sent(self, owners: tuple[Future[None], ...]) -> None:
        """The write was sent to the owners. ``owners``: their answers, by index."""
        if self._asked is not None:
            self._asked.asked = owners

    def end(self) -> list[Future[None]]:
        """The write is done, or will never be; returns the futures of the ranks that requested it."""
        asked = self._asked
        if asked is not None and asked.begun:
            return self._made_now(asked)
        self._asked = None
        return list(asked.futures.values()) if asked is not None else []

    def describe(self, layout: ModelLayout) -> str:
        """A description of who requested what."""
        return f"{have(sorted(self.ranks))} {self.action(layout)}"

    def action(self, layout: ModelLayout) -> str:
        """A description of the requested write."""
        assert self._asked is not None
        write = self._asked.write
        return f"written to {_what(write, layout)} at step {write.version}"

    def waits_for(self, layout: ModelLayout, world_size: int) -> str:
        """The ranks or owners that the write waits for, for errors about waits."""
        missing = [rank for rank in range(world_size) if rank not in self.ranks]
        owners = () if self._asked is None else self._asked.asked
        return f"{self.describe(layout)}, {have(missing) if missing else owing(owners)} not"


def _what(write: Write, layout: ModelLayout) -> str:
    of = {COMPUTE: "", MASTER: "the masters of "}.get(write.kind, f"{write.kind} of ")
    return f"{of}{layout.units[write.unit].name!r}"


def _disagreement(rank: int, ours: Write, other: int, theirs: Write, layout: ModelLayout) -> StepMismatchError:
    both, step = f"rank {other} wrote to {_what(theirs, layout)}", f"at step {ours.version}"
    what = "other values" if _what(ours, layout) == _what(theirs, layout) else f"to {_what(ours, layout)}"
    return StepMismatchError(
        f"{both} and rank {rank} wrote {what} {step}; every rank must write the same values to the same parameters"
    )


Mean = tuple[float, ...]


@dataclass(eq=False)
class _Call:
    number: int
    given: dict[int, MeanInput] = field(default_factory=dict)  # per rank that asked
    forms: set[tuple[tuple[str, ...], tuple[int, ...]]] = field(default_factory=set)  # (names, shape) of all of these
    waits: set[int] = field(default_factory=set)  # those of them that have made no later call
    outcome: Future[Mean] = field(default_factory=Future)
    over: bool = False  # the outcome is being sent

    def give(self, rank: int, given: MeanInput) -> None:
        """A rank's part; a repeat changes nothing."""
        if rank not in self.given:
            self.given[rank] = given
            self.forms.add((given.names, given.shape))

    def missing(self, world_size: int) -> list[int]:
        return [rank for rank in range(world_size) if rank not in self.given]


class Means:
    """The means that ranks request: the ranks' nth calls belong together.

    Knows numbers and who gave them; not steps or owners. Only one thread at a time may call it."""

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}  # by number. freed by: every rank's next call
        self._newest: dict[int, int] = {}  # rank -> number of its last call
        self._forgotten = 0  # the highest number that is no longer kept

    def ask(self, rank: int, number: int, given: MeanInput) -> Future[Mean]:
        """A future of the result of a rank's ``number``th call. A repeat changes nothing and gets the same result.
        Raises StateLostError for one that is no longer kept."""
        if number <= self._forgotten:
            raise StateLostError(
                f"rank {rank} repeats call {number} of mean_over_ranks(), whose result is no longer kept: those of the "
                f"last {MEANS_KEPT} calls are; resume the run from its newest checkpoint"
            )
        call = self._calls.setdefault(number, _Call(number))
        call.give(rank, given)
        newest = self._calls.get(self._newest.get(rank, 0))
        if newest is not None and newest.number < number:
            newest.waits.discard(rank)
        if number >= self._newest.get(rank, 0):
            call.waits.add(rank)
        self._newest[rank] = max(number, self._newest.get(rank, 0))
        mine: Future[Mean] = Future()
        chain(call.outcome, mine)  # a separate future, so that a rank that gives up does not fail the others'
        return mine

    def go_on(self, given: Mapping[int, Sequence[GivenMean]]) -> None:
        """Begin with the last calls that ranks made in a former life of the lead, by rank. What a rank gave to those
        before, nobody knows."""
        self._forgotten = max((min(each.number for each in calls) for calls in given.values() if calls), default=1) - 1
        for rank, calls in given.items():
            for each in calls:
                self.know(rank, each.number, each.given)

    def know(self, rank: int, number: int, given: MeanInput) -> None:
        """What a rank gave to a call: a former life of the lead heard it, or a former life of the rank gave it. It does
        not wait there: if it has had no answer, it asks again."""
        if number > self._forgotten:
            self._calls.setdefault(number, _Call(number)).give(rank, given)

    def forget(self, rank: int) -> None:
        """A rank has died: what it gave to means that are not made yet counts no more."""
        for call in self._calls.values():
            if not call.over:
                call.given.pop(rank, None)
                call.waits.discard(rank)
        self._calls = {number: call for number, call in self._calls.items() if call.over or call.given}
        self._newest[rank] = max((number for number, call in self._calls.items() if call.over), default=0)

    def end(self, world_size: int, left: Mapping[int, str]) -> list[tuple[Future[Mean], Mean | RayZeroError]]:
        """The calls whose outcome is now known, each returned once, as (future, result or error). ``left``: rank -> why
        it has left."""
        ended = []
        for call in [call for call in self._calls.values() if not call.over]:
            outcome = _outcome(call, world_size, left)
            if outcome is not None:
                call.over = True
                ended.append((call.outcome, outcome))
        if ended:
            self._forget(world_size)
        return ended

    def _forget(self, world_size: int) -> None:
        """Drop results that no rank will ask for again: all have made many later calls. (A rank that comes back asks
        for those of its last step again.)"""
        oldest = min(self._newest.get(rank, 0) for rank in range(world_size)) - MEANS_KEPT
        for number in [number for number, call in self._calls.items() if number < oldest and call.over]:
            del self._calls[number]
            self._forgotten = max(self._forgotten, number)

    def end_all(self) -> list[Future[Mean]]:
        """No further mean will be computed: returns the futures of the open ones."""
        calls = [call for call in self._calls.values() if not call.over]
        for call in calls:
            call.over = True
        return [call.outcome for call in calls]

    def waiting(self) -> list[frozenset[int]]:
        """The ranks that wait in each open call."""
        return [there for call in self._calls.values() if (there := self._waiting_in(call))]

    def _waiting_in(self, call: _Call) -> frozenset[int]:
        return frozenset() if call.over else frozenset(call.waits)

    def waits_for(self, world_size: int) -> str | None:
        """The ranks that open means wait for, for errors about waits; None if no mean waits."""
        call = next((call for call in self._calls.values() if self._waiting_in(call)), None)
        if call is None:
            return None
        first = min(call.given)
        return (
            f"{have(call.missing(world_size))} not made call {call.number} of mean_over_ranks(), which rank {first} "
            f"makes with {call.given[first]}"
        )


def _outcome(call: _Call, world_size: int, left: Mapping[int, str]) -> Mean | RayZeroError | None:
    """The outcome of an open call; None if it is not known yet."""
    error = (_misfit(call) if len(call.forms) > 1 else None) or (_left(call, world_size, left) if left else None)
    if error is not None:
        return error
    return None if len(call.given) < world_size else _weighted(call.given)


def _weighted(given: Mapping[int, MeanInput]) -> Mean | ConfigError:
    """The weighted means, or an error if all weights are 0."""
    counted = [given[rank] for rank in sorted(given) if given[rank].weight]  # the mean of no samples may well be NaN
    if not counted:
        return given[0].no_weight()
    weights = [each.weight for each in counted]
    return tuple(_mean(values, weights) for values in zip(*(each.values for each in counted), strict=True))


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """The fp64 sum in rank order over the sum of the weights (> 0). If a sum of finite values overflows, the mean,
    which is never larger than the largest value, is computed with exact fractions."""
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


def _misfit(call: _Call) -> StepMismatchError | None:
    """The error if two ranks gave different names or shapes."""
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
    """The error if a rank left before it made the call."""
    gone = [rank for rank in call.missing(world_size) if rank in left]
    if not gone:
        return None
    first = min(call.given)
    return RankLeftError(
        f"rank {gone[0]} left ({left[gone[0]]}) before call {call.number} of mean_over_ranks(), which rank {first} "
        f"makes with {call.given[first]}; every rank must call it the same number of times"
    )
