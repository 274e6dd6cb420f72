"""Parameters and arguments that cannot be right are refused by name, instead of training on silently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rayzero
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.testing import run_ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))


def prepared(model: nn.Module) -> rayzero.ZeroOptimizer:
    return rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), rayzero.ZeroConfig())[1]


def train_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def new_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(8, 8))


def new_data(model: nn.Sequential) -> None:
    model[0].weight.data = torch.zeros(4, 16)


@pytest.mark.parametrize("exchange", [nn.Module.half, new_parameter, new_data], ids=["half", "object", "data"])
def test_an_exchanged_parameter_is_refused_by_the_next_forward(exchange: Callable[[nn.Module], object]) -> None:
    def loop(ctx: rayzero.RankContext) -> None:
        model = net()
        optimizer = prepared(model)
        train_one(model, optimizer)

        def go_on() -> None:
            exchange(model)
            model(torch.ones(3, 8))

        with pytest.raises(UnsupportedError, match=r"parameter '0\.weight' was .* after rayzero\.prepare"):
            go_on()

    run_ranks(loop, 1, 1)


@pytest.mark.parametrize("max_norm", [float("nan"), -1.0, "1", None, True])
def test_a_max_norm_that_is_no_norm_is_refused(max_norm: object) -> None:
    def loop(ctx: rayzero.RankContext) -> None:
        model = net()
        optimizer = prepared(model)
        model(torch.ones(3, 8)).sum().backward()
        with pytest.raises(ConfigError, match="max_norm must be a number >= 0"):
            optimizer.clip_grad_norm_(max_norm)  # type: ignore[arg-type]

    run_ranks(loop, 1, 1)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_one(model, optimizer)
    with pytest.raises(UnsupportedError, match="stepped already"):
        rayzero.prepare(model, optimizer, rayzero.ZeroConfig())


@pytest.mark.parametrize(
    ("model", "optimizer", "config", "what"),
    [
        ("x", None, None, "model must be a torch.nn.Module"),
        (net(), net().parameters(), None, "optimizer must be a torch.optim.Optimizer"),
        (net(), torch.optim.SGD(net().parameters()), {"precision": "bf16"}, "config must be a ZeroConfig"),
    ],
)
def test_arguments_of_the_wrong_kind_are_one_line(model: object, optimizer: object, config: object, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        rayzero.prepare(model, optimizer, config)  # type: ignore[arg-type,type-var]
