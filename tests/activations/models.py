"""Small models for activation offload."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rayzero.activations import ActivationOffload


class Block(nn.Module):
    """Attention and MLP with residuals."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.drop(self.mlp(x))


class Transformer(nn.Module):
    """Blocks and a head."""

    def __init__(self, dim: int = 64, num_layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dim, dropout) for _ in range(num_layers))
        self.head = nn.Linear(dim, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Exps(nn.Module):
    """``num`` modules in a row that each save exactly their output: ``x.exp()`` scaled back into range."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Exp() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x) - 1.0
        return x


class Exp(nn.Module):
    """exp: saves its output and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def transformer(seed: int = 0, **kwargs: Any) -> Transformer:
    """With fixed weights."""
    torch.manual_seed(seed)
    return Transformer(**kwargs)


def gradients(model: nn.Module, x: Tensor, seed: int = 1) -> list[Tensor]:
    """Fresh gradients of a fixed loss; dropout drawn from ``seed``."""
    model.zero_grad()
    torch.manual_seed(seed)
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def two_groups(offload: ActivationOffload) -> tuple[Tensor, Tensor, Tensor]:
    """A chunk whose first group saves its output, and its second one too: the input, the first's output, the loss."""
    x = torch.randn(1000, requires_grad=True)
    with offload.chunk():
        with offload.group("a"):
            low = (x * 1.0).exp()
        top = low * 1.0
        with offload.group("b"):
            y = top.sigmoid().sum()
    return x, low, y
