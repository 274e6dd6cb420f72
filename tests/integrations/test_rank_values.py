"""Small tensors of all ranks come through the lead exactly, in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.context import RankContext
from rayzero.errors import StepMismatchError, UnsupportedError
from rayzero.integrations.several_ranks import MOST_VALUES, sum_over_ranks, values_of_ranks
from rayzero.testing import run_ranks

WORLD = 3  # for which no rank's share of a mean is a power of two


def prepared() -> None:
    model = torch.nn.Linear(2, 2)
    rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def of_rank(rank: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [
        torch.randn(2, 3, generator=draw),
        torch.randn(5, generator=draw, dtype=torch.float64) * 1e200,
        torch.randn(4, generator=draw).bfloat16(),
        torch.tensor(1 / 3 + rank, dtype=torch.float64),
        torch.tensor([float("inf"), float("nan"), -0.5 * rank, float("-inf")]),
        torch.tensor([2**53 - rank, rank - 2**53, 7]),
        torch.tensor(rank == 1),
        torch.tensor([250, rank], dtype=torch.uint8),
        torch.randn(3000 // WORLD, 2, generator=draw),  # more than one call has
        torch.zeros(0, 2),
        torch.randn(2, generator=draw).requires_grad_(),
    ]


def test_every_rank_has_the_exact_values_of_all() -> None:
    def loop(context: RankContext) -> list[Tensor]:
        prepared()
        return [values_of_ranks(tensor) for tensor in of_rank(context.rank)]

    expected = [torch.stack(each).detach() for each in zip(*map(of_rank, range(WORLD)), strict=True)]
    for found in run_ranks(loop, WORLD, 1):
        for got, want in zip(found, expected, strict=True):
            assert (got.dtype, got.requires_grad) == (want.dtype, False)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_sums_of_integers_are_exact() -> None:
    def loop(context: RankContext) -> list[Any]:
        prepared()
        total = sum_over_ranks(torch.tensor([2**49 + context.rank, context.rank]))
        return [*total.tolist(), sum_over_ranks(torch.tensor(0.5)).item()]

    assert run_ranks(loop, WORLD, 1) == [[3 * 2**49 + 3, 3, 1.5]] * WORLD


REFUSED = {
    "too large": (torch.zeros(MOST_VALUES // WORLD + 1), "have 8,001 numbers; .* exchange at most 8,000"),
    "complex": (torch.zeros(1, dtype=torch.complex64), "torch.complex64 tensors with such values cannot be exchanged"),
    "large integers": (torch.tensor(2**53 + 1), "torch.int64 tensors with such values cannot be exchanged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    tensor, why = REFUSED[case]

    def loop(context: RankContext) -> None:
        prepared()
        values_of_ranks(tensor)

    with pytest.raises(UnsupportedError, match=why):
        run_ranks(loop, WORLD, 1)


def test_other_shapes_on_other_ranks_are_refused() -> None:
    def loop(context: RankContext) -> None:
        prepared()
        values_of_ranks(torch.zeros((2, 3) if context.rank else (3, 2)))

    with pytest.raises(StepMismatchError, match="every rank must make the same calls"):
        run_ranks(loop, WORLD, 1)
