"""Writes into parameters and optimizer states: what every store must do with them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from clock import StallClock
from torch import Tensor

from rayzero.errors import RankLeftError, StallError, StepMismatchError
from rayzero.protocol.messages import COMPUTE, GROUP, MASTER, STEP
from store.stores import StoreFactory
from store.toy import (
    HYPER,
    WAIT,
    PlainAdamW,
    Rank,
    ask_norms,
    equal,
    flatten,
    initial_values,
    make_spec,
    masters,
    random_grads,
    started,
    take_step,
)

BF16 = torch.bfloat16


def values_of(rank: Rank, unit: int, kind: str) -> Tensor:
    """A unit's flat vector as the store has it."""
    future, out = rank.fetch_unit(unit, kind=kind)
    future.result(WAIT)
    return out


def write(ranks: Sequence[Rank], unit: int, values: Tensor, kind: str = COMPUTE) -> None:
    asked = [rank.store.write(unit, rank.step, kind, values.clone()) for rank in ranks]
    for future in asked:
        future.result(WAIT)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_all_ranks_write_is_published_at_the_same_version_and_trained_on(
    make_stores: StoreFactory, world_size: int
) -> None:
    spec, grads = make_spec(world_size), random_grads(make_spec(world_size), 1)
    plain = PlainAdamW(spec)
    with started(make_stores(world_size, 2), spec) as ranks:
        take_step(ranks, [grads] * world_size)
        plain.step([grads] * world_size)
        for unit in spec.layout.units:
            names = [slot.name for slot in unit.slots]
            write(ranks, unit.index, values_of(ranks[0], unit.index, COMPUTE) * 2)
            for name in names:
                plain.params[name].data.mul_(2)
        for rank in ranks:
            assert all(torch.allclose(rank.fetch()[n], v, rtol=1e-6, atol=1e-7) for n, v in plain.values.items())
        take_step(ranks, [grads] * world_size)
        plain.step([grads] * world_size)
        found = masters(ranks[-1])
    for name, value in plain.values.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_after_a_stalled_write_the_callers_memory_is_its_own(
    make_stores: StoreFactory, stall_clock: StallClock
) -> None:
    with started(make_stores(2, 2), make_spec(2)) as ranks:
        written = values_of(ranks[0], 1, COMPUTE) * 2
        memory = written.clone()
        with pytest.raises(StallError):
            stall_clock.stall(ranks[0].store.write(1, 0, COMPUTE, memory))
        memory.zero_()
        ranks[1].store.write(1, 0, COMPUTE, written).result(WAIT)
        assert torch.equal(values_of(ranks[1], 1, COMPUTE), written)


def test_a_bf16_master_keeps_its_precision_where_nothing_was_written(make_stores: StoreFactory) -> None:
    with started(make_stores(2, 2), make_spec(2, dtypes=[BF16, BF16, torch.float32])) as ranks:
        take_step(ranks, [random_grads(ranks[0].spec, rank) for rank in range(2)])
        before, values = values_of(ranks[0], 0, MASTER), values_of(ranks[0], 0, COMPUTE)
        assert not torch.equal(before, before.bfloat16().float())
        values[7:130] = 0.3
        write(ranks, 0, values)
        after = values_of(ranks[1], 0, MASTER)
        assert torch.equal(after[7:130], torch.full((123,), 0.3).bfloat16().float())
        assert torch.equal(after[:7], before[:7])
        assert torch.equal(after[130:], before[130:])
        assert torch.equal(values_of(ranks[1], 0, COMPUTE), values)


def test_a_master_is_written_without_rounding_and_a_frozen_unit_in_its_dtype(make_stores: StoreFactory) -> None:
    spec = make_spec(2, dtypes=[BF16, BF16, torch.float32], frozen=[1])
    with started(make_stores(2, 2), spec) as ranks:
        exact = flatten(spec.layout.units[0], {"emb.weight": torch.randn(40, 24)}, torch.float32)
        write(ranks, 0, exact, MASTER)
        assert torch.equal(values_of(ranks[1], 0, MASTER), exact)
        assert torch.equal(values_of(ranks[1], 0, COMPUTE), exact.bfloat16())
        frozen = torch.randn(spec.layout.units[1].numel).to(BF16)
        write(ranks, 1, frozen)
        assert torch.equal(ranks[1].fetch()["layers.0.w"].flatten(), frozen[: 64 * 48])
        take_step(ranks, [random_grads(spec, 1)] * 2)
        assert torch.equal(ranks[1].fetch()["layers.0.w"].flatten(), frozen[: 64 * 48])


