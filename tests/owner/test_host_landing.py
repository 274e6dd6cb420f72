"""Sums of ranks of another host at an owner, event by event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from store.toy import WAIT, Grads, make_spec, random_grads

from owner.owner import Owner
from rayzero.errors import HandshakeError, StepMismatchError, StoreError
from rayzero.owner.gradients import contributions
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import Contribution, FinishReport, ModelSpec, Summand, pack_presence

BOTH = ((0, 1), (0, 1))  # (attempt, pushes) of each rank


@contextmanager
def owner_of_sums(spec: ModelSpec, ranks: Sequence[int] = (0, 1)) -> Iterator[Owner]:
    """An owner of everything, which gets one sum of ``ranks``."""
    service = ShardService(0, 1)
    try:
        for rank in range(spec.world_size):
            service.attach(rank, spec, summed=ranks if rank in ranks else ())
        yield Owner(service, spec)
    finally:
        service.close()


def sum_of(
    spec: ModelSpec, unit: int, parts: Sequence[tuple[int, int]] = BOTH, step: int = 0, seq: int = 0
) -> Contribution:
    summands = tuple(Summand(rank, *part) for rank, part in enumerate(parts))
    presence = pack_presence([True] * len(spec.layout.units[unit].slots))
    return Contribution(step=step, attempt=0, rank=0, unit=unit, seq=seq, presence=presence, summands=summands)


def push_sums(owner: Owner, grads: Grads, parts: Sequence[tuple[int, int]] = BOTH, seq: int = 0) -> list[bool]:
    """Of every unit; whether the owner wanted each shard."""
    layout, spec = owner.spec.layout, owner.spec
    return [owner.push_shard(sum_of(spec, shard.unit, parts, seq=seq), shard.index, grads) for shard in layout.shards]


def reports(spec: ModelSpec, parts: Sequence[tuple[int, int]]) -> tuple[FinishReport, ...]:
    return tuple(
        FinishReport(step=0, attempt=attempt, rank=rank, counts=(pushes,) * len(spec.layout.units))
        for rank, (attempt, pushes) in enumerate(parts)
    )


def test_one_sum_has_memory_of_one_rank_in_fp32() -> None:
    spec = make_spec(3, dtypes=(torch.bfloat16,) * 3)
    with owner_of_sums(spec, (0, 1, 2)) as owner:
        [held] = [
            each.value
            for each in owner.service._readings()
            if each.labels.get("kind") == "grad" and "memory_bytes" in each.metric.name
        ]
    assert held == 4 * sum(shard.numel for shard in spec.layout.shards)


@pytest.mark.parametrize(
    ("came", "counted"),
    [
        (((0, 1), (0, 1)), ((0, 1), (1, 1))),  # discarded
        (((0, 1), (0, 1)), ((0, 1), (1, 0))),  # discarded, and nothing in its place
        (((0, 1), (0, 1)), ((1 << 16, 1), (0, 1))),  # of a dead rank
    ],
)
def test_a_sum_of_other_pushes_than_were_counted_is_waited_out_and_replaced(
    came: Sequence[tuple[int, int]], counted: Sequence[tuple[int, int]]
) -> None:
    spec = make_spec(2)
    with owner_of_sums(spec) as owner:
        push_sums(owner, random_grads(spec, 1), came)
        collected = owner.service.collect(0, reports(spec, counted))
        push_sums(owner, random_grads(spec, 2), came)  # the same again
        with pytest.raises(TimeoutError):
            collected.result(0.05)
        assert all(push_sums(owner, random_grads(spec, 3), counted))
        parts = collected.result(WAIT)
        assert not any(push_sums(owner, random_grads(spec, 1), came)), "an older one is dropped"
    with owner_of_sums(make_spec(1), ()) as owner:
        owner.push(0, random_grads(spec, 3))
        assert owner.collect().result(WAIT) == parts


def test_sums_of_several_rounds_are_added_in_their_order_and_dropped_together() -> None:
    """The second round has one rank's push, as the other one's finish says; ranks that discard begin with the first."""
    spec = make_spec(2, accumulation_steps=2)
    more, other = ((0, 2), (0, 1)), ((1, 2), (0, 1))
    with owner_of_sums(spec) as owner:
        collected = owner.service.collect(0, reports(spec, other))
        assert not owner.service.reserve_when_free(sum_of(spec, 0, more, seq=1), 0).done(), "the first one is not here"
        push_sums(owner, random_grads(spec, 1))
        push_sums(owner, random_grads(spec, 2), more, seq=1)
        with pytest.raises(TimeoutError):
            collected.result(0.05)
        assert all(push_sums(owner, random_grads(spec, 3), ((1, 1), (0, 1))))
        assert not any(push_sums(owner, random_grads(spec, 2), more, seq=1)), "of an attempt that was dropped"
        assert all(push_sums(owner, random_grads(spec, 4), other, seq=1))
        parts = collected.result(WAIT)
    with owner_of_sums(make_spec(1, accumulation_steps=2), ()) as owner:
        for seq in range(2):
            owner.push(0, random_grads(spec, 3 + seq), seq=seq)
        assert owner.collect(pushes=2).result(WAIT) == parts


def test_sums_with_a_later_life_may_go_on_behind_the_rounds_that_the_total_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank of the host has given the first round back."""
    monkeypatch.setattr(contributions, "EARLY", 1)
    spec = make_spec(2, accumulation_steps=2)
    later, discarded = ((0, 2), (1 << 16, 2)), ((0, 2), (1, 2))
    with owner_of_sums(spec) as owner:
        push_sums(owner, random_grads(spec, 1))
        owner.drain()
        assert not owner.service.reserve_when_free(sum_of(spec, 0, discarded, seq=1), 0).done()
        assert all(push_sums(owner, random_grads(spec, 2), later, seq=1))
        parts = owner.service.collect(0, reports(spec, later)).result(WAIT)
    with owner_of_sums(make_spec(1, accumulation_steps=2), ()) as owner:
        for seq in range(2):
            owner.push(0, random_grads(spec, 1 + seq), seq=seq)
        assert owner.collect(pushes=2).result(WAIT) == parts


