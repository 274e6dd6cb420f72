"""Means over ranks: what every store must do with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from clock import StallClock

from rayzero.errors import ConfigError, RankLeftError, StallError, StateLostError, StepMismatchError, StoreError
from rayzero.lead.lead import StepLead
from rayzero.lead.requests import Means
from rayzero.protocol.messages import COMPUTE, MEAN_BYTES, MeanInput
from rayzero.protocol.store import ParameterStore
from store.stores import STORES, StoreFactory
from store.toy import WAIT, Rank, ask_norms, make_spec, push_all, random_grads, start, started, take_step

Mean = tuple[float, ...]


def number(value: float, weight: float = 1.0) -> MeanInput:
    return MeanInput(values=(value,), weight=weight)


def named(weight: float = 1.0, **values: float) -> MeanInput:
    return MeanInput(names=tuple(sorted(values)), values=tuple(values[name] for name in sorted(values)), weight=weight)


def ask(ranks: Sequence[Rank], given: Sequence[MeanInput]) -> list[Future[Mean]]:
    return [rank.store.mean(mine) for rank, mine in zip(ranks, given, strict=True)]


def means(ranks: Sequence[Rank], given: Sequence[MeanInput]) -> list[Mean]:
    return [asked.result(WAIT) for asked in ask(ranks, given)]


def test_every_rank_has_the_bits_of_fp64_sums_in_rank_order(make_stores: StoreFactory) -> None:
    values = [0.1, 1e16, -1e16]  # (0.1 + 1e16) - 1e16 is 0: another order gives another mean
    with started(make_stores(3, 2), make_spec(3)) as ranks:
        assert means(ranks, [number(value) for value in values]) == [(0.0,)] * 3
        late_first = ask(ranks[::-1], [number(value) for value in values[::-1]])
        assert [asked.result(WAIT) for asked in late_first] == [(0.0,)] * 3
        third = (0.1 + 0.2 + 0.3) / 3
        assert means(ranks, [number(0.1), number(0.2), number(0.3)]) == [(third,)] * 3


def test_weights_make_uneven_shares_count_as_they_should(make_stores: StoreFactory) -> None:
    with started(make_stores(3, 2), make_spec(3)) as ranks:
        given = [named(5, loss=2.0, acc=0.5), named(3, loss=4.0, acc=1.0), named(0, loss=torch.nan, acc=torch.inf)]
        assert means(ranks, given) == [((2.5 + 3.0) / 8, (10.0 + 12.0) / 8)] * 3
        for asked in ask(ranks, [number(1.0, 0.0)] * 3):
            with pytest.raises(ConfigError, match=r"mean_over_ranks\(\) of a number: the weights of all ranks add up"):
                asked.result(WAIT)
        (mean,) = set(means(ranks, [number(value) for value in (1.0, 2.0, 3.0)]))  # what failed failed alone
        assert mean == (2.0,)


@pytest.mark.parametrize(
    ("given", "mean"),
    [
        ([(1.5e308, 1.0), (1.5e308, 1.0)], 1.5e308),
        ([(1.5e308, 1.0), (-1.5e308, 1.0), (1.5e308, 1.0), (0.0, 1.0)], 0.375e308),
        ([(1e308, 1e10), (0.5e308, 1e10)], 0.75e308),
        ([(3.0, 1e308), (1.0, 1e308)], 2.0),
        ([(1.5e308, 1.0), (1.5e308, 1.0), (-math.inf, 1.0)], -math.inf),
        ([(1.5e308, 1e308), (math.inf, 1e308)], math.inf),
    ],
)
def test_sums_past_the_largest_number_have_their_mean_all_the_same(
    given: list[tuple[float, float]], mean: float
) -> None:
    asking = Means()
    futures = [asking.ask(rank, 1, number(value, weight)) for rank, (value, weight) in enumerate(given)]
    for outcome, made in asking.end(len(given), {}):
        assert made == (mean,)
        outcome.set_result(made)
    assert [asked.result(0) for asked in futures] == [(mean,)] * len(given)


def test_a_nan_beside_sums_past_the_largest_number_stays_nan() -> None:
    asking = Means()
    for rank, value in enumerate((1.5e308, 1.5e308, math.nan)):
        asking.ask(rank, 1, number(value))
    [(_, (mean,))] = asking.end(3, {})  # type: ignore[misc]
    assert math.isnan(mean)


def test_shapes_and_names_come_back_in_order_and_nan_stays_nan(make_stores: StoreFactory) -> None:
    with started(make_stores(2, 1), make_spec(2)) as ranks:
        grid = [MeanInput(shape=(2, 2), values=(1.0, 2.0, 3.0, at), weight=1.0) for at in (4.0, torch.nan)]
        for mean in means(ranks, grid):
            assert mean[:3] == (1.0, 2.0, 3.0)
            assert mean[3] != mean[3]


def test_the_largest_mean_is_answered(make_stores: StoreFactory) -> None:
    width = 16
    count = MEAN_BYTES // (8 + 4 + width)
    large = named(**{f"{i:0{width}}": i * 1.5 for i in range(count)})
    assert MEAN_BYTES - width - 12 < large.size_bytes <= MEAN_BYTES
    many = MeanInput(shape=(1,) * 62 + (50, 10), values=(1e300,) * 500, weight=1e-300)
    assert many.size_bytes == MEAN_BYTES
    with started(make_stores(2, 2), make_spec(2)) as ranks:
        assert means(ranks, [large] * 2) == [large.values] * 2
        assert len(means(ranks, [many] * 2)[1]) == 500


# ---- beside the step


def test_it_waits_for_no_step_and_no_step_waits_for_it(make_stores: StoreFactory) -> None:
    spec = make_spec(2)
    grads = [random_grads(spec, rank) for rank in range(2)]
    with started(make_stores(2, 2), spec) as ranks:
        assert means(ranks, [number(1.0)] * 2) == [(1.0,)] * 2  # before the first step
        push_all(ranks, grads)
        norms = [rank.ask_norm() for rank in ranks]
        totals = {norm.result(WAIT).total for norm in norms}
        assert means(ranks, [number(2.0)] * 2) == [(2.0,)] * 2  # between clip and step
        first = ranks[0].commit(0.5)
        late = ask(ranks, [number(3.0)] * 2)  # one has committed, the other has not
        assert [asked.result(WAIT) for asked in late] == [(3.0,)] * 2
        assert not first.done()
        decisions = [ranks[1].commit(0.5).result(WAIT), first.result(WAIT)]
        assert {decision.norm for decision in decisions} == totals
        for rank in ranks:
            rank.fetch(1)
        take_step(ranks, grads)


def test_a_rank_that_finished_may_be_waited_for_in_a_mean(make_stores: StoreFactory) -> None:
    """Rank 1's step() has returned: it is on its way to the mean that rank 0 calls before its own step()."""
    with started(make_stores(2, 2), make_spec(2)) as ranks:
        finished = ranks[1].finish(0.5)
        early = ranks[0].store.mean(number(1.0))
        assert means(ranks[1:], [number(2.0)]) == [(1.5,)]
        assert early.result(WAIT) == (1.5,)
        ranks[0].finish(0.5).result(WAIT)
        finished.result(WAIT)