def test_moments_step_counts_and_groups_are_written_by_name(make_stores: StoreFactory) -> None:
    spec = make_spec(1, hyper=[HYPER])
    cold = HYPER | {"lr": 0.0}
    with started(make_stores(1, 2), spec) as ranks:
        numel = spec.layout.units[2].numel
        write(ranks, 2, torch.full((numel,), 0.25), "exp_avg")
        write(ranks, 2, torch.full((numel,), 5.0), STEP)
        assert (ranks[0].fetch(kind="exp_avg")["layers.1.w"] == 0.25).all()
        steps = ranks[0].fetch(kind=STEP)
        assert (steps["layers.1.b"] == 5).all()
        assert (steps["emb.weight"] == 0).all()
        write(ranks, 2, torch.full((numel,), 1.0), GROUP)
        ranks[0].push(random_grads(spec, 1))
        ranks[0].finish(hyper=[HYPER, cold]).result(WAIT)
        after = masters(ranks[0])
        changed = {name for name, value in initial_values(spec).items() if not torch.equal(after[name], value)}
        assert changed == {"emb.weight", "layers.0.w", "layers.0.b", "layers.0.s"}
        assert (ranks[0].fetch(kind=STEP)["layers.1.b"] == 6).all()


def test_a_write_between_the_norm_and_the_commit_comes_before_the_update(make_stores: StoreFactory) -> None:
    spec, grads = make_spec(2), random_grads(make_spec(2), 1)
    plain = PlainAdamW(spec)
    plain.params["emb.weight"].data.fill_(0.5)
    plain.step([grads, grads], 0.5)
    with started(make_stores(2, 2), spec) as ranks:
        for rank in ranks:
            rank.push(grads)
        ask_norms(ranks)
        write(ranks, 0, torch.full((spec.layout.units[0].numel,), 0.5))
        for decision in [rank.commit(0.5) for rank in ranks]:
            decision.result(WAIT)
        found = masters(ranks[0])
    for name, value in plain.values.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)


def test_a_rank_that_is_a_step_ahead_waits_with_its_write(make_stores: StoreFactory) -> None:
    with started(make_stores(2, 2), make_spec(2)) as ranks:
        values = torch.full((ranks[0].spec.layout.units[0].numel,), 0.5)
        norm = ranks[0].finish()
        early = ranks[0].store.write(0, 1, COMPUTE, values)
        assert not early.done()
        ranks[1].finish()
        norm.result(WAIT)
        late = ranks[1].store.write(0, 1, COMPUTE, values)
        for future in (early, late):
            future.result(WAIT)
        assert (ranks[1].fetch()["emb.weight"] == 0.5).all()


def both_fail(futures: Sequence[Future[object]], error: type[Exception], match: str) -> None:
    for future in futures:
        with pytest.raises(error, match=match):
            future.result(WAIT)


@pytest.mark.parametrize(
    ("units", "values", "said"),
    [
        ((1, 1), (0.0, 1.0), r"rank \d wrote to 'layers.0' and rank \d wrote other values at step 0; ev"),
        ((0, 1), (0.0, 0.0), r"rank \d wrote to '(emb|layers.0)' and rank \d wrote to '(emb|layers.0)'"),
    ],
    ids=["values", "units"],
)
def test_different_writes_are_an_error_for_all_that_names_both(
    make_stores: StoreFactory, units: tuple[int, ...], values: tuple[float, ...], said: str
) -> None:
    with started(make_stores(2, 2), make_spec(2)) as ranks:
        asked = [
            rank.store.write(unit, 0, COMPUTE, torch.full((ranks[0].spec.layout.units[unit].numel,), value))
            for rank, unit, value in zip(ranks, units, values, strict=True)
        ]
        both_fail(asked, StepMismatchError, said)


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("writer_first", [True, False])
def test_a_rank_that_finishes_without_writing_fails_both_by_name(
    make_stores: StoreFactory, commits: bool, writer_first: bool
) -> None:
    spec = make_spec(2)
    with started(make_stores(2, 2), spec) as (writer, other):
        values = torch.zeros(spec.layout.units[0].numel)

        def go_on() -> Future[object]:
            return other.finish() if commits else other.ask_norm()

        first = writer.store.write(0, 0, COMPUTE, values) if writer_first else go_on()
        second = go_on() if writer_first else writer.store.write(0, 0, COMPUTE, values)
        both_fail([first, second], StepMismatchError, "rank 0 has written to 'emb' at step 0, but rank 1 has finished")


def test_a_rank_that_leaves_ends_the_others_write(make_stores: StoreFactory) -> None:
    spec = make_spec(2)
    with started(make_stores(2, 2), spec) as ranks:
        asked = ranks[0].store.write(0, 0, COMPUTE, torch.zeros(spec.layout.units[0].numel))
        ranks[1].store.close("end of its loop")
        both_fail([asked], RankLeftError, r"rank 1 left before the first step \(end of its loop\), rank 0 is in step 0")


def test_bits_do_not_depend_on_who_writes_how(make_stores: StoreFactory) -> None:
    """NaNs, zeros of both signs, and padding."""
    with started(make_stores(2, 3), make_spec(2, dtypes=[BF16] * 3)) as ranks:
        values = values_of(ranks[0], 1, COMPUTE)
        values[:3] = torch.tensor([torch.nan, 0.0, -0.0], dtype=BF16)
        write(ranks, 1, values)
        master = values_of(ranks[1], 1, MASTER)
        assert torch.isnan(master[0])
        assert torch.signbit(master[1:3]).tolist() == [False, True]
        write(ranks, 1, values)
        assert equal({"": values_of(ranks[0], 1, MASTER)[1:]}, {"": master[1:]})