def test_nothing_is_waited_for_of_a_unit_that_none_of_the_ranks_has_pushed() -> None:
    nothing = ((1, 0), (0, 0))
    with owner_of_sums(make_spec(2)) as owner:
        push_sums(owner, random_grads(owner.spec, 1))  # which both have discarded, or died of
        assert owner.service.collect(0, reports(owner.spec, nothing)).result(WAIT).parts == ()


def test_a_sum_may_be_sent_again_that_was_cut_and_an_older_one_does_not_take_its_place() -> None:
    spec = make_spec(2)
    newer = sum_of(spec, 0, ((0, 1), (1, 1)))
    with owner_of_sums(spec) as owner:
        grads = random_grads(spec, 1)
        assert owner.service.reserve(newer, 0) is not None  # its bytes never come
        assert not owner.push_shard(sum_of(spec, 0), 0, grads)
        assert owner.push_shard(newer, 0, grads)


def test_more_pushes_than_were_counted_fail_the_step() -> None:
    with owner_of_sums(make_spec(2)) as owner:
        push_sums(owner, random_grads(owner.spec, 1), ((0, 1), (0, 2)))
        with pytest.raises(StepMismatchError, match=r"rank 1 finished step 0 with 1 pushes .* but 2 arrived"):
            owner.service.collect(0, reports(owner.spec, BOTH)).result(WAIT)


def test_gradients_that_come_in_another_way_than_was_said_are_refused() -> None:
    with owner_of_sums(make_spec(3)) as owner:
        alone = replace(sum_of(owner.spec, 0), rank=1, summands=())
        with pytest.raises(
            StoreError, match=r"gradients of rank 1 alone came where the sum of ranks \[0, 1\] is taken"
        ):
            owner.service.reserve(alone, 0)
        with pytest.raises(StoreError, match=r"the sum of ranks \[0, 1\] came where a push of each rank is taken"):
            owner.service.reserve(replace(sum_of(owner.spec, 0), rank=2), 0)


@pytest.mark.parametrize(("rank", "ranks"), [(1, (1, 2)), (0, (0, 2)), (2, (0, 1)), (9, (0, 9))])
def test_ranks_that_cannot_be_added_first_are_refused(rank: int, ranks: tuple[int, ...]) -> None:
    service = ShardService(0, 1)
    with pytest.raises(HandshakeError, match=rf"rank {rank} cannot come in a sum of ranks .* only the first ranks"):
        service.attach(rank, make_spec(10), summed=ranks)
    service.close()