def test_the_calls_of_a_rank_that_gave_up_still_count(make_stores: StoreFactory, stall_clock: StallClock) -> None:
    with started(make_stores(2, 2), make_spec(2)) as ranks:
        with pytest.raises(
            StallError, match=r"rank 0 waits \S+ s for the mean of 'loss': rank 1 has not made call 1 of"
        ):
            stall_clock.stall(ranks[0].store.mean(named(loss=1.0)))
        assert means(ranks[1:], [named(loss=2.0)]) == [(1.5,)]
        assert means(ranks, [named(loss=2.0)] * 2) == [(2.0,)] * 2


# ---- what differs, leaves or waits elsewhere


@pytest.mark.parametrize(
    ("ours", "theirs", "what"),
    [
        (named(loss=1.0, acc=1.0), named(loss=1.0, f1=1.0), r"only rank [01] gave 'acc', only rank 2 gave 'f1'"),
        (named(loss=1.0, acc=1.0), named(loss=1.0), r"only rank [01] gave 'acc'; "),
        (named(loss=1.0), number(1.0), r"rank [01] gave 'loss', rank 2 gave a number"),
        (
            number(1.0),
            MeanInput(shape=(1,), values=(1.0,), weight=1.0),
            r"a number, rank 2 gave a tensor of shape \(1,\)",
        ),
        (
            MeanInput(shape=(3, 2), values=(0.0,) * 6, weight=1.0),
            MeanInput(shape=(2, 3), values=(0.0,) * 6, weight=1.0),
            r"rank [01] gave a tensor of shape \(3, 2\), rank 2 gave a tensor of shape \(2, 3\)",
        ),
    ],
)
def test_ranks_that_give_different_things_fail_by_name_on_all(
    make_stores: StoreFactory, ours: MeanInput, theirs: MeanInput, what: str
) -> None:
    with started(make_stores(3, 2), make_spec(3)) as ranks:
        early = ask([ranks[0], ranks[2]], [ours, theirs])
        for asked in (*early, ranks[1].store.mean(ours)):  # also who comes after it has failed
            with pytest.raises(StepMismatchError, match=rf"^call 1 of mean_over_ranks\(\): .*{what}"):
                asked.result(WAIT)
        assert means(ranks, [ours] * 3) == [ours.values] * 3
        take_step(ranks, [random_grads(ranks[0].spec, 1)] * 3)  # the run goes on


