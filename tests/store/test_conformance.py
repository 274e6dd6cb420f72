"""What every store must do: one suite over all of ``STORES``, a test for each rule of the store's design.

Schedules are written out: one thread drives all ranks, so the order of events is the order of the lines."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from clock import StallClock

from rayzero.checkpoint.manifest import MANIFEST, rank_file_name
from rayzero.checkpoint.reader import CheckpointReader
from rayzero.checkpoint.writer import staging_path, withdraw, write_rank_state
from rayzero.errors import (
    AccumulationError,
    CheckpointError,
    HandshakeError,
    NonFiniteGradientError,
    RankLeftError,
    StallError,
    StepMismatchError,
    StoreClosedError,
    StoreError,
)
from rayzero.layout.model_layout import lay_out_unit
from rayzero.owner import checkpoint as snapshot
from rayzero.owner.gradients import contributions
from rayzero.protocol.messages import (
    AT_HOME,
    COMPUTE,
    MASTER,
    Action,
    CheckpointInfo,
    Clamp,
    Contribution,
    Edit,
    EditKind,
    FileEntry,
    ModelSpec,
    Norm,
    StepInputs,
)
from rayzero.store.rank.rank_store import RankStore
from store.stores import STORES, StoreFactory
from store.toy import (
    HYPER,
    UNITS,
    WAIT,
    Grads,
    PlainAdamW,
    Rank,
    ask_norms,
    equal,
    flatten,
    initial_values,
    make_large_spec,
    make_spec,
    masters,
    push_all,
    random_grads,
    start,
    started,
    take_step,
)
from tests.support.leftovers import threads, threads_left
from tests.support.waiting import until

BF16 = torch.bfloat16


def train(make_stores: StoreFactory, spec: ModelSpec, num_owners: int, schedule: Sequence[Sequence[Grads]]) -> Grads:
    """Run whole steps with clipping and return the masters."""
    with started(make_stores(spec.world_size, num_owners), spec) as ranks:
        for grads in schedule:
            take_step(ranks, grads, 0.5)
        return masters(ranks[0])


def random_schedule(spec: ModelSpec, steps: int = 3) -> list[list[Grads]]:
    return [[random_grads(spec, 100 * step + rank) for rank in range(spec.world_size)] for step in range(steps)]


# ---- a plain step


def test_a_step_reads_version_n_and_publishes_n_plus_1(make_stores: StoreFactory) -> None:
    with started(make_stores(1, 2), make_spec(1)) as (rank,):
        assert equal(rank.fetch(0), initial_values(rank.spec))
        norm = take_step([rank], [random_grads(rank.spec, 1)])
        assert norm.step == 0
        assert not equal(rank.fetch(1), initial_values(rank.spec))
        assert equal(rank.fetch(1), masters(rank, 1))


def test_a_shard_of_several_chunks_arrives_whole(make_stores: StoreFactory) -> None:
    """Loaded, fetched, pushed, and written."""
    spec = make_large_spec()
    grads, plain = random_grads(spec, 1), PlainAdamW(spec, fused=True)
    plain.step([grads])
    with started(make_stores(1, 2), spec) as (rank,):
        assert equal(rank.fetch(0), initial_values(spec))
        take_step([rank], [grads])
        assert equal(masters(rank), plain.values)
        large = spec.layout.units[-1]
        halves = flatten(large, plain.values, torch.float32) * 0.5
        rank.store.write(large.index, rank.step, COMPUTE, halves).result(WAIT)
        assert equal(rank.fetch(), plain.values | {"large.w": plain.values["large.w"] * 0.5})


def test_frozen_units_are_published_and_never_updated(make_stores: StoreFactory) -> None:
    with started(make_stores(1, 2), make_spec(1, frozen=[1], dtypes=[torch.float32, BF16, BF16])) as (rank,):
        before = rank.fetch(0)
        take_step([rank], [random_grads(rank.spec, 1)])
        after = rank.fetch(1)
        for unit, (_, params) in enumerate(UNITS):
            for name, shape in params:
                assert torch.equal(before[name], after[name]) == (unit == 1 or 0 in shape), name
        with pytest.raises(StoreError, match=r"'layers.0' has no 'master'"):
            rank.fetch_unit(1, 1, MASTER)[0].result(WAIT)


def test_a_unit_without_elements_is_pushed_like_any_other(make_stores: StoreFactory) -> None:
    spec = make_spec(1)
    empty = lay_out_unit(len(spec.layout.units), "nothing", torch.float32, True, [("nothing", (0, 3))])
    layout = replace(spec.layout, units=(*spec.layout.units, empty))
    spec = replace(spec, layout=layout, group_of=(*spec.group_of, (0,)))
    with make_stores(1, 2) as stores:
        start(stores, spec)
        push = Contribution(step=0, attempt=0, rank=0, unit=empty.index, seq=0, presence=b"\1")
        stores[0].push(push, torch.empty(0)).result(WAIT)
        stores[0].published(empty.index, 0).result(WAIT)


def test_bf16_units_publish_their_fp32_master_rounded(make_stores: StoreFactory) -> None:
    with started(make_stores(2, 2), make_spec(2, dtypes=[BF16, BF16, torch.float32])) as ranks:
        take_step(ranks, [random_grads(ranks[0].spec, 1), random_grads(ranks[0].spec, 2)])
        master, compute = masters(ranks[0]), ranks[1].fetch()
        assert any(not torch.equal(value, value.bfloat16().float()) for value in master.values())
        assert equal({name: value.to(compute[name].dtype) for name, value in master.items()}, compute)


def test_moments_can_be_fetched_by_name(make_stores: StoreFactory) -> None:
    with started(make_stores(1, 2), make_spec(1)) as (rank,):
        grads = random_grads(rank.spec, 1)
        take_step([rank], [grads])
        assert all(torch.allclose(v, 0.1 * grads[n]) for n, v in rank.fetch(1, "exp_avg").items())
        with pytest.raises(
            StoreError, match=r"'emb' has no 'momentum_buffer' to fetch; it has compute, master, exp_avg"
        ):
            rank.fetch_unit(0, 1, "momentum_buffer")[0].result(WAIT)


# ---- rule 1: a push waits only for its own rank


def test_a_rank_that_skips_units_and_waits_blocks_nobody(make_stores: StoreFactory) -> None:
    spec = make_spec(3)
    with started(make_stores(3, 2), spec) as (slow, skipping, other):
        grads = random_grads(spec, 1)
        skipping.push(grads, [2])  # units 0 and 1 never come from this rank
        norm = skipping.finish()
        waits = [skipping.fetch_unit(unit, 1)[0] for unit in (0, 1, 2) for _ in range(4)]  # far more than any pool
        other.push(grads)
        slow.push(grads)
        assert not norm.done()
        assert not any(wait.done() for wait in waits)
        slow.finish()
        other.finish()
        norm.result(WAIT)
        for wait in waits:
            wait.result(WAIT)


@pytest.mark.promise("hidden", "transports")
def test_a_rank_pushes_everything_while_the_others_have_not_begun(make_stores: StoreFactory) -> None:
    with started(make_stores(3, 2), make_spec(3, accumulation_steps=3)) as ranks:
        for seed in range(3):
            ranks[2].push(random_grads(ranks[0].spec, seed))  # waits for each


# ---- rule 2: rounds of pushes, each one sum across ranks in fixed groups


def in_rounds(rounds: Sequence[Sequence[Grads]], name: str) -> torch.Tensor:
    """What a total has of a parameter: of each round the ranks, in groups of 8, and then the rounds."""

    def total(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(values[1:], values[0])

    groups = [[grads[start : start + 8] for start in range(0, len(grads), 8)] for grads in rounds]
    return total([total([total([mine[name] for mine in group]) for group in each]) for each in groups])


PLAIN = {"optimizer": "torch.optim.sgd:SGD", "hyper": [{"lr": 1.0}]}  # its masters show what was added up


@pytest.mark.promise("exact", "accumulation", "transports")
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("owners", [1, 2])
def test_accumulation_adds_rounds_each_in_rank_order(
    make_stores: StoreFactory, dtype: torch.dtype, owners: int
) -> None:
    """Whatever order they arrive in: rank 1 is a round ahead at times."""
    spec = make_spec(3, accumulation_steps=3, dtypes=[dtype] * 3, **PLAIN)
    rounds = [[random_grads(spec, 10 * rank + seq) for rank in range(3)] for seq in range(3)]
    arrivals = [(1, 0), (0, 0), (1, 1), (2, 0), (0, 1), (1, 2), (2, 1), (0, 2), (2, 2)]
    with started(make_stores(3, owners), spec) as ranks:
        for rank, seq in arrivals:
            ranks[rank].push(rounds[seq][rank])
        for rank in ranks:
            rank.finish()
        found = masters(ranks[0])
    exact = [[{name: grad.to(dtype).float() for name, grad in mine.items()} for mine in grads] for grads in rounds]
    for name, value in initial_values(spec).items():
        assert torch.equal(found[name], value - in_rounds(exact, name) * (1 / 3)), name


def test_a_backward_may_be_pushed_while_the_one_before_is_on_its_way(make_stores: StoreFactory) -> None:
    spec = make_spec(2, accumulation_steps=3, **PLAIN)
    rounds = [[random_grads(spec, 10 * rank + seq) for rank in range(2)] for seq in range(3)]
    with started(make_stores(2, 2), spec) as ranks:
        for rank, mine in zip(ranks, zip(*rounds, strict=True), strict=True):
            for future in [rank.push_unit(unit, grads) for unit in range(3) for grads in mine]:
                future.result(WAIT)
            rank.finish()
        found = masters(ranks[0])
    for name, value in initial_values(spec).items():
        assert torch.equal(found[name], value - in_rounds(rounds, name) * 0.5), name


@pytest.mark.promise("bounded", "accumulation", "transports")
def test_what_is_in_totals_takes_no_memory_of_ranks(make_stores: StoreFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the owners are: each round lies where the one before did."""
    monkeypatch.setattr(contributions, "EARLY", 1)
    spec = make_spec(2, accumulation_steps=4)
    with started(make_stores(2, 2), spec) as ranks:
        for seq in range(4):
            for rank in ranks:
                rank.push(random_grads(spec, 10 * rank.rank + seq))
            for rank in ranks:
                store = rank.store
                assert isinstance(store, RankStore)
                for unit in range(3):
                    kept = () if store._pushes.region is None else store._pushes.region.pushed(unit)
                    for pushed in kept[-1:]:  # none where everything is sent, to owners that are not replaced
                        assert pushed.place >= AT_HOME
                        until(lambda store=store, unit=unit, pushed=pushed: not store._pushes.is_needed(unit, pushed))
        for rank in ranks:
            rank.finish()
        assert masters(ranks[0])


