"""Dropout and random numbers: the streams of unsharded training, and the same masks when something is recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.models import WIDTH, Block, Net, token_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .case import Case, Run, steps, train
from .engines import Setting
from .test_autograd import nested, non_reentrant, reentrant

pytestmark = pytest.mark.timeout(300)  # processes import torch first


class Dropped(Net):
    """Dropout inside blocks, as a module, and between them, as a function."""

    class Part(Block):
        def __init__(self) -> None:
            super().__init__(WIDTH)
            self.dropout = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(super().forward(x))

    def __init__(self, wrap: Callable[..., Tensor] | None = None) -> None:
        super().__init__(wrap=wrap)
        self.layers = nn.ModuleList(self.Part() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.1, training=self.training)
        for layer in self.layers:
            x = self.wrap(layer, x)
        return self.head(self.norm(x))


class EachKind(Dropped):
    """Blocks under no checkpoint, a reentrant, and a non-reentrant one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.1, training=self.training)
        x = checkpoint(self.layers[1], self.layers[0](x), use_reentrant=True)
        return self.head(self.norm(checkpoint(self.layers[2], x, use_reentrant=False)))


class Noisy(Net):
    """Noise made in forward, of several distributions."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x + 0.1 * torch.randn_like(x)) * torch.empty_like(x).uniform_(0.5, 1.5)
        return self.head(self.norm(x * torch.bernoulli(torch.full_like(x, 0.9))))


def stream(run: Run) -> list[Any]:
    """Train, and say where the generator is after each step."""
    seen = []
    for step in range(2):
        loss = token_loss(run.model, run.batch(step))
        loss.backward()
        run.update()
        seen.append((loss.detach(), torch.rand(3)))
    return seen


class OwnGenerator(Net):
    """Masks of a generator that each rank seeds for itself."""

    def forward(self, tokens: Tensor, generator: torch.Generator) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) * (torch.rand(x.shape, generator=generator) > 0.1).to(x.dtype)
        return self.head(self.norm(x))


@steps
def own_generator(run: Run, step: int) -> None:
    inputs, targets = run.batch(step)
    generator = torch.Generator().manual_seed(10 * step + run.rank)
    F.cross_entropy(run.model(inputs, generator).flatten(0, 1).float(), targets.flatten()).backward()


def evaluation_between(run: Run) -> list[Any]:
    """Evaluation draws nothing."""
    seen = []
    for _ in range(2):
        seen.append(train(run))
        run.model.eval()
        with torch.no_grad():
            seen.append(token_loss(run.model, run.batch(9)))
        run.model.train()
    return [*seen, torch.rand(3)]


CASES = [
    Case("dropout", stream, build=Dropped, draws=True, ranks=(1,)),
    Case("dropout, evaluation between", evaluation_between, build=Dropped, draws=True, ranks=(1,)),
    *(
        Case(f"dropout, {name} checkpoint", stream, build=lambda how=how: Dropped(how), draws=True, ranks=(1,))
        for name, how in (("reentrant", reentrant), ("non-reentrant", non_reentrant), ("nested", nested))
    ),
    Case("noise", stream, build=Noisy, draws=True, ranks=(1,)),
    Case("dropout on several ranks, checkpoints of both kinds", stream, build=EachKind, draws=True, ranks=(2, 3)),
    Case("masks of a generator of one's own", own_generator, build=OwnGenerator),
]


def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)
