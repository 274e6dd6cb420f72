"""Ranks of ``run_ranks`` that disagree: the first error ends the run at once, wherever the others wait."""

from __future__ import annotations

import time
from typing import Literal

import pytest
import torch

import rayzero
from rayzero.engine.context import RankContext
from rayzero.errors import HandshakeError, RayZeroError
from rayzero.testing import run_ranks

_STALL_S = 60.0
_AT_ONCE_S = 20.0  # far from the stall timeout, on a crowded machine


def _train(ctx: RankContext, lrs: tuple[float, ...], widths: tuple[int, ...]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(widths[ctx.rank], 4), torch.nn.Linear(4, 1))
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=lrs[ctx.rank]))
    model(torch.ones(2, widths[ctx.rank])).sum().backward()
    optimizer.step()
    rayzero.full_state_dict(model)


@pytest.mark.parametrize("transport", ["inproc", "grpc"])
@pytest.mark.parametrize(
    ("lrs", "widths", "message"),
    [
        ((0.02, 0.01), (3, 3), r"differs from rank \d in lr 0.0\d against 0.0\d in parameter group 0; all ranks"),
        ((0.01, 0.01), (3, 5), r"differs from rank \d in layout"),
    ],
)
def test_ranks_that_differ_fail_at_once(
    transport: Literal["inproc", "grpc"], lrs: tuple[float, ...], widths: tuple[int, ...], message: str
) -> None:
    began = time.monotonic()
    with pytest.raises(HandshakeError, match=message):
        run_ranks(lambda ctx: _train(ctx, lrs, widths), 2, 2, transport, stall_timeout=_STALL_S)
    assert time.monotonic() - began < _AT_ONCE_S


@pytest.mark.parametrize("transport", ["inproc", "grpc"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_it_prepares_ends_the_others(
    transport: Literal["inproc", "grpc"], failing: int
) -> None:
    def train(ctx: RankContext) -> None:
        if ctx.rank == failing:
            raise ZeroDivisionError("before prepare")
        _train(ctx, (0.01, 0.01), (3, 3))

    began = time.monotonic()
    with pytest.raises((ZeroDivisionError, RayZeroError)) as caught:
        run_ranks(train, 2, 2, transport, stall_timeout=_STALL_S)
    assert isinstance(caught.value, ZeroDivisionError)
    assert time.monotonic() - began < _AT_ONCE_S