@pytest.mark.promise("exact", "transports")
@pytest.mark.parametrize("steps", [1, 2])
def test_sums_across_ranks_run_in_groups_of_8(make_stores: StoreFactory, steps: int) -> None:
    spec = make_spec(10, accumulation_steps=steps, **PLAIN)
    rounds = [[random_grads(spec, 10 * seq + rank) for rank in range(10)] for seq in range(steps)]
    with started(make_stores(10, 2), spec) as ranks:
        for grads in rounds:
            push_all(ranks, grads)
        for rank in ranks:
            rank.finish()
        found = masters(ranks[0])
    grouped, plain = 0, 0
    for name, value in initial_values(spec).items():
        in_groups = in_rounds(rounds, name) * 0.1
        assert torch.equal(found[name], value - in_groups), name
        grouped += value.numel()
        one_by_one = sum((mine[name] for grads in rounds for mine in grads), torch.zeros_like(value))
        plain += int((in_groups == one_by_one * 0.1).sum())
    assert plain < grouped  # the order matters for these numbers


@pytest.mark.promise("refused", "transports")
def test_an_unplanned_second_backward_of_a_16_bit_unit_names_the_setting(make_stores: StoreFactory) -> None:
    with started(make_stores(1, 1), make_spec(1, dtypes=[BF16, torch.float32, torch.float32])) as (rank,):
        first, second = random_grads(rank.spec, 1), random_grads(rank.spec, 2)
        rank.push(first)
        rank.push(second, [1, 2])  # fp32 memory adds in place
        with pytest.raises(AccumulationError, match=r"rank 0 pushed 'emb' 2 times.*gradient_accumulation_steps"):
            rank.push_unit(0, second).result(WAIT)