def test_long_lists_of_names_are_cut_in_errors(make_stores: StoreFactory) -> None:
    ours, theirs = (named(**{f"{letter}{i}": 0.0 for i in range(200)}) for letter in "ab")
    with started(make_stores(2, 1), make_spec(2)) as ranks:
        for asked in ask(ranks, [ours, theirs]):
            with pytest.raises(
                StepMismatchError, match=r"only rank 0 gave 'a0', .* and 192 more, only rank 1 gave 'b0'"
            ) as e:
                asked.result(WAIT)
            assert len(str(e.value)) < 500


def test_a_rank_that_leaves_fails_the_others_call_by_name(make_stores: StoreFactory) -> None:
    with started(make_stores(3, 2), make_spec(3)) as ranks:
        means(ranks, [number(1.0)] * 3)
        waiting = ask(ranks[:2], [named(acc=1.0)] * 2)
        ranks[2].store.close("end of the training loop")
        for asked in waiting:
            with pytest.raises(
                RankLeftError,
                match=r"rank 2 left \(end of the training loop\) before call 2 of mean_over_ranks\(\), which rank [01] "
                "makes with 'acc'; every rank must call it the same number of times",
            ):
                asked.result(WAIT)
        with pytest.raises(RankLeftError, match="rank 2 left"):
            ranks[1].store.mean(number(1.0)).result(WAIT)


OTHER_CALLS: dict[str, tuple[Callable[[Rank, Path], Future[Any]], str]] = {
    "asks for the norm": (
        lambda rank, _: rank.ask_norm(),
        r"rank 1 has asked for the norm of step 0, but rank 0 has called mean_over_ranks\(\) before "
        "that; every rank must call them in the same order",
    ),
    "saves": (
        lambda rank, folder: rank.store.save(0, folder / "a", ()),
        r"rank 1 has asked to save v0, but rank 0 has called mean_over",
    ),
    "writes": (
        lambda rank, _: rank.store.write(1, 0, COMPUTE, torch.zeros(rank.spec.layout.units[1].numel)),
        r"rank 1 has written to 'layers.0' at step 0, but rank 0 has",
    ),
}


@pytest.mark.parametrize("what", OTHER_CALLS)
def test_a_rank_in_a_mean_and_one_that_makes_another_call_are_told_at_once(
    make_stores: StoreFactory, what: str, tmp_path: Path
) -> None:
    call, said = OTHER_CALLS[what]
    with started(make_stores(2, 2), make_spec(2)) as ranks:
        for future in (ranks[0].store.mean(number(1.0)), call(ranks[1], tmp_path)):
            with pytest.raises(StepMismatchError, match=said):
                future.result(WAIT)


