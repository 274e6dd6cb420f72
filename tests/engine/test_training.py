"""Loops around several prepared models, and what a loop does that only a prepared optimizer could get wrong."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.errors import UnsupportedError
from rayzero.testing import run_ranks

from .models import Net, same_bits, seeded, tight, token_loss, tokens

adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)


class Critic(nn.Module):
    """A score of each embedded token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def adversarial(pair: list[tuple[nn.Module, Any]]) -> list[Tensor]:
    """The critic learns to tell, then the generator learns through the critic, whose gradients are dropped."""
    (generator, mine), (critic, its) = pair
    seen = []
    for step in range(3):
        inputs, _ = tokens(step)
        its.zero_grad()
        loss = critic(generator(inputs).detach().float()).mean() - critic(torch.ones(4, 8, 32)).mean()
        loss.backward()
        its.step()
        mine.zero_grad()
        fooled = -critic(generator(inputs).float()).mean()
        fooled.backward()
        mine.step()
        seen += [loss.detach(), fooled.detach()]
    return seen


@pytest.mark.parametrize("budget", ["tight", "roomy"])
def test_one_models_loss_trains_another_through_it(budget: str, alone: RankContext) -> None:
    plain = [seeded(Net), seeded(Critic)]
    ours = copy.deepcopy(plain)
    pairs = []
    for model in ours:
        config = tight(model) if budget == "tight" else ZeroConfig()
        pairs.append(rayzero.prepare(model, adamw(model.parameters()), config))
    expected = adversarial([(model, adamw(model.parameters())) for model in plain])
    assert all(torch.equal(a, b) for a, b in zip(adversarial(pairs), expected, strict=True))
    for (model, _), right in zip(pairs, plain, strict=True):
        assert same_bits(rayzero.full_state_dict(model), right.state_dict())


def test_a_second_model_of_a_run_is_refused_by_name() -> None:
    first, second = seeded(Net), seeded(Critic)

    def loop(context: RankContext) -> None:
        for model in (copy.deepcopy(first), copy.deepcopy(second)):
            rayzero.prepare(model, adamw(model.parameters()))

    with pytest.raises(UnsupportedError, match=r"second time in this run, .* one prepared model: .*ModuleDict"):
        run_ranks(loop, 2, 2)


def test_gradients_that_are_zeroed_and_not_dropped_still_decay(alone: RankContext) -> None:
    """After zero_grad(set_to_none=False) a parameter that gets no gradient has a zero one."""
    plain = seeded(Net)
    model = copy.deepcopy(plain)
    pairs = [(plain, adamw(plain.parameters()))]
    pairs.append(rayzero.prepare(model, adamw(model.parameters()), tight(model)))  # type: ignore[arg-type]
    for each, optimizer in pairs:
        for step in range(3):
            if step == 1:
                each.embed(tokens(step)[0]).square().mean().backward()
            else:
                token_loss(each, tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())