# ---- rule 3: counted finish, sequence numbers, duplicates


def test_a_finish_that_overtakes_its_pushes_waits_for_them(make_stores: StoreFactory) -> None:
    with started(make_stores(1, 2), make_spec(1)) as (rank,):
        grads = random_grads(rank.spec, 1)
        rank.push(grads, [2])
        early = replace(rank.report(), counts=(1, 1, 1))
        norm = rank.store.finish(early, None)
        rank.push(grads, [1])
        assert not norm.done()
        rank.push(grads, [0])
        squares = sum(float(g.double().square().sum()) for g in grads.values())
        assert norm.result(WAIT).total == pytest.approx(squares**0.5, rel=1e-12)


def test_pushes_of_one_unit_may_arrive_in_any_order(make_stores: StoreFactory) -> None:
    spec = make_spec(1, accumulation_steps=2)
    first, second = random_grads(spec, 1), random_grads(spec, 2)
    results = []
    for order in ((0, 1), (1, 0)):
        with started(make_stores(1, 2), spec) as (rank,):
            landed = [rank.push_unit(1, (first, second)[seq], seq=seq) for seq in order]
            for future in landed:
                future.result(WAIT)
            rank.counts = {1: 2}
            rank.finish()
            results.append(masters(rank))
    assert equal(*results)


def test_late_duplicates_change_nothing(make_stores: StoreFactory) -> None:
    spec = make_spec(2, accumulation_steps=2)
    schedule = random_schedule(spec, 2)

    def run(duplicates: bool) -> Grads:
        with started(make_stores(2, 2), spec) as ranks:
            for grads in schedule:
                for rank, mine in zip(ranks, grads, strict=True):
                    rank.fetch()
                    rank.push(mine)
                    rank.push(mine)
                    if duplicates:
                        noise = random_grads(spec, 999)
                        rank.push_unit(1, noise, seq=0).result(WAIT)  # both landed already in this step
                        rank.push_unit(1, noise, seq=1).result(WAIT)
                        if rank.step:
                            rank.push_unit(2, noise, step=rank.step - 1, seq=0).result(WAIT)  # decided already
                for rank in ranks:
                    rank.finish()
            return masters(ranks[0])

    assert equal(run(duplicates=False), run(duplicates=True))


