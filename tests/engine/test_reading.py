"""Reading a prepared model outside forward brings up no more than it has to. (What is read: tests/programs.)"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.engine.engine import Engine
from rayzero.engine.units.param_unit import UnitState
from rayzero.errors import UnsupportedError

from .models import Net, prepared_copy, same_bits, seeded, tight, token_loss, tokens


def test_metadata_brings_nothing_up(alone: RankContext) -> None:
    model, optimizer, engine = _fresh()
    for name, param in model.named_parameters():
        assert param.shape == param.size()
        assert param.dtype is torch.float32
        assert param.requires_grad
        assert param.is_leaf
        assert param.grad is None
        assert param.device == torch.device("cpu")
        assert param.numel() == param.nelement() > 0
        assert param.is_contiguous()
        assert isinstance(param, nn.Parameter), name
        hash(param)
    repr(model)
    torch.optim.SGD(model.parameters(), lr=0.1)
    assert {unit.state for unit in engine.units} == {UnitState.SHARDED}
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def _fresh() -> tuple[nn.Module, rayzero.ZeroOptimizer, Engine]:
    model = seeded(Net)
    model, optimizer = rayzero.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), tight(model, async_prefetch=False, spare=0)
    )
    return model, optimizer, optimizer.engine


def test_reading_every_parameter_in_turn_keeps_one_unit_up(alone: RankContext) -> None:
    model, _, engine = _fresh()
    total = sum(float(param.detach().square().sum()) for param in model.parameters())
    assert total == pytest.approx(sum(float(p.detach().square().sum()) for p in seeded(Net).parameters()))
    assert sum(unit.state is UnitState.UNSHARDED for unit in engine.units) <= 2  # the last one and the root


def test_state_dict_under_a_prefix_and_with_keep_vars(alone: RankContext) -> None:
    model, _, _ = _fresh()
    plain = seeded(Net)
    wrapper = nn.ModuleDict({"inner": model})
    assert same_bits(wrapper.state_dict(), nn.ModuleDict({"inner": plain}).state_dict())
    assert model.state_dict(keep_vars=True)["norm.weight"] is model.norm.weight


def test_what_a_forward_copies_of_its_weights_is_plain(alone: RankContext) -> None:
    """A copy, a pickle or a text of a Parameter whose unit is open."""
    seen: list[Any] = []

    def look(layer: nn.Module, _: Any) -> None:
        weight = layer.up.weight
        copies = [copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))]
        seen.append([(type(made), made.tag if hasattr(made, "tag") else "", made.tolist()) for made in copies])
        seen.append((repr(weight), isinstance(weight, nn.Parameter), type(weight.data)))

    plain = seeded(Net)
    plain.layers[1].up.weight.tag = "kept by pickle, not by copy"
    model = copy.deepcopy(plain)
    model.layers[1].up.weight.tag = plain.layers[1].up.weight.tag
    model, _ = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), tight(model, prefetch_buffer_size=1))
    for one in (plain, model):
        one.layers[1].register_forward_pre_hook(look)
        one(tokens(0)[0])
    assert seen[:2] == seen[2:]


# ---- changes ----------------------------------------------------------------------------------------------------


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "set data": lambda m: setattr(m.layers[1].up.weight, "data", torch.zeros(64, 128)),
    "new Parameter": lambda m: setattr(m.layers[1].up, "weight", nn.Parameter(torch.zeros(128, 64))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_exchanged_parameter_is_refused_by_the_next_forward(change: str, alone: RankContext) -> None:
    model = seeded(Net)
    model.layers[0].requires_grad_(False)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, _ = rayzero.prepare(model, sgd)
    expected = rayzero.full_state_dict(model)

    def go_on() -> None:
        CHANGES[change](model)
        model(tokens(0)[0])

    with pytest.raises(UnsupportedError, match=r"'.*weight' was .* after rayzero.prepare\(\)"):
        go_on()
    assert change == "new Parameter" or same_bits(rayzero.full_state_dict(model), expected)


def test_a_model_can_be_moved_to_where_it_is_with_gradients_that_have_left(alone: RankContext) -> None:
    model, optimizer = prepared_copy(seeded(Net), torch.optim.SGD, lr=0.1)
    token_loss(model, tokens(0)).backward()
    model.to("cpu")
    optimizer.step()
    model.to("cpu").float()
    optimizer.zero_grad()
