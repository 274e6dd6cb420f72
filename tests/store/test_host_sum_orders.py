"""What is added on a host: every order of the moves of two ranks and their door, with discards and deaths."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rayzero.protocol.messages import FinishReport, ModelSpec, Pushed, Summand
from rayzero.store.host.summed_ranks import SummedRanks
from rayzero.store.shm.settled import GradientBytes, Part, adding_threads, settled
from rayzero.store.shm.shared_plan import SharedPlan

from .toy import make_spec

# ---- one unit in one step, explored whole -----------------------------------------------------------------------

TORN = (-1, -1)  # bytes of which some have changed
LATER_LIFE = 10  # the first attempt of the next one

Bytes = tuple[int, int]  # that are there after a push: (attempt, pushes in it)


@dataclass(frozen=True)
class Memory:
    """What one life of a rank shows to its host."""

    bytes: Bytes = TORN
    stamp: Bytes | None = None  # None: nothing announced yet
    report: Bytes | None = None


@dataclass(frozen=True)
class Rank:
    """One rank's place in its step, and the memory of its lives, the newest first."""

    attempt: int = 0
    pushes: int = 0
    doing: str = "computes"  # "computes", "writes", "finished", "dead"
    lives: tuple[Memory, ...] = (Memory(),)

    def shows(self, **fields: object) -> Rank:
        return replace(self, lives=(replace(self.lives[0], **fields), *self.lives[1:]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sum:
    """What the door adds, or has sent: (rank, life) of each part, and the bytes read so far."""

    summands: tuple[Summand, ...]
    parts: tuple[tuple[int, int], ...] = ()
    bytes: tuple[Bytes, ...] = ()


@dataclass(frozen=True)
class State:
    """A host's ranks, what its door does, and what the owner has."""

    ranks: tuple[Rank, ...] = (Rank(), Rank())
    adding: Sum | None = None
    sent: tuple[Summand, ...] | None = None  # the last of this life of the door
    landed: Sum | None = None
    discards: int = 0
    deaths: int = 0
    decided: bool = False


def parts_of(state: State) -> list[tuple[Part, int]] | None:
    """(part, life) of each rank, as ``SummedRanks`` finds them."""
    found = []
    for number, rank in enumerate(state.ranks):
        for life, memory in enumerate(rank.lives):
            pushed = memory.stamp and Pushed(step=0, attempt=memory.stamp[0], count=memory.stamp[1], presence=b"\1")
            told = memory.report
            report = told and FinishReport(step=0, attempt=told[0], rank=number, counts=(told[1],))
            part = settled(number, 0, 0, 1, pushed or None, report or None)
            if part is not None:
                found.append((part, len(rank.lives) - life))
                break
    return found if len(found) == len(state.ranks) else None


def moves(state: State, most_pushes: int, most_discards: int, most_deaths: int) -> Iterator[State]:
    """Every state that one move leads to. Raises AssertionError for a decision from wrong bytes."""
    for index, rank in enumerate(state.ranks):

        def then(change: Rank, index: int = index, **fields: object) -> State:
            ranks = (*state.ranks[:index], change, *state.ranks[index + 1 :])
            return replace(state, ranks=ranks, **fields)  # type: ignore[arg-type]

        if rank.doing == "computes":
            yield then(replace(rank, doing="finished").shows(report=(rank.attempt, rank.pushes)))
            if rank.pushes < most_pushes:
                yield then(replace(rank, doing="writes").shows(bytes=TORN))
            if rank.pushes and state.discards < most_discards:
                yield then(replace(rank, attempt=rank.attempt + 1, pushes=0), discards=state.discards + 1)
        elif rank.doing == "writes":
            there = rank.attempt, rank.pushes + 1
            yield then(replace(rank, pushes=there[1], doing="computes").shows(bytes=there, stamp=there))
        elif rank.doing == "dead":
            attempt = LATER_LIFE * len(rank.lives)
            yield then(Rank(attempt=attempt, lives=(Memory(), *rank.lives)))
        if rank.doing != "dead" and state.deaths < most_deaths and not state.decided:
            yield then(replace(rank, doing="dead"), deaths=state.deaths + 1)
    if state.deaths < most_deaths and not state.decided and (state.adding or state.sent):
        yield replace(state, adding=None, sent=None, deaths=state.deaths + 1)  # the door
    yield from moves_of_the_door(state)
    if all(rank.doing == "finished" for rank in state.ranks) and not state.decided:
        if state.discards < most_discards:  # after a norm, all of them do
            ranks = tuple(replace(rank, attempt=rank.attempt + 1, pushes=0, doing="computes") for rank in state.ranks)
            yield replace(state, ranks=ranks, discards=state.discards + 1)
        yield from decision(state)


def moves_of_the_door(state: State) -> Iterator[State]:
    if state.decided:
        return
    if state.adding is None:
        found = parts_of(state)
        summands = tuple(part.summand for part, _ in found or ())
        if found is not None and any(each.pushes for each in summands) and summands != state.sent:
            parts = tuple((part.summand.rank, life) for part, life in found if part.summand.pushes)
            yield replace(state, adding=Sum(summands, parts))
    elif len(state.adding.bytes) < len(state.adding.parts):
        rank, life = state.adding.parts[len(state.adding.bytes)]
        read = state.ranks[rank].lives[-life].bytes
        yield replace(state, adding=replace(state.adding, bytes=(*state.adding.bytes, read)))
    else:
        before = state.landed
        newer = before is None or any(
            now[1:] > then[1:] for now, then in zip(state.adding.summands, before.summands, strict=True)
        )
        yield replace(state, adding=None, landed=state.adding if newer else before, sent=state.adding.summands)


def decision(state: State) -> Iterator[State]:
    """The owner decides once it has what the ranks have counted."""
    wanted = [(rank.attempt, rank.pushes) for rank in state.ranks]
    if not any(pushes for _, pushes in wanted):
        yield replace(state, decided=True)
        return
    if state.landed is None:
        return
    has = state.landed.summands
    if all(
        each.pushes == pushes and (not pushes or each.attempt == attempt)
        for each, (attempt, pushes) in zip(has, wanted, strict=True)
    ):
        assert list(state.landed.bytes) == [want for want in wanted if want[1]], state
        yield replace(state, decided=True)


def explore(most_pushes: int, most_discards: int, most_deaths: int) -> tuple[int, int]:
    """(states, those of them from which no order of moves leads to a decision)."""
    begin, before = State(), defaultdict[State, list[State]](list)
    seen, left = {begin}, deque([begin])
    while left:
        state = left.popleft()
        for after in moves(state, most_pushes, most_discards, most_deaths):
            before[after].append(state)
            if after not in seen:
                seen.add(after)
                left.append(after)
    good = {state for state in seen if state.decided}
    left = deque(good)
    while left:
        for earlier in before[left.popleft()]:
            if earlier not in good:
                good.add(earlier)
                left.append(earlier)
    return len(seen), len(seen - good)


@pytest.mark.parametrize(("pushes", "discards", "deaths"), [(2, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 1)])
def test_every_order_of_moves_decides_from_the_bytes_that_were_counted(pushes: int, discards: int, deaths: int) -> None:
    states, stuck = explore(pushes, discards, deaths)
    assert stuck == 0
    assert states > 100


# ---- the decisions by themselves --------------------------------------------------------------------------------


def pushed(count: int, attempt: int = 0, step: int = 3) -> Pushed:
    return Pushed(step=step, attempt=attempt, count=count, presence=b"\3")


def report(count: int, attempt: int = 0) -> FinishReport:
    return FinishReport(step=3, attempt=attempt, rank=1, counts=(9, count))


@pytest.mark.parametrize(
    ("there", "told", "part"),
    [
        (None, None, None),
        (pushed(1), None, None),  # of two that are planned
        (pushed(2), None, (0, 2)),
        (pushed(3), None, (0, 3)),
        (pushed(2, step=2), None, None),
        (pushed(1), report(1), (0, 1)),
        (pushed(2), report(3), None),  # its bytes are there, and not announced yet
        (None, report(1), None),
        (None, report(0), (0, 0)),
        (pushed(2, step=2), report(0), (0, 0)),
        (pushed(2), report(0, attempt=1), (1, 0)),  # discarded
        (pushed(1, attempt=1), report(2), None),  # begun again after its finish
        (pushed(2, attempt=1), report(2), (1, 2)),
        (pushed(2, attempt=1), report(0), (1, 2)),
    ],
)
def test_a_part_is_settled_once_nothing_more_comes(
    there: Pushed | None, told: FinishReport | None, part: tuple[int, int] | None
) -> None:
    found = settled(1, 1, 3, 2, there, told)
    assert (None if found is None else found.summand[1:]) == part


class Told:
    """A life of a rank that has pushed each unit in step 3, and finished step 4 without a push."""

    def __init__(self, rank: int) -> None:
        self.stamps, self.rank = self, rank

    def read(self, unit: int) -> Pushed:
        return pushed(1)

    def reports(self) -> dict[int, FinishReport]:
        counts = {3: (1, 1, 1), 4: (0, 0, 0)}
        return {step: FinishReport(step=step, attempt=0, rank=self.rank, counts=each) for step, each in counts.items()}


def test_a_step_without_a_push_hides_none_before_it(tmp_path: Path) -> None:
    """Its sum may be what the successor of an owner lacks."""
    ranks = SummedRanks(SharedPlan.of(make_spec(2), 2), tmp_path, (0, 1), "a key", "optimizer 2", 1)
    ranks._lives = {rank: [cast(Any, Told(rank))] for rank in (0, 1)}
    found = ranks.settled(1)
    assert found is not None
    assert (found.contribution.step, [each.pushes for each in found.contribution.summands]) == (3, [1, 1])


BF16 = (torch.bfloat16,) * 3


@pytest.mark.parametrize(
    ("spec", "ranks", "gains"),
    [
        (make_spec(), 1, False),
        (make_spec(), 2, True),
        (make_spec(dtypes=BF16), 2, False),
        (make_spec(dtypes=BF16), 3, True),
        (make_spec(dtypes=BF16, accumulation_steps=2), 2, True),
    ],
    ids=["alone", "fp32", "bf16", "bf16-3", "accumulation"],
)
def test_a_sum_gains_where_it_takes_fewer_bytes_than_the_pushes(spec: ModelSpec, ranks: int, gains: bool) -> None:
    assert GradientBytes.of(spec.layout.units, spec.accumulation_steps).sums_gain(ranks) == gains


@pytest.mark.parametrize(
    ("cores", "ranks", "on_gpu", "threads"),
    [(96, 8, False, 1), (96, 8, True, 4), (48, 8, True, 3), (16, 8, True, 1), (4, 8, True, 1), (2, 1, True, 1)],
)
def test_a_rank_adds_with_cores_that_nobody_computes_with(cores: int, ranks: int, on_gpu: bool, threads: int) -> None:
    assert adding_threads(cores, ranks, on_gpu=on_gpu) == threads