def test_a_rank_that_pushed_more_than_it_counted_is_named(make_stores: StoreFactory) -> None:
    with started(make_stores(1, 2), make_spec(1, accumulation_steps=2)) as (rank,):
        rank.push(random_grads(rank.spec, 1))
        rank.push(random_grads(rank.spec, 2))
        norm = rank.store.finish(replace(rank.report(), counts=(1, 1, 1)), None)
        with pytest.raises(StepMismatchError, match=r"rank 0 finished step 0 with 1 pushes of '.*', but 2 arrived"):
            norm.result(WAIT)


# ---- rule 4: discards and clips


def test_a_lower_attempt_counts_no_more(make_stores: StoreFactory) -> None:
    spec = make_spec(2)
    kept, dropped = random_schedule(spec, 2)
    with started(make_stores(2, 2), spec) as ranks:
        ranks[0].push(dropped[0])
        ranks[0].zero_grad()  # rank 1 does not notice
        ranks[1].push(kept[1])
        ranks[0].push(kept[0], [0, 1])
        ranks[0].push_unit(2, dropped[0], attempt=0, seq=0).result(WAIT)  # late, of the attempt that was dropped
        kept[0] = {name: g for name, g in kept[0].items() if not name.startswith("layers.1")}
        for rank in ranks:
            rank.finish(0.5)
        found = masters(ranks[0])
    assert equal(found, train(make_stores, spec, 1, [kept]))


def test_all_ranks_may_discard_after_the_norm_and_try_again(make_stores: StoreFactory) -> None:
    spec = make_spec(2)
    dropped, kept = random_schedule(spec, 2)
    with started(make_stores(2, 2), spec) as ranks:
        push_all(ranks, dropped)
        ask_norms(ranks)
        ranks[0].discard().result(WAIT)
        ranks[0].push(kept[0])
        ahead = ranks[0].ask_norm()  # its second try, while rank 1 has not discarded its first
        assert not ahead.done()
        ranks[1].discard().result(WAIT)
        ranks[1].push(kept[1])
        ranks[1].ask_norm().result(WAIT)
        ahead.result(WAIT)
        decisions = [rank.commit(0.5) for rank in ranks]
        assert {d.result(WAIT).attempts for d in decisions} == {(1, 1)}
        found = masters(ranks[0])
    assert equal(found, train(make_stores, spec, 1, [kept]))


def test_some_discard_and_some_commit_fails_all_naming_them(make_stores: StoreFactory) -> None:
    spec = make_spec(3)
    with started(make_stores(3, 2), spec) as ranks:
        for rank in ranks:
            rank.push(random_grads(spec, 1))
        ask_norms(ranks)
        ranks[1].discard().result(WAIT)
        commits = [ranks[0].commit(), ranks[2].commit()]
        for commit in commits:
            with pytest.raises(StepMismatchError, match=r"step 0 cannot be decided: ranks \[1\] discarded.*ranks \[\d"):
                commit.result(WAIT)


def test_repeated_clips_multiply(make_stores: StoreFactory) -> None:
    spec = make_spec(1)
    grads = random_grads(spec, 1)
    with started(make_stores(1, 1), spec) as (rank,):
        rank.push(grads)
        norm = rank.ask_norm().result(WAIT)
        decision = rank.commit(2.0, 0.5, 1.0).result(WAIT)
        first = 2.0 / (norm.total + 1e-6)
        second = 0.5 / (norm.total * first + 1e-6)
        assert decision.scale == pytest.approx(first * second, rel=1e-12)


def test_a_second_finish_gives_the_norm_of_what_a_clamp_leaves(make_stores: StoreFactory) -> None:
    spec = make_spec(2)
    schedule = [random_grads(spec, seed) for seed in (1, 2)]
    clamp = Clamp(scale=0.5, limit=0.3)
    summed = [sum(grads[name] for grads in schedule) for name in schedule[0]]
    expected = torch.cat([(grad * 0.5).clamp(-0.3, 0.3).flatten() for grad in summed]).double().norm()
    edits = (Edit(EditKind.CLIP_VALUE, 0.3), Edit(EditKind.CLIP_NORM, 0.1))
    with started(make_stores(2, 2), spec) as ranks:
        push_all(ranks, schedule)
        first = [rank.ask_norm() for rank in ranks]
        assert first[0].result(WAIT).total > float(expected)
        again = [rank.store.finish(replace(rank.report(), clamp=clamp), None) for rank in ranks]
        totals = {norm.result(WAIT).total for norm in again}
        assert list(totals) == [pytest.approx(float(expected), rel=1e-6)], "one for all ranks"
        inputs = StepInputs(edits=edits, hyper=spec.hyper)
        decisions = [asked.result(WAIT) for asked in [rank.store.commit(0, inputs) for rank in ranks]]
        factor = 0.1 / (totals.pop() + 1e-6)
        assert (decisions[0].scale, decisions[0].limit) == (pytest.approx(0.5 * factor), pytest.approx(0.3 * factor))


