"""The optimizer's state in torch's own format: from and to plain torch; groups added and parameters unfrozen later."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.full_values import load_checkpoint
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.testing import run_ranks

from .models import Net, averaged, prepared_copy, relative_difference, same_bits, seeded, tight, token_loss, tokens

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True)

OPTIMIZERS: dict[str, Make] = {
    "AdamW": adamw,
    "Adam, amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD, momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
}


def part_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss that the second block has no part in."""
    x = model.layers[0](model.embed(batch[0]))
    return nn.functional.cross_entropy(model.head(model.norm(x)).flatten(0, 1).float(), batch[1].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    """The odd steps leave parameters without gradients: their step counts stand still."""
    for step in steps:
        (part_loss if step % 2 else token_loss)(model, tokens(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, world_size: int) -> None:
    for step in steps:
        replicas = []
        for rank in range(world_size):
            optimizer.zero_grad()
            (part_loss if step % 2 else token_loss)(model, tokens(step, rank)).backward()
            replicas.append([p.grad for p in model.parameters()])
        for param, grad in zip(model.parameters(), averaged(replicas), strict=True):
            param.grad = grad
        optimizer.step()


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def assert_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state), index
        for name, value in state.items():
            found = ours["state"][index][name]
            assert (type(found), found.shape, found.dtype) == (type(value), value.shape, value.dtype)
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-7)


@pytest.mark.spread(5)
@pytest.mark.parametrize(("name", "world_size"), [("AdamW", 1), ("AdamW", 3), *((name, 2) for name in OPTIMIZERS)])
def test_the_state_is_torchs_and_loads_into_plain_torch(name: str, world_size: int) -> None:
    base, make = seeded(Net), OPTIMIZERS[name]
    plain = copy.deepcopy(base)
    reference = make(plain.parameters())
    plain_train(plain, reference, range(3), world_size)

    def loop(context: RankContext) -> dict[str, Any]:
        config = tight(base, prefetch_buffer_size=1, shard_bytes=16 << 10)
        model, optimizer = prepared_copy(base, make, config)
        train(model, optimizer, range(3), context.rank)
        return optimizer.state_dict()

    for state in run_ranks(loop, world_size, 2):
        assert_alike(state, reference.state_dict())
        loaded = make(plain.parameters())
        loaded.load_state_dict(saved_and_loaded(state))
        assert_alike(loaded.state_dict(), state)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("name", "world_size", "precision"),
    [("AdamW", 1, "fp32"), ("AdamW", 3, "bf16"), *((name, 2, "fp32") for name in OPTIMIZERS)],
)
def test_training_goes_on_bit_by_bit_from_both_state_dicts(name: str, world_size: int, precision: str) -> None:
    base, make = seeded(Net), OPTIMIZERS[name]
    config = tight(base, precision=precision, prefetch_buffer_size=1, shard_bytes=16 << 10)

    def loop(context: RankContext, saved: Any = None) -> tuple[Any, dict[str, Tensor]]:
        model, optimizer = prepared_copy(base, make, config)
        if saved is None:
            train(model, optimizer, range(3), context.rank)
            saved = copy.deepcopy((rayzero.full_state_dict(model), optimizer.state_dict()))
        else:
            train(model, optimizer, range(7, 9), context.rank)  # something to be replaced
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        train(model, optimizer, range(3, 6), context.rank)
        return saved, rayzero.full_state_dict(model)

    (saved, expected), *_ = run_ranks(loop, world_size, 2)
    for _, state in run_ranks(lambda ctx: loop(ctx, saved), world_size, 3):
        assert same_bits(state, expected)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(alone: RankContext) -> None:
    model, optimizer = prepared_copy(seeded(Net), adamw)
    train(model, optimizer, range(1))
    before = saved_and_loaded(optimizer.state_dict())
    other = torch.optim.SGD(seeded(Net).parameters(), lr=0.1, momentum=0.9)
    other.param_groups[0].update({k: v for k, v in before["param_groups"][0].items() if k != "params"})
    short, named, shaped = (copy.deepcopy(before) for _ in range(3))
    short["param_groups"][0]["params"].pop()
    named["state"][0]["momentum_buffer"] = named["state"][0].pop("exp_avg")
    shaped["state"][0]["exp_avg"] = torch.zeros(3)
    for state, error, message in (
        (short, ValueError, "doesn't match the size"),
        (
            named,
            ConfigError,
            r"'embed.weight' has \['exp_avg_sq', 'momentum_buffer', 'step'\], but AdamW .* keeps",
        ),
        (
            shaped,
            ConfigError,
            r"exp_avg of 'embed.weight' has shape \(3,\) in .*, as the parameter has shape \(32, 64",
        ),
    ):
        state["param_groups"][0]["lr"] = 9.0
        with pytest.raises(error, match=message):
            optimizer.load_state_dict(state)
    assert_alike(optimizer.state_dict(), before)


