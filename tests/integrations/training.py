"""The loop that tests run on ranks, and the same loop on plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from engine.models import averaged, tight
from torch import Tensor, nn

import rayzero
from rayzero.engine.context import RankContext

from .zoo import GENERATING, VOCAB, batch

STEPS = 3

adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True)
Setup = Callable[[nn.Module], Any]


@dataclass
class Trained:
    """What a rank has after training."""

    state: dict[str, Tensor]  # fp32 parameters under each of their names
    sequences: list[Tensor] = field(default_factory=list)  # what the rank generated, in order
    resharded: int = 0  # how often a unit went down


def keep(model: nn.Module) -> None:
    """No setup."""


def build(make: Callable[..., nn.Module], **settings: Any) -> nn.Module:
    """A model from a seed, in the calling thread."""
    torch.manual_seed(0)
    return make(**settings)


def generate(model: Any, rank: int) -> Tensor:
    """Greedy sequences from a prompt whose length, as the number of new tokens, depends on the rank."""
    generator = torch.Generator().manual_seed(rank)
    prompt = torch.randint(2, VOCAB, (2, 3 + 4 * rank), generator=generator)
    training = model.training
    model.eval()
    result = model.generate(prompt, max_new_tokens=3 + 3 * rank, do_sample=False)
    model.train(training)
    return result


def train(context: RankContext, base: nn.Module, name: str, *, setup: Setup = keep) -> Trained:
    """Train on a rank within a budget that holds the root, the unit in use and one ahead; generate before each step
    and at the end."""
    model = copy.deepcopy(base)
    setup(model)
    config = tight(model, prefetch_buffer_size=1, spare=0)
    model, optimizer = rayzero.prepare(model, adamw(model.parameters()), config)
    verbs: list[str] = []
    optimizer.engine.cache.observers.append(lambda verb, unit: verbs.append(verb))
    sequences = []
    for step in range(STEPS):
        model(**batch(name, step, context.rank)).loss.backward()
        if name in GENERATING:
            sequences.append(generate(model, context.rank))
        optimizer.step()
        optimizer.zero_grad()
    if name in GENERATING:
        sequences.append(generate(model, context.rank))
    return Trained(rayzero.full_state_dict(model), sequences, verbs.count("reshard"))


def unsharded(base: nn.Module, name: str, *, world_size: int, setup: Setup = keep) -> list[Trained]:
    """The same on plain PyTorch: gradients averaged over replicas. Per rank, state shared."""
    model = copy.deepcopy(base)
    setup(model)
    optimizer = adamw(model.parameters())
    ranks = [Trained({}) for _ in range(world_size)]
    for step in range(STEPS):
        replicas = []
        for rank in range(world_size):
            model.zero_grad()
            model(**batch(name, step, rank)).loss.backward()
            replicas.append([param.grad for param in model.parameters()])
        _generate_all(model, name, ranks)
        for param, grad in zip(model.parameters(), averaged(replicas), strict=True):
            param.grad = grad
        optimizer.step()
    _generate_all(model, name, ranks)
    state = {key: param.detach() for key, param in model.named_parameters(remove_duplicate=False)}
    for trained in ranks:
        trained.state = state
    return ranks


def _generate_all(model: nn.Module, name: str, ranks: list[Trained]) -> None:
    for rank, trained in enumerate(ranks):
        if name in GENERATING:
            trained.sequences.append(generate(model, rank))


def assert_equal(ranks: list[Trained], expected: list[Trained]) -> None:
    """The same weights to 1e-6 of each tensor's largest value, the same sequences; and units did come and go."""
    for got, want in zip(ranks, expected, strict=True):
        assert got.resharded > 3 * STEPS
        for key, value in want.state.items():
            torch.testing.assert_close(
                got.state[key],
                value,
                rtol=0,
                atol=1e-6 * float(value.abs().max()),
                msg=lambda m, key=key: f"{key}: {m}",
            )
        assert len(got.sequences) == len(want.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.sequences, want.sequences, strict=True))