def test_finish_and_commit_in_one_message_equal_two(make_stores: StoreFactory) -> None:
    spec = make_spec(2)
    grads = random_schedule(spec, 1)[0]
    with started(make_stores(2, 2), spec) as ranks:
        push_all(ranks, grads)
        ask_norms(ranks)
        for decision in [rank.commit(0.5) for rank in ranks]:
            decision.result(WAIT)
        found = masters(ranks[0])
    assert equal(found, train(make_stores, spec, 1, [grads]))


# ---- rule 5: one decision record


def test_different_inputs_fail_the_step_before_the_first_tile(make_stores: StoreFactory) -> None:
    spec = make_spec(3)
    with started(make_stores(3, 2), spec) as ranks:
        for rank in ranks:
            rank.push(random_grads(spec, 1))
        norms = [ranks[0].finish(1.0), ranks[1].finish(1.0), ranks[2].finish(1.0, hyper=[HYPER | {"lr": 0.5}])]
        with pytest.raises(StepMismatchError, match=r"ranks [01] and 2.*lr of parameter group 0 is 0.01 against 0.5"):
            norms[2].result(WAIT)
        with pytest.raises(StepMismatchError, match=r"ranks [01] and 2"):
            ranks[1].store.decision(0).result(WAIT)
        with pytest.raises(StepMismatchError, match=r"ranks [01] and 2"):
            ranks[0].fetch_unit(0, 1)[0].result(WAIT)
        assert equal(ranks[1].fetch(0), initial_values(spec))


def clamped(rank: Rank, limit: float) -> Future[Norm]:
    """Ask for the norm of what a clamp leaves."""
    return rank.store.finish(replace(rank.report(), clamp=Clamp(scale=0.5, limit=limit)), None)


def ahead(rank: Rank) -> Rank:
    """The same, some steps further."""
    rank.step = 3
    return rank


DISAGREE: dict[str, tuple[bool, Callable[[Rank, Rank], Sequence[Future[Any]]], str]] = {
    "clips": (False, lambda a, b: [a.finish(1.0), b.finish()], r"ranks 0 and 1 .*\['clip_norm 1.0'\] against \[\]"),
    "steps": (
        False,
        lambda a, b: [a.finish(), ahead(b).finish()],
        "rank 1 is in step 3, but step 0 is not",
    ),
    "clamps": (
        True,
        lambda a, b: [clamped(a, 0.3), clamped(b, 0.4)],
        r"ranks [01] and [01] clip different gradients by norm",
    ),
    "a clip that only one makes": (
        True,
        lambda a, b: [clamped(a, 0.3), b.commit()],
        r"ranks \[0\] clipped by norm after .* ranks \[1\]",
    ),
}
"""What two ranks do -> whether they have had a norm, their calls, the error of both."""


@pytest.mark.parametrize("what", DISAGREE)
def test_ranks_that_disagree_are_named_to_both(make_stores: StoreFactory, what: str) -> None:
    after_norm, calls, said = DISAGREE[what]
    with started(make_stores(2, 1), make_spec(2)) as ranks:
        if after_norm:
            ask_norms(ranks)
        for asked in calls(*ranks):
            with pytest.raises(StepMismatchError, match=said):
                asked.result(WAIT)


def test_a_rank_that_leaves_fails_the_others_at_once_by_name(make_stores: StoreFactory) -> None:
    with started(make_stores(3, 2), make_spec(3)) as ranks:
        take_step(ranks, [random_grads(ranks[0].spec, 1)] * 3)
        ranks[0].push(random_grads(ranks[0].spec, 2))
        norm = ranks[0].finish()
        next_version, published = ranks[0].fetch_unit(0)[0], ranks[0].store.published(1, 2)
        ranks[2].store.close("its data ended")
        for future in (norm, next_version, published, ranks[1].finish()):
            with pytest.raises(
                RankLeftError, match=r"rank 2 left after step 0 \(its data ended\), rank [01] is in step 1"
            ):
                future.result(WAIT)
        assert masters(ranks[1], 1).keys() == masters(ranks[0], 1).keys()  # what is decided stays readable


def test_a_step_is_decided_although_a_rank_left_after_its_finish(make_stores: StoreFactory) -> None:
    spec = make_spec(2)
    grads = random_schedule(spec, 1)[0]
    with started(make_stores(2, 2), spec) as ranks:
        push_all(ranks, grads)
        ranks[0].finish(0.5)
        ranks[0].store.close()
        ranks[1].finish(0.5).result(WAIT)
        found = masters(ranks[1])
    assert equal(found, train(make_stores, spec, 1, [grads]))


