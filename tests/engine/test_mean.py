"""``rayzero.mean_over_ranks``: what comes back, when it may be called, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.loop.keeper import RepeatedMeans, key_of
from rayzero.errors import ConfigError, StateLostError, UnsupportedError
from rayzero.protocol.messages import MeanInput
from rayzero.telemetry.names import EXPOSED_WAIT_SECONDS
from rayzero.testing import Killed, run_ranks
from tests.support import needs
from tests.support.faults import Fault, Faults

from .models import Net, prepared_copy, seeded, token_loss, tokens


def on_ranks(loop: Callable[[RankContext], Any], world_size: int = 2, **options: Any) -> list[Any]:
    """The loop on ranks that are threads, each with a small prepared model."""
    models = [seeded(partial(nn.Linear, 4, 4)) for _ in range(world_size)]

    def prepared(context: RankContext) -> Any:
        model = models[context.rank]
        rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return loop(context)

    return run_ranks(prepared, world_size, 1, **options)


def test_each_kind_comes_back_as_it_was_given() -> None:
    def loop(context: RankContext) -> list[Any]:
        rank = context.rank
        grid = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16) * (1 + 2 * rank)
        return [
            rayzero.mean_over_ranks(rank),
            rayzero.mean_over_ranks(grid),
            rayzero.mean_over_ranks(torch.tensor(float(rank), requires_grad=True)),
            rayzero.mean_over_ranks(torch.tensor(float(rank)) if rank else 0.0),  # one kind each: all are one number
            rayzero.mean_over_ranks({"z": rank, "a": torch.tensor(2.0 * rank), "m": numpy.float32(rank)}),
            rayzero.mean_over_ranks({"a": 1.0, "b": 3.0} if rank else {"b": 1.0, "a": 3.0}, weight=1 + rank),
        ]

    for rank, (number, grid, loss, mixed, named, unsorted) in enumerate(on_ranks(loop)):
        assert (type(number), number) == (float, 0.5)
        assert grid.dtype == torch.bfloat16
        assert grid.tolist() == [[2.0, 4.0], [6.0, 8.0]]
        assert (loss.shape, loss.dtype, loss.requires_grad, loss.item()) == ((), torch.float32, False, 0.5)
        assert mixed == 0.5
        assert isinstance(mixed, torch.Tensor) == bool(rank)
        assert list(named) == ["z", "a", "m"]
        assert (type(named["z"]), type(named["m"]), named["a"].item()) == (float, float, 1.0)
        assert list(unsorted) == (["a", "b"] if rank else ["b", "a"])
        assert dict(unsorted) == {"a": (3.0 + 2 * 1.0) / 3, "b": (1.0 + 2 * 3.0) / 3}


def test_alone_it_is_the_value_before_prepare_and_after(alone: RankContext) -> None:
    third = 1 / 3
    for _ in range(2):
        assert rayzero.mean_over_ranks(third, weight=0.3) == third  # 0.3 * third / 0.3 is not
        tensor = torch.rand(3, dtype=torch.float16, requires_grad=True)
        mean = rayzero.mean_over_ranks(tensor)
        assert torch.equal(mean, tensor)
        assert not mean.requires_grad
        assert rayzero.mean_over_ranks({"loss": third}, weight=7) == {"loss": third}
        with pytest.raises(ConfigError, match="of 'loss': the weights of all ranks add up to 0"):
            rayzero.mean_over_ranks({"loss": third}, weight=0)
        if not alone.prepared:
            model = nn.Linear(2, 2)
            rayzero.prepare(model, torch.optim.SGD(model.parameters()))


def test_several_ranks_are_connected_by_prepare_and_not_before() -> None:
    def loop(context: RankContext) -> None:
        rayzero.mean_over_ranks(1.0)

    with pytest.raises(UnsupportedError, match=r"called before rayzero.prepare\(\), which connects the run's 2 ranks"):
        run_ranks(loop, 2, 1)


@pytest.mark.spread(1)
@pytest.mark.parametrize("transport", ["inproc", "grpc", "shm"])
def test_a_loop_may_call_it_wherever_it_likes_and_learns_what_it_learns_without(transport: Any) -> None:
    base = [seeded(Net) for _ in range(4)]

    def loop(asks: bool, context: RankContext) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = base[context.rank + 2 * asks]
        config = ZeroConfig(gradient_accumulation_steps=2)
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), config)
        other = nn.Linear(3, 3)  # of the run's further models: one sequence of means for all
        rayzero.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
        means: list[float] = []

        def ask() -> None:
            if asks:
                means.append(rayzero.mean_over_ranks(context.rank + 10.0 * len(means)))

        ask()
        for step in range(3):
            for _ in range(2):
                loss = token_loss(model, tokens(step, context.rank))
                ask()
                (loss / 2).backward()
                ask()
            optimizer.clip_grad_norm_(1.0)
            ask()
            optimizer.step()
            ask()
            optimizer.zero_grad()
        return means, rayzero.full_state_dict(model)

    without = run_ranks(partial(loop, False), 2, 2, transport)
    both = run_ranks(partial(loop, True), 2, 2, transport)
    for means, state in both:
        assert means == [0.5 + 10.0 * call for call in range(19)]
        assert all(torch.equal(value, without[0][1][name]) for name, value in state.items())


def test_the_wait_is_counted_as_one_for_other_ranks() -> None:
    def loop(context: RankContext) -> float:
        rayzero.mean_over_ranks(1.0)
        return context.recorder.total(EXPOSED_WAIT_SECONDS, cause="mean")  # type: ignore[attr-defined]

    assert all(waited > 0 for waited in on_ranks(loop))


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("0.5", r"takes a number, a floating-point tensor, or a mapping .*, got str$"),
        ({}, "an empty mapping; give it at least one number"),
        ({1: 2.0}, "mappings whose names are text, got 1"),
        ({10**5000: 2.0}, "mappings whose names are text, got int"),
        ({"loss \ud800": 2.0}, r"names that are valid Unicode, got 'loss \\ud800'"),
        ({"loss": "low"}, "got str of 'loss'$"),
        ({"loss": torch.ones(2)}, r"got Tensor of shape \(2,\) of 'loss'$"),
        ({"hits": torch.tensor(3)}, "takes floating-point tensors, got torch.int64 of 'hits'$"),
        (torch.tensor([True]), "takes floating-point tensors, got torch.bool$"),
        (10**400, "got a number that is too large for a float$"),
        ({"loss": 10**400}, "got a number of 'loss' that is too large for a float$"),
        (torch.ones(2).to_sparse(), r"dense tensors with values, got torch.sparse_coo on cpu$"),
        (torch.ones(2, device="meta"), r"dense tensors with values, got torch.strided on meta$"),
        ({"loss": torch.ones((), device="meta")}, r"got torch.strided on meta of 'loss'$"),
        (torch.ones(501), r"at most 4,000 bytes: .*a tensor of shape \(501,\) needs 4,008\. Give it fewer numbers"),
        ({f"class {i:03}": 0.0 for i in range(200)}, r"'class 000', .* and 192 more needs 4,200"),
    ],
)
def test_what_has_no_mean_is_refused_in_one_line(alone: RankContext, value: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        rayzero.mean_over_ranks(value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "weight",
    [
        -1, float("nan"), float("inf"), "3", None, torch.ones(2, 2), numpy.ones((2, 2)), 10**400, 10**5000,
        Fraction(10**400), torch.ones((), device="meta"), torch.tensor(1j),
    ],
    ids=range(12),
)  # fmt: skip
def test_weights_are_finite_and_not_negative(alone: RankContext, weight: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"weight of mean_over_ranks\(\) must be a finite number >= 0, got"
    ) as refused:
        rayzero.mean_over_ranks(1.0, weight=weight)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200


def test_weights_may_be_any_real_number(alone: RankContext) -> None:
    for weight in (torch.tensor(3), Fraction(1, 2), numpy.int64(4), True):
        assert rayzero.mean_over_ranks(2.5, weight=weight) == 2.5  # type: ignore[call-overload]


# ---- calls that a rank which has come back makes again


def given(value: float, weight: float = 1.0, name: str = "") -> MeanInput:
    return MeanInput(names=(name,) if name else (), values=(value,), weight=weight)


def repeated(*made: MeanInput) -> RepeatedMeans:
    """A rank whose last calls, up to its 10th one, were ``made``."""
    return RepeatedMeans(1, [key_of(each) for each in made], 10)


def test_calls_get_the_numbers_of_the_earlier_ones() -> None:
    means = repeated(given(1.0), given(2.0), given(3.0))
    assert [means.next(given(2.0)), means.next(given(3.0))] == [[9], [10]]
    means.end()


def test_calls_that_ended_an_iteration_need_not_be_made_again() -> None:
    repeated(given(1.0), given(2.0)).end()


def test_later_calls_tell_equal_ones_apart() -> None:
    means = repeated(given(0.0), given(0.0), given(0.0), given(5.0))
    assert means.next(given(0.0)) == [7, 8, 9]
    assert means.next(given(5.0)) == [10]
    means.end()
    flags = repeated(given(0.0), given(0.0))
    assert flags.next(given(0.0)) == [9, 10]
    flags.end()


@pytest.mark.parametrize("other", [given(-0.0), given(0.0, 2.0), given(0.0, name="loss"), given(float("nan"))], ids=str)
def test_another_call_is_refused(other: MeanInput) -> None:
    with pytest.raises(StateLostError, match=r"rank 1 .* calls mean_over_ranks\(\) of"):
        repeated(given(0.0)).next(other)


def test_more_or_fewer_calls_are_refused() -> None:
    means = repeated(given(1.0), given(2.0))
    means.next(given(1.0))
    with pytest.raises(StateLostError, match="after fewer calls"):
        means.end()
    means.next(given(2.0))
    with pytest.raises(StateLostError, match=r"of a number before a forward"):
        means.next(given(2.0))


def flags(context: RankContext, ending: float, extra: bool) -> list[float]:
    """Every iteration begins with a flag, and ends with another one, which rank 0 gives ``ending`` to."""
    torch.set_num_threads(1)
    model, optimizer = prepared_copy(seeded(Net), torch.optim.SGD, lr=0.1)
    rayzero.track()
    found = [rayzero.mean_over_ranks(7.0)] if extra else []
    for step in range(context.step, 3):
        found.append(rayzero.mean_over_ranks(0.0))
        loss = token_loss(model, tokens(step))
        if (context.rank, context.life, step) == (1, 0, 1):
            raise Killed
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(rayzero.mean_over_ranks(ending if context.rank == 0 else 0.0))
    return found


def run(ending: float, extra: bool = False) -> Any:
    return run_ranks(functools.partial(flags, ending=ending, extra=extra), 2, 2, stall_timeout=20.0, max_failures=1)


def test_equal_calls_with_equal_results_are_repeated() -> None:
    assert run(0.0) == [[0.0] * 6, [0.0] * 4]


def test_equal_calls_with_other_results_are_refused() -> None:
    with pytest.raises(StateLostError, match="with the same values and other results"):
        run(4.0)


def test_a_call_before_the_loop_is_refused_when_its_rank_has_come_back() -> None:
    """It would take the place of another one."""
    with pytest.raises(StateLostError, match="none between prepare"):
        run(0.0, extra=True)


def many(context: RankContext) -> list[float]:
    """Every iteration begins with many means."""
    torch.set_num_threads(1)
    model, optimizer = prepared_copy(seeded(Net), torch.optim.SGD, lr=0.1)
    rayzero.track()
    for step in range(context.step, 3):
        found = [rayzero.mean_over_ranks(float(step + call)) for call in range(20)]
        token_loss(model, tokens(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@needs.shared_memory
def test_a_rank_dies_with_the_lead_and_repeats_calls_that_the_others_made_long_ago(tmp_path: Path) -> None:
    faults = Faults(tmp_path, (Fault("rank 1", "rank.pushed-last", nth=2), Fault("optimizer 0", "lead.finish", nth=3)))
    found = run_ranks(many, 2, 2, "shm", True, stall_timeout=20.0, max_failures=2, faults=faults)
    assert all(faults.struck(index) for index in range(2))
    assert found == [[2.0 + call for call in range(20)]] * 2
