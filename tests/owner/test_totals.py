"""The gradients of several ranks are added up once, into a total; from then on nobody needs them one by one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from store.toy import WAIT, Grads, make_spec, random_grads

from owner.owner import Owner, owner_of
from rayzero.errors import AccumulationError, StepMismatchError
from rayzero.kernels import Squares, choose_squares
from rayzero.kernels.rank_sum import RankSum
from rayzero.owner.gradients import contributions
from rayzero.owner.gradients.landing import RoundLanding
from rayzero.protocol.gradient_sum import total_word
from rayzero.protocol.messages import ATTEMPTS, Clamp, FinishReport, ModelSpec


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard is added up as soon as every rank has pushed it, however small."""
    monkeypatch.setattr(contributions, "EARLY", 1)


def of_ranks(spec: ModelSpec, seed: int = 0) -> list[Grads]:
    return [random_grads(spec, 10 * seed + rank) for rank in range(spec.world_size)]


def held(owner: Owner) -> int:
    """Bytes of pushes that are not in totals."""
    ranks = owner.service._attached().contributions.ranks.values()
    landings = [landing for rank in ranks for landing in rank.landings.values() if isinstance(landing, RoundLanding)]
    found = [each.gradient for landing in landings for each in landing.pushes.each]
    return sum(each.nbytes for each in found if isinstance(each, torch.Tensor))


def sum_of(owner: Owner, shard: int, grads: Sequence[Grads]) -> torch.Tensor:
    parts = [owner.part(shard, each) for each in grads]
    return RankSum(parts[0].numel()).sum(parts, range(len(parts)), 0, parts[0].numel())


def test_norm_parts_are_those_of_the_ranks_gradients_and_a_clamp_squares_the_total() -> None:
    spec = make_spec(3)
    grads = of_ranks(spec)
    clamp = Clamp(scale=1 / 3, limit=0.5)
    for wanted in (None, clamp):
        with owner_of(spec) as owner:
            for rank, mine in enumerate(grads):
                owner.push(rank, mine)
            owner.drain()
            counts = (1,) * len(spec.layout.units)
            reports = tuple(FinishReport(step=0, attempt=0, rank=r, counts=counts, clamp=wanted) for r in range(3))
            found = {part[:2]: part[2] for part in owner.service.collect(0, reports).result(WAIT).parts}
            squares = choose_squares(owner.service.kernel)
            for shard in spec.layout.shards:
                parts = [owner.part(shard.index, each) for each in grads]
                for part in owner.service.shard(shard.index).slices:
                    [expected] = squares.parts(parts, range(3), [(part.start, part.stop)], wanted)
                    assert found[shard.index, part.slot] == expected


def test_a_second_push_that_was_not_planned_is_refused() -> None:
    with owner_of(make_spec(2)) as owner:
        owner.push(0, of_ranks(owner.spec)[0])
        with pytest.raises(AccumulationError, match=r"gradient memory \(that of several ranks\) holds one push"):
            owner.push(0, of_ranks(owner.spec)[0], seq=1)


def test_what_one_rank_alone_discards_after_it_was_added_up_ends_the_step_by_name() -> None:
    spec = make_spec(2)
    grads = of_ranks(spec)
    with owner_of(spec) as owner:
        for rank in range(2):
            owner.push(rank, grads[rank])
        owner.drain()
        owner.push(0, random_grads(spec, 77), attempt=1)
        collected = owner.service.collect(0, owner.reports(attempts=[1, 0]))
        with pytest.raises(StepMismatchError, match=r"call zero_grad\(\) on every rank or on none"):
            collected.result(WAIT)


def test_nothing_is_added_up_while_owners_change_and_all_of_it_after_that() -> None:
    spec = make_spec(2)
    grads = of_ranks(spec)
    with owner_of(spec) as owner:
        owner.push(0, grads[0])
        owner.service.settled().result(WAIT)
        owner.push(1, grads[1])
        collected = owner.collect()
        owner.drain()
        assert held(owner) > 0
        assert not collected.done()
        owner.service.go_on()
        collected.result(WAIT)
        assert held(owner) == 0


# ---- rounds