def test_anyone_may_ask_for_a_decision_before_and_after_it_is_made(make_stores: StoreFactory) -> None:
    with started(make_stores(2, 2), make_spec(2)) as ranks:
        early = ranks[1].store.decision(0)
        take_step(ranks, [random_grads(ranks[0].spec, 1), random_grads(ranks[0].spec, 2)], 0.25)
        decision = early.result(WAIT)
        assert decision == ranks[0].store.decision(0).result(WAIT)
        assert (decision.step, decision.action, decision.attempts) == (0, Action.APPLY, (0, 0))


def test_a_rank_without_gradients_may_be_a_step_ahead(make_stores: StoreFactory) -> None:
    spec = make_spec(2)
    with started(make_stores(2, 2), spec) as (ahead, other):
        norms = [ahead.finish(), ahead.finish()]
        for seed in (1, 2):
            other.fetch()
            other.push(random_grads(spec, seed))
            norms.append(other.finish())
        assert [norm.result(WAIT).step for norm in norms] == [0, 1, 0, 1]


# ---- rule 6: norms and what is not finite


@functools.cache
def by_one_owner(world_size: int) -> tuple[ModelSpec, list[list[Grads]], Grads]:
    """A model, what its ranks push, and the masters that come of it with one owner in this process."""
    spec = make_spec(world_size, dtypes=[torch.float32, BF16, torch.float32])
    schedule = random_schedule(spec)
    return spec, schedule, train(STORES["inprocess"], spec, 1, schedule)


@pytest.mark.parametrize(("world_size", "num_owners"), [(1, 5), (2, 1), (2, 3), (3, 2), (3, 5)])
def test_bits_depend_neither_on_the_number_of_owners_nor_on_the_store(
    make_stores: StoreFactory, world_size: int, num_owners: int
) -> None:
    spec, schedule, expected = by_one_owner(world_size)
    assert equal(train(make_stores, spec, num_owners, schedule), expected)


def test_the_norm_does_not_depend_on_owners_threads_or_arrival(make_stores: StoreFactory) -> None:
    spec = make_spec(3)
    grads = random_schedule(spec, 1)[0]
    totals = set()
    for num_owners, owner_threads, order in ((1, 1, (0, 1, 2)), (2, 2, (2, 1, 0)), (5, 2, (1, 0, 2))):
        with started(make_stores(3, num_owners, owner_threads=owner_threads), spec) as ranks:
            for unit in (2, 1, 0):
                for rank in order:
                    ranks[rank].push_unit(unit, grads[rank]).result(WAIT)
            norms = [ranks[rank].ask_norm() for rank in order]
            totals |= {norm.result(WAIT).total for norm in norms}
    assert len(totals) == 1


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_skips_the_step_for_all(make_stores: StoreFactory, bad: float) -> None:
    spec = make_spec(2)
    good, poisoned, last = random_schedule(spec, 3)
    poisoned[1]["layers.1.b"][3] = bad
    with started(make_stores(2, 2), spec) as ranks:
        take_step(ranks, good, 0.5)
        before = masters(ranks[0], 1)
        norm = take_step(ranks, poisoned, 0.5)
        assert not norm.finite
        assert ranks[0].store.decision(1).result(WAIT).action is Action.SKIP
        assert equal(masters(ranks[1], 2), before)
        take_step(ranks, last, 0.5)
        found = masters(ranks[0])
    assert equal(found, train(make_stores, spec, 1, [good, last]))


def test_nonfinite_raise_names_the_parameter_and_updates_nothing(make_stores: StoreFactory) -> None:
    spec = make_spec(2, nonfinite="raise")
    grads = random_schedule(spec, 1)[0]
    grads[0]["layers.0.b"][0] = torch.nan
    with started(make_stores(2, 2), spec) as ranks:
        push_all(ranks, grads)
        norms = [rank.finish() for rank in ranks]
        for norm in norms:
            with pytest.raises(NonFiniteGradientError, match=r"step 0: the gradient of 'layers.0.b' is inf or nan"):
                norm.result(WAIT)
        assert equal(masters(ranks[0], 1), initial_values(spec))


# ---- presence


def test_a_parameter_without_any_gradient_stands_still(make_stores: StoreFactory) -> None:
    spec = make_spec(2, hyper=[HYPER, HYPER | {"lr": 0.1, "weight_decay": 0.0}])
    full = random_schedule(spec, 4)
    schedule: list[list[Grads]] = []
    for step, grads in enumerate(full):
        absent = {0: [(), ()], 1: [("emb.weight", "layers.0.w"), ("emb.weight",)], 2: [("layers.1.w",), ()]}
        names = absent.get(step, [("layers.0.b", "layers.1.w", "layers.1.b"), ("layers.0.s",)])
        schedule.append([{n: g for n, g in mine.items() if n not in names[i]} for i, mine in enumerate(grads)])
    plain = PlainAdamW(spec, fused=True)
    with started(make_stores(2, 3), spec) as ranks:
        for grads in schedule:
            take_step(ranks, grads, 0.5)
            plain.step(grads, 0.5)
        found = masters(ranks[0])
    for name, value in plain.values.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


