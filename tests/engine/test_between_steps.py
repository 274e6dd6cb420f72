"""Between two steps ranks hold no gradients: those are in totals, or applied."""

from __future__ import annotations

import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks
from tests.support.waiting import until


def holds_nothing(context: RankContext) -> bool:
    """Whether a rank gives back all ranges without another backward."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
    adam = torch.optim.AdamW(model.parameters())
    model, optimizer = rayzero.prepare(model, adam, ZeroConfig(units=["Linear"]))
    model(torch.ones(2, 64)).sum().backward()
    region = optimizer.engine.store._writer.region
    optimizer.step()
    until(lambda: not region.held())
    return True


def test_a_rank_gives_its_last_gradients_back_without_another_backward() -> None:
    assert run_ranks(holds_nothing, 2, 2, "shm") == [True, True]
