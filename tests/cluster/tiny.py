"""A training small enough for every test: a few layers, its own data, and what plain PyTorch makes of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import rayzero.engine as engine

WORLD_SIZE = 2
MAX_NORM = 0.05  # clips in every step


class Tiny(nn.Module):
    """Four units: three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(40, 40) for _ in range(3)])
        self.head = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, 40] -> [batch, 3]."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)  # type: ignore[no-any-return]


def make() -> tuple[Tiny, torch.optim.AdamW]:
    """The model and optimizer every rank, and the reference, start from."""
    torch.manual_seed(7)
    model = Tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int, rank: int) -> Tensor:
    """A rank's batch of a step: [8, 40]."""
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * step + rank))


def tiny_steps(first: int = 0) -> Iterator[tuple[float, Tiny, engine.ZeroOptimizer]]:
    """Train for ever inside a rank; yields the loss, the model and the optimizer after each step."""
    model, plain = make()
    model, optimizer = engine.prepare(model, plain)
    rank = engine.get_context().rank
    step = first
    while True:
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), model, optimizer
        step += 1


def unsharded(steps: int) -> dict[str, Tensor]:
    """The weights plain PyTorch has after the same steps on all ranks' batches."""
    model, optimizer = make()
    for step in range(steps):
        for rank in range(WORLD_SIZE):
            (model(batch(step, rank)).square().mean() / WORLD_SIZE).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()