def rounds_of(spec: ModelSpec) -> list[list[Grads]]:
    """Of each round, the gradients of each rank."""
    return [of_ranks(spec, seed) for seed in range(spec.accumulation_steps)]


def require_rounds(owner: Owner, rounds: Sequence[Sequence[Grads]]) -> None:
    """Every shard's total has the rounds, each summed over ranks first."""
    for shard in range(len(owner.spec.layout.shards)):
        owned = owner.service.shard(shard)
        sums = [sum_of(owner, shard, grads).clone() for grads in rounds]
        expected = functools.reduce(torch.add, sums)
        assert owned.total is not None
        for part in owned.slices:
            assert torch.equal(owned.total[part.start : part.stop], expected[part.start : part.stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 9, 17])
@pytest.mark.parametrize("steps", [1, 3])
def test_rounds_are_added_one_after_the_other_and_each_frees_what_ranks_pushed(
    steps: int, world: int, dtype: torch.dtype
) -> None:
    spec = make_spec(world, dtypes=(dtype,) * 3, accumulation_steps=steps)
    rounds = rounds_of(spec)
    with owner_of(spec) as owner:
        for seq, grads in enumerate(rounds):
            for rank, mine in enumerate(grads):
                assert (held(owner) > 0) is (rank > 0)
                owner.push(rank, mine, seq=seq)
                owner.drain()
            assert held(owner) == 0
            require_rounds(owner, rounds[: seq + 1])
        owner.collect(pushes=steps).result(WAIT)


def test_a_parameter_that_only_some_rounds_have_is_their_sum_alone() -> None:
    """Whatever lay in the total before."""
    spec = make_spec(2, accumulation_steps=2)
    first, second = rounds_of(spec)
    name = spec.layout.units[1].slots[1].name
    lacking = [{key: value for key, value in grads.items() if key != name} for grads in first]
    with owner_of(spec) as owner:
        for owned in (owner.service.shard(shard.index) for shard in spec.layout.shards):
            assert owned.total is not None
            owned.total.fill_(7.0)
        for seq, grads in enumerate((lacking, second)):
            for rank, mine in enumerate(grads):
                owner.push(rank, mine, seq=seq)
            owner.drain()
        for shard in spec.layout.shards_by_unit[1]:
            owned, expected = owner.service.shard(shard.index), sum_of(owner, shard.index, second)
            assert owned.total is not None
            for part in owned.slices:
                if part.slot == 1:
                    assert torch.equal(owned.total[part.start : part.stop], expected[part.start : part.stop])


class Watched:
    """Squares, and how many sums of squares of what are asked for: of ranks' gradients, or of a total alone."""

    def __init__(self, squares: Squares) -> None:
        self._squares, self.of = squares, list[str]()

    def parts(self, gradients: Any, *args: Any, **options: Any) -> list[float]:
        self.of.append("total" if len(gradients) == 1 else "round")
        return self._squares.parts(gradients, *args, **options)


