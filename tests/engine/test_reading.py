"""Reading a prepared model outside forward: full values, plain names, plain copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.autograd.touch import ShardedParameter
from rayzero.engine.context import RankContext
from rayzero.engine.engine import Engine
from rayzero.engine.units.param_unit import UnitState
from rayzero.errors import MemoryPlanError, UnsupportedError
from rayzero.memory.pool import buffer_bytes

from .models import Net, fit, prepared_copy, same_bits, seeded, tight, token_loss, tokens

Pair = tuple[nn.Module, rayzero.ZeroOptimizer, nn.Module]


@pytest.fixture(params=[ZeroConfig(), tight(Net(), prefetch_buffer_size=1)], ids=["all up", "one ahead"])
def pair(request: pytest.FixtureRequest, alone: RankContext) -> Pair:
    """A prepared model and its optimizer after one step, and the plain model it equals."""
    plain = seeded(Net)
    model = copy.deepcopy(plain)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    fit(plain, sgd, [0])
    model, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), request.param)
    fit(model, optimizer, [0])
    return model, optimizer, plain


READS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda m: m.layers[1].up.weight.norm(),
    "data": lambda m: m.layers[1].up.weight.data.clone(),
    "index": lambda m: m.layers[1].up.weight[3, 5],
    "tolist": lambda m: m.layers[1].up.bias.tolist(),
    "numpy": lambda m: m.layers[1].up.bias.detach().numpy().copy(),
    "item": lambda m: m.layers[1].up.bias[0].item(),
    "repr": lambda m: repr(m.layers[1].up.bias),
    "vector": lambda m: parameters_to_vector(m.parameters()),
    "foreach": lambda m: torch._foreach_norm([p.detach() for p in m.parameters()]),
    "stack of two units": lambda m: torch.stack([m.layers[0].up.bias, m.layers[2].up.bias]),
    "all at once": lambda m: torch.cat([p.flatten() for p in m.parameters()]),
    "linear with another's weight": lambda m: nn.functional.linear(torch.ones(64), m.layers[0].up.weight),
    "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (tokens(0)[0],)),
    "vmap": lambda m: torch.vmap(m.layers[0])(torch.ones(2, 3, 64)),
    "submodule": lambda m: m.layers[2](torch.ones(2, 64)),
}


def fits(engine: Engine) -> bool:
    return sum(buffer_bytes(unit.size_bytes) for unit in engine.units) <= engine.config.gpu_param_memory_budget


def plain_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


HOLD_ALL = ["vector", "foreach", "all at once"]  # they hold views of every parameter at once


@pytest.mark.parametrize("read", READS)
def test_reading_gives_what_the_plain_model_gives(read: str, pair: Pair) -> None:
    model, optimizer, plain = pair
    if read in HOLD_ALL and not fits(optimizer.engine):
        with pytest.raises(MemoryPlanError, match=r"no room for unit 'layers\.2' .* held by views"):
            READS[read](model)
        return
    assert plain_value(READS[read](model)) == plain_value(READS[read](plain))


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


def test_full_state_dict_and_state_dict_have_the_models_names_order_and_values(pair: Pair) -> None:
    model, optimizer, plain = pair
    full, aliased = rayzero.full_state_dict(model), model.state_dict()
    assert same_bits(full, plain.state_dict())
    assert same_bits(aliased, plain.state_dict())
    assert "head.weight" in full
    copy.deepcopy(plain).load_state_dict(full)
    optimizer.step()
    optimizer.zero_grad()
    assert not any(unit.pinned_slots() for unit in optimizer.engine.units if unit.state is UnitState.UNSHARDED)


def test_state_dict_under_a_prefix_and_with_keep_vars(pair: Pair) -> None:
    model, _, plain = pair
    wrapper = nn.ModuleDict({"inner": model})
    assert same_bits(wrapper.state_dict(), nn.ModuleDict({"inner": plain}).state_dict())
    assert model.state_dict(keep_vars=True)["norm.weight"] is model.norm.weight


def test_buffers_are_in_both_state_dicts(alone: RankContext) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].register_buffer("scratch", torch.ones(1), persistent=False)
    names = list(model.state_dict())
    model, _ = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(8, 4))
    assert list(rayzero.full_state_dict(model)) == list(model.state_dict()) == names
    assert rayzero.full_state_dict(model)["1.num_batches_tracked"] == 1


@pytest.mark.parametrize(
    "clone",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: torch.load(_saved(m), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_plain_models_that_train_on_their_own(clone: Callable[[nn.Module], nn.Module], pair: Pair) -> None:
    model, _, plain = pair
    model.wrap = plain.wrap = _call  # a lambda cannot be pickled
    twin = clone(model)
    assert all(type(param) is nn.Parameter for param in twin.parameters())
    assert same_bits(twin.state_dict(), plain.state_dict())
    assert twin.head.weight is twin.embed.weight
    token_loss(twin, tokens(1)).backward()
    token_loss(plain, tokens(1)).backward()
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_full_parameters_are_complete_in_place(pair: Pair) -> None:
    model, optimizer, plain = pair
    if not fits(optimizer.engine):
        with pytest.raises(MemoryPlanError, match=r"no room for unit 'layers\.2' .* in use"):
            rayzero.full_parameters(model).__enter__()
        return
    with rayzero.full_parameters(model):
        assert not any(isinstance(param, ShardedParameter) for param in model.parameters())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    fit(model, optimizer, [1])


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
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "set data": lambda m: setattr(m.layers[1].up.weight, "data", torch.zeros(64, 128)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_dtype_or_data_are_refused_by_name(change: str, alone: RankContext) -> None:
    model = seeded(Net)
    model.layers[0].requires_grad_(False)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, _ = rayzero.prepare(model, sgd)
    expected = rayzero.full_state_dict(model)
    with pytest.raises(UnsupportedError, match=r"'.*weight' was given .* rayzero.prepare\(\)"):
        CHANGES[change](model)
    assert same_bits(model.state_dict(), expected)


def test_a_model_can_be_moved_to_where_it_is_with_gradients_that_have_left(alone: RankContext) -> None:
    model, optimizer = prepared_copy(seeded(Net), torch.optim.SGD, lr=0.1)
    token_loss(model, tokens(0)).backward()
    model.to("cpu")
    optimizer.step()
    model.to("cpu").float()
    optimizer.zero_grad()