# ---- rule 7: one region


def test_a_version_that_is_overwritten_cannot_be_read(make_stores: StoreFactory) -> None:
    with started(make_stores(1, 2), make_spec(1)) as (rank,):
        take_step([rank], [random_grads(rank.spec, 1)])
        rank.fetch(1)
        with pytest.raises(StoreError, match="'emb' v0 is gone: shard"):
            rank.fetch_unit(0, 0)[0].result(WAIT)


@pytest.mark.parametrize("num_owners", [3, 12])  # of 11 shards: one owner has nothing
def test_a_checkpoint_is_exactly_its_version_although_ranks_go_on(
    make_stores: StoreFactory, num_owners: int, tmp_path: Path
) -> None:
    spec = make_spec(2, dtypes=[torch.float32, BF16, torch.float32])
    schedule = random_schedule(spec, 3)
    directory = tmp_path / "step-000001"
    with started(make_stores(2, num_owners), spec) as ranks:
        take_step(ranks, schedule[0], 0.5)
        saves = []
        for rank in ranks:
            file = write_rank_state(staging_path(directory), rank.rank, {"at": rank.step}, {})
            saves.append(rank.store.save(1, directory, (file,)))
        for grads in schedule[1:]:
            take_step(ranks, grads, 0.5)
        infos = [save.result(WAIT) for save in saves]
        end = masters(ranks[0])
    assert {info.step for info in infos} == {1}
    assert not staging_path(directory).exists()
    with CheckpointReader(directory) as reader:
        once = train(make_stores, spec, 1, schedule[:1])
        saved = {n: reader.read_slice(n, MASTER, 0, v.numel()) for n, v in once.items() if v.numel()}
        assert equal(saved, {name: once[name].flatten() for name in saved})

    for other in (1, 2):  # resumed with another number of owners
        with started(make_stores(2, other), replace(spec, restore_from=str(directory))) as ranks:
            assert [rank.step for rank in ranks] == [1, 1]
            for grads in schedule[1:]:
                take_step(ranks, grads, 0.5)
            assert equal(masters(ranks[0]), end)


def test_the_same_save_again_is_another_save(make_stores: StoreFactory, tmp_path: Path) -> None:
    directory = tmp_path / "best"
    directory.mkdir()
    (directory / "notes").touch()  # of the user: nothing may be put there
    with started(make_stores(2, 2), make_spec(2)) as ranks:

        def save() -> list[Future[CheckpointInfo]]:
            staging = staging_path(directory)
            files = [write_rank_state(staging, rank.rank, {}, {}) for rank in ranks]
            asked = [rank.store.save(0, directory, (file,)) for rank, file in zip(ranks, files, strict=True)]
            wait(asked, WAIT)
            return asked

        for refused in save():
            with pytest.raises(CheckpointError, match="not a checkpoint"):
                refused.result(0)
        for _ in range(2):
            shutil.rmtree(directory)
            for saved in save():
                assert saved.result(0).path == str(directory)
            assert (directory / MANIFEST).is_file()


