"""Reading a prepared model outside forward brings up no more than it has to. (What is read: tests/programs.)"""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations

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


# ---- uses that would go past the owners ---------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _in_ddp(model: nn.Module) -> None:
    nn.parallel.DistributedDataParallel(nn.Sequential(model))(tokens(0)[0])


CAPTURED = r"captured whole \(torch\.export, torch\.jit, .*full_state_dict"
USES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "DistributedDataParallel": (_in_ddp, "DistributedDataParallel around a prepared model"),
    "export": (lambda m: torch.export.export(m, (tokens(0)[0],)), CAPTURED),
    "strict export": (lambda m: torch.export.export(m, (tokens(0)[0],), strict=True), CAPTURED),
    "jit.trace": (lambda m: torch.jit.trace(m, (tokens(0)[0],)), CAPTURED),
    "jit.script": (torch.jit.script, CAPTURED),
    "jit.script of a part": (lambda m: torch.jit.script(m.layers[0]), CAPTURED),
    "make_fx": (lambda m: make_fx(m)(tokens(0)[0]), CAPTURED),
    "new Parameter": (lambda m: nn.Parameter(m.norm.weight), r"nn\.Parameter of .*param\.detach\(\)\.clone"),
    "weight_norm": (lambda m: parametrizations.weight_norm(m.layers[0].up), r"nn\.Parameter of .*parametrize"),
    "from_pretrained": (lambda m: nn.Embedding.from_pretrained(m.embed.weight), r"nn\.Parameter of .*parametrize"),
    "t_": (lambda m: torch.no_grad()(m.embed.weight.t_)(), r"t_\(\) on a Parameter of shape \(32, 64\)"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_would_take_its_gradients_or_its_memory_is_refused_by_name(
    use: str, alone: RankContext, group: None
) -> None:
    """Under DistributedDataParallel it trained, to other weights. After each refusal it trains as if nothing was."""
    act, says = USES[use]
    config = tight(Net()) if use == "jit.trace" else None  # a trace of a model that stays up goes on
    model, optimizer = prepared_copy(seeded(Net), torch.optim.SGD, config, lr=0.1)
    with pytest.raises(Exception, match=says):
        act(model)
    expected, plain = prepared_copy(seeded(Net), torch.optim.SGD, lr=0.1)
    for each, its in ((model, optimizer), (expected, plain)):
        token_loss(each, tokens(0)).backward()
        its.step()
    assert same_bits(rayzero.full_state_dict(model), rayzero.full_state_dict(expected))


def test_its_values_as_another_class_are_brought(alone: RankContext) -> None:
    """Torch reads the memory without asking the Parameter's class: the process died."""
    model, _, _ = _fresh()
    weight = model.layers[1].up.weight
    assert torch.equal(weight.as_subclass(torch.Tensor).detach(), weight.detach())


def test_a_copy_that_asks_no_class_ends_the_process() -> None:
    """Torch's C++ reads memory that is not there. Once it asks the Parameter first, a row of the page of differences
    goes."""
    program = """
        import torch, rayzero
        model = torch.nn.Linear(64, 64)
        rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        print("prepared", flush=True)
        torch.tensor(model.weight)
    """
    with forked(program, quiet=True) as process:
        assert process.said() == "prepared"
        assert process.wait(60) == -signal.SIGSEGV
