"""Small models, and training them by any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Shapes that fill no lines of 64, and a parameter of one element."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 67), nn.GELU(), nn.Linear(67, 41), nn.GELU(), nn.Linear(41, 5), nn.PReLU()).to(
        dtype
    )


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3, bias=False), nn.Flatten(), nn.Linear(16 * 16, 10)
    )


def backward(model: nn.Module, seed: int, *, scale: float = 1.0) -> Tensor:
    """Gradients of a loss on inputs that ``seed`` chooses; the loss."""
    first = next(model.parameters())
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(8, *((3, 8, 8) if first.dim() == 4 else (13,)), generator=draws)
    loss = model(x.to(first.device, first.dtype)).float().square().mean() * scale
    loss.backward()
    return loss.detach() / scale


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    *,
    first: int = 0,
    zero: bool = True,
    between: Callable[[], Any] = lambda: None,
) -> list[Tensor]:
    """Weights after some steps; ``between`` runs between backward and step."""
    for step in range(first, first + steps):
        if zero:
            optimizer.zero_grad()
        backward(model, step)
        between()
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def states_equal(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> bool:
    """Whether two optimizers' state dicts have the same states, bit for bit."""
    ours, theirs = a.state_dict()["state"], b.state_dict()["state"]
    return ours.keys() == theirs.keys() and all(
        ours[i].keys() == theirs[i].keys() and all(torch.equal(ours[i][key], theirs[i][key]) for key in ours[i])
        for i in ours
    )
