"""Calls of mean_over_ranks between a step and the next forward, which a rank that has come back makes again or not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import rayzero
from rayzero.engine.context import RankContext
from rayzero.engine.loop.keeper import RepeatedMeans, key_of
from rayzero.errors import StateLostError
from rayzero.protocol.messages import MeanInput
from rayzero.testing import Killed, run_ranks

from .models import Net, seeded, token_loss, tokens


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
    model = seeded(Net)
    model, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
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