@pytest.mark.parametrize(("pushes", "squared"), [(2, "total"), (3, "round"), (4, "round")])
def test_only_the_last_round_that_is_planned_is_squared_or_the_total_where_ranks_push_less(
    pushes: int, squared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits. A push more than planned is that of step()."""
    with owner_of(make_spec(2, accumulation_steps=3)) as owner:
        watched = Watched(owner.service._attached().contributions.sums._squares)
        monkeypatch.setattr(owner.service._attached().contributions.sums, "_squares", watched)
        for seq in range(pushes):
            for rank in range(2):
                owner.push(rank, random_grads(owner.spec, 10 * seq + rank), seq=seq)
            owner.drain()
            assert bool(watched.of) is (seq >= 2)
        found = {part[:2]: part[2] for part in owner.collect(pushes=pushes).result(WAIT).parts}
        owner.drain()
        trained = [shard for shard in owner.spec.layout.shards if owner.spec.layout.units[shard.unit].trainable]
        assert watched.of == [squared] * len(trained) * max(1, pushes - 2)
        squares = choose_squares(owner.service.kernel)
        for shard in trained:
            owned = owner.service.shard(shard.index)
            assert owned.total is not None
            for part in owned.slices:
                [expected] = squares.parts([owned.total], (0,), [(part.start, part.stop)])
                assert found[shard.index, part.slot] == expected


def test_ranks_that_push_less_than_others_are_resolved_by_their_finishes() -> None:
    spec = make_spec(3, accumulation_steps=3)
    rounds, pushes = rounds_of(spec), (3, 0, 2)
    with owner_of(spec) as owner:
        for rank in range(3):
            for seq in range(pushes[rank]):
                owner.push(rank, rounds[seq][rank], seq=seq)
        owner.drain()
        reports = tuple(
            replace(report, counts=(pushes[rank],) * len(report.counts)) for rank, report in enumerate(owner.reports())
        )
        owner.service.collect(0, reports).result(WAIT)
        assert held(owner) == 0
        require_rounds(owner, [[rounds[0][0], rounds[0][2]], [rounds[1][0], rounds[1][2]], [rounds[2][0]]])


def test_one_push_more_than_backwards_were_planned_is_taken_and_no_other() -> None:
    """step() itself may find gradients that were set by hand."""
    with owner_of(make_spec(2, accumulation_steps=2)) as owner:
        for seq in range(3):
            owner.push(0, of_ranks(owner.spec)[0], seq=seq)
        with pytest.raises(AccumulationError, match=r"4 times in step 0, but 2 backwards a step were planned"):
            owner.push(0, of_ranks(owner.spec)[0], seq=3)


@pytest.mark.parametrize("number", [1, 2])
def test_what_all_ranks_discard_after_some_rounds_is_added_up_again(number: int) -> None:
    spec = make_spec(2, accumulation_steps=number)
    dropped, rounds = rounds_of(spec), [of_ranks(spec, 5), of_ranks(spec, 6)][:number]
    with owner_of(spec) as owner:
        for attempt, mine in enumerate((dropped[:1], rounds)):
            for seq, grads in enumerate(mine):
                for rank in range(2):
                    owner.push(rank, grads[rank], attempt=attempt, seq=seq)
                owner.drain()
                assert held(owner) == 0
        owner.service.collect(0, owner.reports(pushes=number, attempts=[1, 1])).result(WAIT)
        require_rounds(owner, rounds)


def test_a_later_life_repeats_the_rounds_that_the_total_has_and_goes_on() -> None:
    spec = make_spec(2, accumulation_steps=3)
    rounds = rounds_of(spec)
    with owner_of(spec) as owner:
        for seq in range(2):
            for rank in range(2):
                owner.push(rank, rounds[seq][rank], seq=seq)
            owner.drain()
        for seq in range(3):
            owner.push(1, random_grads(spec, 77) if seq < 2 else rounds[seq][1], attempt=ATTEMPTS, seq=seq)
        owner.push(0, rounds[2][0], seq=2)
        owner.drain()
        owner.service.collect(0, owner.reports(pushes=3, attempts=[0, ATTEMPTS])).result(WAIT)
        require_rounds(owner, rounds)
        owner.service.apply(replace(owner.decision(), attempts=(0, ATTEMPTS))).result(WAIT)
        owner.read_all(1)
        assert held(owner) == 0


def test_a_later_life_may_go_on_behind_the_rounds_that_the_total_has() -> None:
    """It has been told of them, and keeps them no more. One that has discarded has to begin with the first."""
    spec = make_spec(2, accumulation_steps=3)
    rounds = rounds_of(spec)
    told: list[tuple[int, int]] = []
    with owner_of(spec) as owner:
        owner.service.on_total(lambda shard, word: told.append((shard, word)))
        for seq in range(2):
            for rank in range(2):
                owner.push(rank, rounds[seq][rank], seq=seq)
            owner.drain()
        owner.push(0, rounds[2][0], seq=2)
        discarded = owner.header(1, 1, 0, rounds[2][1], attempt=1, seq=2)
        assert not owner.service.reserve_when_free(discarded, spec.layout.shards_by_unit[1][0].index).done()
        owner.push(1, rounds[2][1], attempt=ATTEMPTS, seq=2)
        owner.service.collect(0, owner.reports(pushes=3, attempts=[0, ATTEMPTS])).result(WAIT)
        require_rounds(owner, rounds)
    of_one = [word for shard, word in told if shard == 0]
    assert of_one == [total_word(0, 0, number) for number in (1, 2, 3)]