def test_what_ends_the_run_ends_means(make_stores: StoreFactory) -> None:
    with started(make_stores(3, 2), make_spec(3)) as ranks:
        waiting = ranks[2].store.mean(number(1.0))
        for rank, hyper in zip(ranks, (1e-3, 1e-4), strict=False):
            rank.finish(hyper=[{**ranks[0].spec.hyper[0], "lr": hyper}])
        for asked in (waiting, waiting):
            with pytest.raises(StepMismatchError, match="lr of parameter group 0"):
                asked.result(WAIT)
        with pytest.raises(StoreError):
            ranks[1].store.mean(number(1.0)).result(WAIT)


# ---- at the lead


def test_a_repeated_message_changes_nothing() -> None:
    lead = StepLead([])
    for rank in range(2):
        lead.attach(rank, make_spec(2))
    first = [lead.mean(0, 1, number(1.0)), lead.mean(0, 1, number(7.0))]
    lead.mean(1, 1, number(2.0))
    assert [asked.result(0) for asked in first] == [(1.5,)] * 2
    assert lead.mean(0, 1, number(5.0)).result(0) == (1.5,)  # its answer was lost on the way
    second = lead.mean(1, 2, number(4.0))
    assert lead.mean(0, 1, number(1.0)).result(0) == (1.5,)
    lead.mean(0, 2, number(0.0))
    assert second.result(0) == (2.0,)
    assert lead.mean(1, 1, number(2.0)).result(0) == (1.5,)  # a rank that has died and come back asks again
    for call in range(3, 70):
        for rank in range(2):
            lead.mean(rank, call, number(0.0))
    late = lead.mean(1, 1, number(2.0))  # all have gone on: it came twice over the network
    with pytest.raises(
        StateLostError, match=r"rank 1 repeats call 1 of mean_over_ranks\(\), whose result is no longer kept"
    ):
        late.result(0)
    assert lead.describe() == "ranks [0, 1] have not finished step 0"


def test_the_value_of_a_rank_that_has_left_since_counts() -> None:
    lead = StepLead([])
    for rank in range(2):
        lead.attach(rank, make_spec(2))
    lead.mean(1, 1, number(3.0))
    lead.leave(1, "killed")
    assert lead.mean(0, 1, number(1.0)).result(0) == (2.0,)


def test_a_rank_that_waits_for_its_norm_beside_a_mean_is_waited_for() -> None:
    """A loop's second thread may ask for the mean: the rank in it has done what the others wait for."""
    lead, spec = StepLead([]), make_spec(3)
    ranks = [Rank(rank, cast(ParameterStore, None), spec) for rank in range(3)]
    for rank in ranks:
        lead.attach(rank.rank, spec)
    norms = [lead.finish(rank.report(), None) for rank in ranks[:2]]
    asked = lead.mean(0, 1, number(1.0))
    assert not any(future.done() for future in (asked, *norms))
    lead.finish(ranks[2].report(), None)
    assert [norm.result(0).total for norm in norms] == [0.0, 0.0]


def test_the_lead_keeps_no_call_that_all_ranks_have_left_behind() -> None:
    lead = StepLead([])
    for rank in range(2):
        lead.attach(rank, make_spec(2))
    for call in range(1, 100):
        for rank in range(2):
            lead.mean(rank, call, number(1.0))
    assert len(lead._means._calls) == 1 + 64  # which a rank that comes back may ask for again


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", [name for name in STORES if name != "inprocess"])
def test_a_mean_ends_with_the_error_that_nobody_foresaw_in_the_lead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(*args: object) -> None:
        raise RuntimeError("broken")

    spec = make_spec(3)  # rank 2 asks for no mean, so none can be made
    with STORES[name](3, 2) as stores:
        ranks = start(stores, spec)
        take_step(ranks, [random_grads(spec, 0)] * 3)
        for rank in ranks:
            rank.push(random_grads(spec, 1))
        ask_norms(ranks)
        waiting = [ranks[0].store.mean(number(1.0))]
        monkeypatch.setattr("rayzero.lead.lead.decide", decide)
        commits = [rank.commit() for rank in ranks]
        waiting.append(ranks[1].store.mean(number(1.0)))  # in the same breath as the commit
        for each in (*waiting, *commits):
            with pytest.raises(StoreError, match=r"an owner failed: RuntimeError\('broken'\)"):
                each.result(WAIT)
