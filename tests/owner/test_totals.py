"""The gradients of several ranks are added up once, into a total; from then on nobody needs them one by one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from store.toy import WAIT, Grads, make_spec, random_grads

from owner.owner import Owner, owner_of
from rayzero.errors import AccumulationError, StepMismatchError
from rayzero.kernels.rank_sum import RankSum
from rayzero.owner.gradients import contributions
from rayzero.owner.gradients.squares import choose_squares
from rayzero.protocol.lives import ATTEMPTS
from rayzero.protocol.messages import Clamp, FinishReport, ModelSpec


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard is added up as soon as every rank has pushed it, however small."""
    monkeypatch.setattr(contributions, "EARLY", 1)


def drain(owner: Owner) -> None:
    """Wait until the owner has computed what it was given so far."""
    done = threading.Event()
    owner.service._updater.submit(done.set)
    assert done.wait(WAIT)


def of_ranks(spec: ModelSpec, seed: int = 0) -> list[Grads]:
    return [random_grads(spec, 10 * seed + rank) for rank in range(spec.world_size)]


def held(owner: Owner) -> int:
    """Bytes of pushes that are not in totals."""
    ranks = owner.service._attached().contributions.ranks.values()
    sums = [landing.sum for rank in ranks for landing in rank.landings.values()]
    return sum(each.memory.nbytes for each in sums if each.has_memory)


def sum_of(owner: Owner, shard: int, grads: Sequence[Grads]) -> torch.Tensor:
    parts = [owner.part(shard, each) for each in grads]
    return RankSum(parts[0].numel()).sum(parts, range(len(parts)), 0, parts[0].numel())


def require_sum(owner: Owner, shard: int, grads: Sequence[Grads]) -> None:
    """The shard's total has the gradients' sum, in every slice."""
    owned, expected = owner.service.shard(shard), sum_of(owner, shard, grads)
    assert owned.total is not None
    for part in owned.slices:
        assert torch.equal(owned.total[part.start : part.stop], expected[part.start : part.stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 9])
def test_a_total_is_the_sum_in_rank_order_and_frees_what_ranks_pushed(world: int, dtype: torch.dtype) -> None:
    spec = make_spec(world, dtypes=(dtype,) * 3)
    grads = of_ranks(spec)
    with owner_of(spec) as owner:
        for rank, mine in enumerate(grads[:-1]):
            owner.push(rank, mine)
        drain(owner)
        waiting = held(owner)
        owner.push(world - 1, grads[-1])
        drain(owner)
        assert (waiting > 0, held(owner)) == (True, 0)
        for shard in spec.layout.shards:
            require_sum(owner, shard.index, grads)


def test_norm_parts_are_those_of_the_ranks_gradients_and_a_clamp_squares_the_total() -> None:
    spec = make_spec(3)
    grads = of_ranks(spec)
    clamp = Clamp(scale=1 / 3, limit=0.5)
    for wanted in (None, clamp):
        with owner_of(spec) as owner:
            for rank, mine in enumerate(grads):
                owner.push(rank, mine)
            drain(owner)
            counts = (1,) * len(spec.layout.units)
            reports = tuple(FinishReport(step=0, attempt=0, rank=r, counts=counts, clamp=wanted) for r in range(3))
            found = {part[:2]: part[2] for part in owner.service.collect(0, reports).result(WAIT).parts}
            squares = choose_squares(owner.service.kernel)
            for shard in spec.layout.shards:
                parts = [owner.part(shard.index, each) for each in grads]
                for part in owner.service.shard(shard.index).slices:
                    [expected] = squares.parts(parts, range(3), [(part.start, part.stop)], wanted)
                    assert found[shard.index, part.slot] == expected


def test_a_rank_that_pushes_less_is_waited_for_until_the_finishes_say_so() -> None:
    """It might have pushed still, and then too late for a sum in rank order."""
    spec = make_spec(2)
    grads = of_ranks(spec)
    with owner_of(spec) as owner:
        for step in range(2):  # in the second step, the first one's counts are expected
            owner.push(0, grads[0], step)
            drain(owner)
            assert held(owner) > 0
            counts = (1,) * len(spec.layout.units)
            reports = tuple(
                FinishReport(step=step, attempt=0, rank=rank, counts=counts if rank == 0 else (0,) * len(counts))
                for rank in range(2)
            )
            owner.service.collect(step, reports).result(WAIT)
            assert held(owner) == 0
            owner.service.apply(owner.decision(step)).result(WAIT)


def test_a_second_push_that_was_not_planned_is_refused() -> None:
    spec = make_spec(2)
    with owner_of(spec) as owner:
        owner.push(0, of_ranks(spec)[0])
        with pytest.raises(AccumulationError, match=r"gradient memory \(that of several ranks\) holds one push"):
            owner.push(0, of_ranks(spec)[0], seq=1)


def test_what_all_ranks_discard_is_added_up_again() -> None:
    spec = make_spec(2)
    dropped, grads = of_ranks(spec, 1), of_ranks(spec, 2)
    with owner_of(spec) as owner:
        for attempt, mine in enumerate((dropped, grads)):
            for rank in range(2):
                owner.push(rank, mine[rank], attempt=attempt)
            drain(owner)
        owner.service.collect(0, owner.reports(attempts=[1, 1])).result(WAIT)
        for shard in spec.layout.shards:
            require_sum(owner, shard.index, grads)


def test_what_one_rank_alone_discards_after_it_was_added_up_ends_the_step_by_name() -> None:
    spec = make_spec(2)
    grads = of_ranks(spec)
    with owner_of(spec) as owner:
        for rank in range(2):
            owner.push(rank, grads[rank])
        drain(owner)
        owner.push(0, random_grads(spec, 77), attempt=1)
        collected = owner.service.collect(0, owner.reports(attempts=[1, 0]))
        with pytest.raises(StepMismatchError, match=r"call zero_grad\(\) on every rank or on none"):
            collected.result(WAIT)


def test_what_one_rank_alone_discards_before_all_have_pushed_counts_no_more() -> None:
    spec = make_spec(2)
    grads = of_ranks(spec)
    with owner_of(spec) as owner:
        owner.push(0, random_grads(spec, 77))
        owner.push(0, grads[0], attempt=1)
        owner.push(1, grads[1])
        owner.service.collect(0, owner.reports(attempts=[1, 0])).result(WAIT)
        require_sum(owner, spec.layout.shards[0].index, grads)


def test_a_later_life_repeats_what_the_total_has() -> None:
    """It computes the same from the same weights; were it something else, the total would have the first."""
    spec = make_spec(2)
    grads = of_ranks(spec)
    with owner_of(spec) as owner:
        for rank in range(2):
            owner.push(rank, grads[rank])
        drain(owner)
        owner.push(1, random_grads(spec, 77), attempt=ATTEMPTS)
        owner.service.collect(0, owner.reports(attempts=[0, ATTEMPTS])).result(WAIT)
        require_sum(owner, spec.layout.shards[0].index, grads)


def test_nothing_is_added_up_while_owners_change_and_all_of_it_after_that() -> None:
    spec = make_spec(2)
    grads = of_ranks(spec)
    with owner_of(spec) as owner:
        owner.push(0, grads[0])
        owner.service.settled().result(WAIT)
        owner.push(1, grads[1])
        collected = owner.collect()
        drain(owner)
        assert held(owner) > 0
        assert not collected.done()
        owner.service.go_on()
        collected.result(WAIT)
        assert held(owner) == 0