def test_a_save_that_an_owner_failed_can_be_tried_again_by_a_rank_at_once(
    make_stores: StoreFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank's file of its next try is there before the others look what became of the first."""
    spec, directory, write, first = make_spec(2), tmp_path / "best", snapshot.write_tensors, iter([True])

    def fail_once(*args: Any, **named: Any) -> FileEntry:
        if next(first, False):
            raise CheckpointError("the disk is full")
        return write(*args, **named)

    def ask(rank: Rank) -> Future[CheckpointInfo]:
        return rank.store.save(0, directory, (write_rank_state(staging_path(directory), rank.rank, {}, {}),))

    monkeypatch.setattr(snapshot, "write_tensors", fail_once)
    with started(make_stores(2, 2), spec) as ranks:
        saves = [ask(rank) for rank in ranks]
        again = []
        for rank, save in zip(ranks, saves, strict=True):
            with pytest.raises(CheckpointError, match="the disk is full"):
                save.result(WAIT)
            withdraw(staging_path(directory) / rank_file_name(rank.rank))
            again.append(ask(rank))
        for save in again:
            save.result(WAIT)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_ranks_that_save_different_things_are_named(make_stores: StoreFactory, tmp_path: Path) -> None:
    with make_stores(2, 1) as stores:
        start(stores, make_spec(2))
        asked = [stores[rank].save(0, tmp_path / f"step-00000{rank}", ()) for rank in range(2)]
        refused, _ = wait(asked, WAIT, FIRST_COMPLETED)  # the one that arrived last
        with pytest.raises(StepMismatchError, match=r"rank \d saves v0 to .*step-00000\d, rank \d saves v0 to"):
            refused.pop().result(0)


# ---- rule 8: waits name who waits for what


STALLS: dict[str, tuple[Callable[[Rank], Future[Any]], str]] = {
    "fetch": (
        lambda rank: rank.fetch_unit(1, 1)[0],
        r"rank 0 waits \S+ s for layers.0 v1 from optimizer \d: .*not decided",
    ),
    "finish": (
        lambda rank: rank.finish(),
        r"rank 0 waits \S+ s for the .*norm of step 0.*: rank 1 has not finished",
    ),
    "write": (
        lambda rank: rank.store.write(0, 0, COMPUTE, torch.zeros(rank.spec.layout.units[0].numel)),
        r"rank 0 waits \S+ s for the write to emb at step 0.*written to 'emb'.*, rank 1 has",
    ),
}


@pytest.mark.parametrize("wait", STALLS)
def test_a_wait_that_stalls_names_who_waits_for_what(
    make_stores: StoreFactory, stall_clock: StallClock, wait: str
) -> None:
    call, named = STALLS[wait]
    with started(make_stores(2, 2), make_spec(2)) as ranks, pytest.raises(StallError, match=named):
        stall_clock.stall(call(ranks[0]))


# ---- rule 9: handshake


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (partial(replace, world_size=3), "world_size: 3 against 2"),
        (partial(replace, optimizer="torch.optim.adam:Adam"), "optimizer: 'torch.optim.adam:Adam' against"),
        (partial(replace, hyper=(HYPER | {"lr": 0.5},)), "lr 0.5 against 0.01 in parameter group 0; all ranks"),
        (partial(replace, hyper=(HYPER, HYPER)), "hyper: 2 against 1 parameter groups"),
        (partial(replace, kernel="torch"), "kernel: 'torch' against 'auto'"),
        (lambda spec: replace(spec, layout=make_spec(shard_numel=1024).layout), "layout"),
        (lambda spec: replace(spec, layout=make_spec(dtypes=[BF16] * 3).layout), "layout.*bfloat16.*float32"),
    ],
)
def test_a_rank_that_differs_is_refused_naming_both_sides(make_stores: StoreFactory, change, what: str) -> None:  # type: ignore[no-untyped-def]
    spec = make_spec(2)
    with make_stores(2, 1) as stores:
        stores[0].attach(spec)
        with pytest.raises(HandshakeError, match=f"rank 1 differs from rank 0 in {what}"):
            stores[1].attach(change(spec))


# ---- misuse, and the end


def test_use_before_attach_is_an_error(make_stores: StoreFactory) -> None:
    with make_stores(1, 1) as stores:
        for asked in (stores[0].fetch(0, 0, COMPUTE, torch.zeros(1)), stores[0].decision(0)):
            with pytest.raises(StoreError, match="rank 0 has not attached"):
                asked.result(WAIT)


def test_a_cancelled_fetch_never_writes_its_buffer(make_stores: StoreFactory, caplog: pytest.LogCaptureFixture) -> None:
    with started(make_stores(1, 2), make_spec(1)) as (rank,):
        future, out = rank.fetch_unit(1, 1)
        assert future.cancel()
        take_step([rank], [random_grads(rank.spec, 1)])
        rank.fetch(1)  # the new version is there
        assert out.isnan().all()
    assert [record for record in caplog.records if record.name == "concurrent.futures"] == []


def test_a_buffer_of_the_wrong_size_or_dtype_is_refused(make_stores: StoreFactory) -> None:
    with started(make_stores(1, 1), make_spec(1)) as (rank,):
        for buffer, said in (
            (torch.zeros(5), r"emb.*960 elements"),
            (torch.zeros(960, dtype=BF16), "fetch of 'emb' takes float32, got bfloat16"),
        ):
            with pytest.raises(StoreError, match=said):
                rank.store.fetch(0, 0, COMPUTE, buffer).result(WAIT)


def test_close_is_idempotent_and_ends_the_store(make_stores: StoreFactory) -> None:
    with started(make_stores(1, 1), make_spec(1)) as (rank,):
        rank.store.close()
        rank.store.close()
        with pytest.raises(StoreError, match="rank 0"):
            rank.fetch_unit(0, 0)[0].result(WAIT)


def test_close_ends_what_waits_and_leaves_no_thread(make_stores: StoreFactory) -> None:
    before, spec = threads(), make_spec(2, accumulation_steps=2)
    with started(make_stores(2, 2), spec) as ranks:
        early = ranks[0].push_unit(1, random_grads(spec, 1), seq=1)  # the one before it never comes
        waits = [early, ranks[0].fetch_unit(0, 1)[0], ranks[0].finish(), ranks[0].store.decision(4)]
        ranks[0].store.close("done")
        for each in waits:
            with pytest.raises((StoreClosedError, RankLeftError)):
                each.result(WAIT)
        ranks[1].store.close()
        assert threads_left(before, "rayzero-rank", "stall-watch-rank", "store-") == []
    assert threads_left(before) == []
