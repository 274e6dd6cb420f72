"""Random numbers of a rank that comes back: its batch's and its forward's, also if making an iterator draws some."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rayzero
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

from .models import Net, prepared_copy, same_bits, seeded, tokens
from .test_comeback import Seen

pytestmark = pytest.mark.thorough

STEPS = 4
Deaths = tuple[tuple[str, int], ...]


def drawn(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches drawn from torch's generator."""
    while True:
        x, y = tokens(int(torch.randint(100, ())))
        yield x, y


def loaded(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of a DataLoader from ``step`` on. Its iterator draws a number when it is made."""
    pairs = [tokens(number) for number in range(STEPS)][step:]
    whole = TensorDataset(torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
    return iter(DataLoader(whole, batch_size=None))


def loop(context: RankContext, data: Any, at: Deaths = ()) -> Any:
    """With dropout. Rank 1 dies at each of ``at``."""
    torch.set_num_threads(1)
    fatal = at[context.life] if context.rank == 1 and context.life < len(at) else None

    def reach(point: str) -> None:
        if (point, context.step) == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    model, optimizer = prepared_copy(seeded(Net), torch.optim.AdamW, lr=1e-2)
    seen = Seen()  # tracked: an iteration that is decided already computes its loss again with newer weights
    rayzero.track(seen=seen)
    batches = data(context.step)
    for _ in range(context.step, STEPS):
        x, y = next(batches)
        reach("taken")
        loss = F.cross_entropy(F.dropout(model(x), 0.2).flatten(0, 1), y.flatten())
        loss.backward()
        seen.losses = [*seen.losses, loss.detach()]
        reach("pushed")
        optimizer.step()
        reach("stepped")
        optimizer.zero_grad()
    return context.life, seen.losses, rayzero.full_state_dict(model)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("data", [drawn, loaded])
def test_a_rank_that_is_killed_draws_the_same_numbers(data: Any) -> None:
    plain = run_ranks(functools.partial(loop, data=data), 2, 2, "grpc", True)
    deaths = (("pushed", 0), ("taken", 1), ("stepped", 2), ("pushed", 3), ("stepped", 4))
    again = run_ranks(functools.partial(loop, data=data, at=deaths), 2, 2, "grpc", True, max_failures=5)
    assert [life for life, *_ in again] == [0, 5]
    for (_, losses, weights), (_, others, other) in zip(again, plain, strict=True):
        assert list(map(float, losses)) == list(map(float, others))
        assert same_bits(weights, other)
