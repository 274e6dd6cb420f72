"""Several optimizers over one model: the bits of each in plain PyTorch, states in torch's format, refusals by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

from .models import Net, same_bits, seeded, tight, token_loss, tokens

MUON, ADAMW = "torch.optim.muon:Muon", "torch.optim.adamw:AdamW"
BASE = seeded(Net)
Optimizers = list[torch.optim.Optimizer]


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of blocks, and everything else."""
    matrices = [param for param in model.layers.parameters() if param.dim() == 2]  # type: ignore[union-attr]
    known = set(map(id, matrices))
    return matrices, [param for param in model.parameters() if id(param) not in known]


def muon_and_adamw(model: nn.Module) -> Optimizers:
    matrices, others = divided(model)
    groups = [{"params": others[:3], "lr": 2e-3}, {"params": others[3:], "weight_decay": 0.2}]
    return [torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.01), torch.optim.AdamW(groups, lr=1e-3)]


def sgd_and_adagrad(model: nn.Module) -> Optimizers:
    """Element-wise, so that shards cut parameters; Adagrad makes its states before the first step."""
    matrices, others = divided(model)
    return [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
        torch.optim.Adagrad(others, lr=0.05, initial_accumulator_value=0.3),
    ]


def train(
    model: nn.Module, optimizer: Any, steps: range, rank: int = 0, *, backwards: int = 1, max_norm: float | None = None
) -> None:
    for step in steps:
        for index in range(backwards):
            (token_loss(model, tokens(step, 10 * rank + index)) / backwards).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()


def added(each: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Sums of gradients, in order."""
    return [functools.reduce(torch.add, grads) for grads in zip(*each, strict=True)]


def plain(make: Any, steps: int, world_size: int, precision: str = "fp32", backwards: int = 1) -> dict[str, Tensor]:
    """Train fp32 masters of an unsharded model on all ranks' batches, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        masters = copy.deepcopy(BASE)
        model = copy.deepcopy(BASE).to(torch.bfloat16 if precision == "bf16" else torch.float32)
        optimizers = make(masters)
        for step in range(steps):
            rounds = []
            for index in range(backwards):
                ranks = []
                for rank in range(world_size):
                    model.zero_grad()
                    (token_loss(model, tokens(step, 10 * rank + index)) / backwards).backward()
                    ranks.append([param.grad.float() for param in model.parameters()])
                rounds.append(added(ranks))
            for param, grad in zip(masters.parameters(), added(rounds), strict=True):
                param.grad = grad * (1.0 / world_size)
            for optimizer in optimizers:
                optimizer.step()
            with torch.no_grad():
                for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                    param.copy_(master)
        return dict(masters.state_dict())
    finally:
        torch.set_num_threads(threads)


def loop(
    context: RankContext,
    make: Any = muon_and_adamw,
    precision: str = "fp32",
    backwards: int = 1,
    steps: int = 3,
    max_norm: float | None = None,
) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model = copy.deepcopy(BASE)
    config = tight(model, precision=precision, prefetch_buffer_size=1, shard_bytes=16 << 10)
    config = config.replace(gradient_accumulation_steps=backwards)
    model, optimizer = rayzero.prepare(model, make(model), config)
    train(model, optimizer, range(steps), context.rank, backwards=backwards, max_norm=max_norm)
    return {name: value.clone() for name, value in rayzero.full_state_dict(model).items()}


# ---- bits


@pytest.mark.promise("exact", "optimizers")
@pytest.mark.parametrize("make", [muon_and_adamw, sgd_and_adagrad])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize(("world_size", "owners"), [(1, 1), (2, 3), (3, 2)])
def test_several_optimizers_have_the_bits_of_each_in_plain_torch(
    make: Any, precision: str, backwards: int, world_size: int, owners: int
) -> None:
    expected = plain(make, 3, world_size, precision, backwards)
    each = functools.partial(loop, make=make, precision=precision, backwards=backwards)
    for state in run_ranks(each, world_size, owners):
        assert same_bits(state, expected)
