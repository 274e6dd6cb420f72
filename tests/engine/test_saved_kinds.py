"""Tensors that autograd saves inside a unit and that are no plain strided views: sparse, mkldnn, nested, conjugate,
negative. Units come and go."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rayzero
from rayzero.engine.context import RankContext, running_in

from .models import same_bits, seeded, tight

NODES, WIDTH = 8, 16
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]  # adjacency (dense), x @ W, W -> (NODES, WIDTH)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state", "ignore:.*nested tensors")


def adjacency() -> Tensor:
    draws = torch.rand(NODES, NODES, generator=torch.Generator().manual_seed(0))
    return (draws < 0.4).float() + torch.eye(NODES)


def of_weight(w: Tensor, size: int) -> Tensor:
    """A sparse matrix whose values are a part of the weight, as in SHiRA."""
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 5], [1, 2, 3]]), w.flatten()[:3], (size, size), check_invariants=False
    )


def as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(x.shape[0], -1, 2))


def by_rows(w: Tensor) -> Tensor:
    """A CSR matrix whose values are the first of the weight."""
    places = torch.arange(NODES)
    return torch.sparse_csr_tensor(
        torch.arange(NODES + 1), places.flip(0), w.flatten()[:NODES], (NODES, NODES), check_invariants=False
    )


class Product(torch.autograd.Function):
    """A matrix product by a constant. (torch's own has no backward for block layouts on the CPU.)"""

    @staticmethod
    def forward(ctx: Any, constant: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(constant)
        return constant.to_dense() @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.saved_tensors[0].to_dense().t() @ grad


MIXES: dict[str, Mix] = {
    "coo": lambda a, h, w: torch.sparse.mm(a.to_sparse(), h),
    "csr": lambda a, h, w: torch.sparse.mm(a.to_sparse_csr(), h),
    "csc": lambda a, h, w: a.to_sparse_csc() @ h,
    "bsr": lambda a, h, w: Product.apply(a.to_sparse_bsr((2, 2)), h),
    "bsc": lambda a, h, w: Product.apply(a.to_sparse_bsc((2, 2)), h),
    "mkldnn": lambda a, h, w: torch.relu(h.to_mkldnn()).to_dense(),
    "nested": lambda a, h, w: torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 3, NODES])).sin().values(),
    "sparse over the weight": lambda a, h, w: torch.sparse.mm(of_weight(w, NODES), h),
    "csr over the weight": lambda a, h, w: torch.sparse.mm(by_rows(w), h),
    "the weight plus a sparse one": lambda a, h, w: h @ (w + of_weight(w.sin(), WIDTH)),
    "conjugate weight": lambda a, h, w: (as_complex(h) * as_complex(w).conj()[:NODES]).abs().repeat(1, 2),
    "imaginary part of a conjugate weight": lambda a, h, w: (
        h[:, : WIDTH // 2] * as_complex(w).conj().imag[:NODES]
    ).repeat(1, 2),
    "negative conjugate weight": lambda a, h, w: (
        (as_complex(h) * torch._neg_view(as_complex(w).conj())[:NODES]).abs().repeat(1, 2)
    ),
    "conjugate activation": lambda a, h, w: (as_complex(h).conj() * as_complex(h.sin())).abs().repeat(1, 2),
}


class Layer(nn.Module):
    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.linear, self.mix = nn.Linear(WIDTH, WIDTH), mix

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.mix(adjacency(), self.linear(x), self.linear.weight))


class Layers(nn.Module):
    def __init__(self, mix: Mix, wrap: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(mix) for _ in range(4))
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.wrap(layer, x)
        return x


def trained(model: nn.Module, *, plain: bool, **settings: Any) -> dict[str, Tensor]:
    """Complete weights after three steps."""
    model = copy.deepcopy(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with running_in(RankContext()):
        if not plain:
            config = tight(model, async_prefetch=False, spare=0, auto_memory_management="off", **settings)
            model, optimizer = rayzero.prepare(model, optimizer, config)
        for step in range(3):
            x = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict()) if plain else rayzero.full_state_dict(model)


OFFLOAD = {"offload_activations": ("layers.?",), "activation_min_bytes": 64}


@pytest.mark.parametrize("settings", [{}, OFFLOAD], ids=["", "activations offloaded"])
@pytest.mark.parametrize("mix", MIXES)
def test_any_kind_of_saved_tensor_trains_as_plain_pytorch(mix: str, settings: dict[str, Any]) -> None:
    model = seeded(lambda: Layers(MIXES[mix], lambda layer, x: layer(x)))
    assert same_bits(trained(model, plain=False, **settings), trained(model, plain=True))


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix != "nested"])  # which torch's own checkpoint refuses
def test_any_kind_of_recomputed_tensor_trains_as_plain_pytorch(mix: str) -> None:
    model = seeded(lambda: Layers(MIXES[mix], partial(checkpoint, use_reentrant=False)))
    assert same_bits(trained(model, plain=False), trained(model, plain=True))