# ---- adding groups, freezing and unfreezing ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "option", "value", "says"),
    [
        (
            torch.optim.SGD,
            "momentum",
            0.9,
            r"group 0 has momentum=0.9 \(was 0\) since .* keeps momentum_buffer: owners",
        ),
        (
            torch.optim.AdamW,
            "amsgrad",
            True,
            r"group 0 has amsgrad=True \(was False\) since .* keeps max_exp_avg_sq: own",
        ),
        (
            torch.optim.RMSprop,
            "centered",
            True,
            r"group 0 has centered=True \(was False\) since .* keeps grad_avg: own",
        ),
    ],
)
def test_an_option_that_makes_new_states_is_refused_by_the_step_that_has_it(
    make: Any, option: str, value: Any, says: str, alone: RankContext
) -> None:
    """Before anything is sent, so that the loop can set it back and go on; also if another group keeps such states."""
    plain, model = seeded(Net), seeded(Net)

    def made(of: nn.Module) -> Any:
        return make([{"params": of.layers.parameters()}, {"params": of.embed.parameters(), option: value}], lr=1e-2)

    reference = made(plain)
    model, optimizer = rayzero.prepare(model, made(model))
    train(model, optimizer, range(1))
    was = optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = value
    part_loss(model, tokens(1)).backward()
    with pytest.raises(UnsupportedError, match=says):
        optimizer.step()
    optimizer.param_groups[0][option] = was
    optimizer.step()
    optimizer.zero_grad()
    plain_train(plain, reference, range(2), 1)
    assert relative_difference(rayzero.full_state_dict(model), plain.state_dict()) <= 1e-5


SWITCHED: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD": (OPTIMIZERS["SGD, momentum"], {"momentum": 0}),  # the constructor refuses it: nesterov=True needs momentum
    "RMSprop": (OPTIMIZERS["RMSprop"], {"momentum": 0, "centered": False}),
    "Adam": (partial(torch.optim.Adam, lr=1e-3, amsgrad=True, fused=True), {"amsgrad": False}),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_states_stay_when_the_option_that_made_them_is_switched_off(
    name: str, alone: RankContext, tmp_path: Path
) -> None:
    """As in torch: they are saved, loaded, and gone on with where it is switched on again."""
    (make, off), base = SWITCHED[name], seeded(Net)
    plain = copy.deepcopy(base)
    reference = make(plain.parameters())
    model, optimizer = prepared_copy(base, make, ZeroConfig(kernel="torch"))
    on = {option: optimizer.param_groups[0][option] for option in off}
    for of, its, fit_ in ((plain, reference, plain_train), (model, optimizer, train)):
        steps = (1,) if of is plain else ()
        fit_(of, its, range(1), *steps)
        its.param_groups[0].update(off)
        fit_(of, its, range(1, 2), *steps)
        its.load_state_dict(saved_and_loaded(its.state_dict()))
        if of is model:
            rayzero.save_checkpoint(optimizer, tmp_path / "off")
            load_checkpoint(optimizer, tmp_path / "off")
        its.param_groups[0].update(on)
        fit_(of, its, range(2, 4), *steps)
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())


def test_an_option_with_which_a_class_cannot_step_is_refused_by_name(alone: RankContext) -> None:
    plain = seeded(Net)
    model, optimizer = prepared_copy(plain, torch.optim.SGD, lr=0.1)
    token_loss(model, tokens(0)).backward()
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ConfigError, match=r"group 0 has lr=None \(was 0.1\) .* SGD cannot step: TypeError"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    plain_train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), range(1), 1)
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())


def test_groups_that_cannot_be_added_are_refused_by_name_and_leave_no_trace(alone: RankContext) -> None:
    model = seeded(Net)
    model.layers[0].requires_grad_(False)
    trained = [*model.layers[1].parameters()]
    model, optimizer = rayzero.prepare(model, adamw(trained))
    for group, error, message in (
        (
            {"params": [nn.Parameter(torch.ones(2))]},
            UnsupportedError,
            r"parameter 0 of the added group .* is not",
        ),
        (
            {"params": model.layers[0].parameters()},
            UnsupportedError,
            r"'layers.0.norm.weight' of .* is frozen",
        ),
        ({"params": model.layers[2].parameters(), "amsgrad": True}, UnsupportedError, "keeps max_exp_avg_sq, which no"),
        ({"params": trained}, ValueError, "more than one parameter group"),
    ):
        with pytest.raises(error, match=message):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, range(2))
