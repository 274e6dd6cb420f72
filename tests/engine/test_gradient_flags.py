"""``requires_grad`` set after prepare(), as adapters' libraries do: to compare with a frozen adapter, to take turns."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rayzero
from rayzero.engine.context import RankContext
from rayzero.engine.prepare import is_prepared
from rayzero.errors import UnsupportedError

from .models import VOCAB, same_bits, seeded, tight, token_loss, tokens

WIDTH, RANK = 16, 4


class Adapted(nn.Module):
    """A frozen linear layer with adapters, of which one is active, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.ModuleDict({name: nn.Linear(WIDTH, RANK, bias=False) for name in ("default", "ref")})
        self.up = nn.ParameterDict({name: torch.randn(WIDTH, RANK) for name in ("default", "ref")})
        self.active: str | None = "default"

    def forward(self, x: Tensor) -> Tensor:
        if self.active is None:
            return x + self.base(x)
        return x + self.base(x) + F.linear(self.down[self.active](x), self.up[self.active])


class Policy(nn.Module):
    """A stack of adapted layers, called through ``wrap``."""

    def __init__(self, wrap: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB).requires_grad_(False)
        self.wrap = wrap or (lambda layer, x: layer(x))
        self.set_adapter("default")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = self.wrap(layer, x)
        return self.head(x)

    def set_adapter(self, active: str | None) -> None:
        """As PEFT: only the active adapter requires gradients."""
        for layer in self.layers:
            layer.active = active
            for name in ("default", "ref"):
                layer.down[name].requires_grad_(name == active)
                layer.up[name].requires_grad = name == active


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)


def made(model: nn.Module, *, ours: bool) -> tuple[Any, torch.optim.Optimizer]:
    """A model that takes no memory of the oracle's, with an optimizer of what is trained."""
    model = copy.deepcopy(model)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(params)
    if not ours:
        return model, optimizer
    return rayzero.prepare(model, optimizer, tight(model, units=["Adapted"], prefetch_buffer_size=1, spare=0))


def preference_step(model: Any, optimizer: torch.optim.Optimizer, step: int, rank: int = 0, world: int = 1) -> None:
    """The policy's loss beside that of the frozen adapter and that of the base, as DPO and KTO have it."""
    for r in [rank] if world == 1 else range(world):
        batch = tokens(step, r)
        compared = []
        for adapter in ("ref", None):
            model.set_adapter(adapter)
            with torch.no_grad():
                compared.append(token_loss(model, batch))
        model.set_adapter("default")
        loss = token_loss(model, batch)
        (F.softplus(loss - compared[0]) + 0.1 * (loss - compared[1]) ** 2).div(world).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_frozen_adapter_is_switched_to_without_gradients(alone: RankContext) -> None:
    base = seeded(Policy)
    optimizer: Any
    (model, optimizer), (plain, reference) = made(base, ours=True), made(base, ours=False)
    for step in range(4):
        preference_step(model, optimizer, step)
        preference_step(plain, reference, step)
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert not optimizer.engine.unfrozen.slots, "nothing is watched any more"


# ---- what may be done with an unfrozen parameter ----------------------------------------------------------------


def unused(model: Any) -> Tensor:
    """The flag is on, but the forward uses another adapter."""
    for layer in model.layers:
        layer.active = "default"
        layer.down["default"].requires_grad_(True)
        layer.up["default"].requires_grad = True
    return token_loss(model, tokens(7))


def read(model: Any) -> Tensor:
    weight, up = model.layers[1].down["ref"].weight, model.layers[1].up["ref"]
    assert weight.requires_grad
    return torch.cat([weight.detach().flatten(), up.data.flatten(), model.head.weight.detach().flatten()])


def complete(model: Any) -> AbstractContextManager[None]:
    """Where the Parameters are plain, as inside a forward."""
    return rayzero.full_parameters(model) if is_prepared(model) else nullcontext()


def copied(model: Any) -> Tensor:
    with complete(model):
        other = copy.deepcopy(model.layers[1])
    assert type(other.up["ref"]) is nn.Parameter
    assert other.up["ref"].requires_grad
    return other(torch.ones(1, WIDTH)).detach()


def pickled(model: Any) -> Tensor:
    file = io.BytesIO()
    with complete(model):
        torch.save(model.layers[1].up, file)
    file.seek(0)
    return torch.load(file, weights_only=False)["ref"].detach()


@torch.no_grad()
def written(model: Any) -> Tensor:
    model.layers[1].up["ref"].mul_(2)
    model.layers[1].down["ref"].weight.copy_(torch.ones(RANK, WIDTH))
    return token_loss(model, tokens(7))


def loaded(model: Any) -> Tensor:
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return model.layers[1].up["ref"].detach().clone()


@torch.no_grad()
def with_others(model: Any) -> Tensor:
    """One operation on parameters of several units, inside a forward of one."""
    both = []
    model.layers[1].base.register_forward_hook(
        lambda *_: both.append(torch.stack([model.layers[1].up["ref"], model.layers[2].up["default"]]))
    )
    model(tokens(0)[0])
    return both[0]


USES: dict[str, Callable[[Any], Tensor]] = {
    "no use": unused,
    "reads": read,
    "copies": copied,
    "pickles": pickled,
    "writes": written,
    "loads": loaded,
    "with others": with_others,
}


@pytest.mark.parametrize("use", USES)
def test_what_needs_no_gradient_of_it_is_as_in_plain_torch(use: str, alone: RankContext) -> None:
    base = seeded(Policy)
    config = rayzero.ZeroConfig(units=["Adapted"])
    (plain, _), model = made(base, ours=False), copy.deepcopy(base)
    model, _ = rayzero.prepare(model, adamw([p for p in model.parameters() if p.requires_grad]), config)
    for each in (model, plain):
        each.set_adapter("ref")
    torch.testing.assert_close(USES[use](model), USES[use](plain), rtol=0, atol=0)


# ---- what is refused --------------------------------------------------------------------------------------------


def through_its_module(model: Any) -> Any:
    model.set_adapter("ref")
    return token_loss(model, tokens(0))


def in_a_function(model: Any) -> Any:
    weight = model.layers[0].up["ref"].requires_grad_()
    return F.linear(torch.ones(2, RANK), weight)


def beside_others(model: Any) -> Any:
    model.layers[0].up["ref"].requires_grad_()
    return torch.stack([layer.up["ref"] for layer in model.layers])


def all_at_once(model: Any) -> Any:
    model.requires_grad_(True)
    return token_loss(model, tokens(0))


def recomputed(model: Any) -> Any:
    """The first forward has no gradients."""
    model.wrap = lambda layer, x: checkpoint(layer, x, use_reentrant=True) if x.requires_grad else layer(x)
    for layer in model.layers[1:]:
        layer.active = "ref"
    model.layers[2].up["ref"].requires_grad_()
    token_loss(model, tokens(0)).backward()


def inside_a_forward(model: Any) -> Any:
    """The Parameters are plain there, so that nobody sees the flag before the next forward."""

    layer = model.layers[1]
    layer.register_forward_pre_hook(lambda mod, args: setattr(mod.up["ref"], "requires_grad", True))
    for _ in range(2):
        token_loss(model, tokens(0)).backward()
        layer.active = "ref"


REFUSED: dict[str, Callable[[Any], Any]] = {
    "through its module": through_its_module,
    "in a function": in_a_function,
    "beside others": beside_others,
    "all at once": all_at_once,
    "recomputed": recomputed,
    "inside a forward": inside_a_forward,
}


@pytest.mark.parametrize("use", REFUSED)
def test_a_forward_with_gradients_that_uses_it_is_refused_by_name(use: str, alone: RankContext) -> None:
    model, _ = made(seeded(Policy), ours=True)
    before = rayzero.full_state_dict(model)
    with pytest.raises(
        UnsupportedError, match=r"'(layers\.|embed\.).*' was given requires_grad=True .* freeze it then"
    ):
        REFUSED[use](model)
    assert same_bits(rayzero.full_state_dict(model), before)


# ---- adapters that are both trained, and parameters that rest ----------------------------------------------------


def rests_between_steps(model: Any, step: int) -> Iterator[None]:
    model.layers[step % 3].requires_grad_(False)
    yield
    model.layers[step % 3].up.requires_grad_(True)
    model.layers[step % 3].down.requires_grad_(True)


def takes_turns(model: Any, step: int) -> Iterator[None]:
    model.set_adapter(("default", "ref")[step % 2])
    yield


def rests_in_evaluation(model: Any, step: int) -> Iterator[None]:
    model.eval().requires_grad_(False)
    with torch.no_grad():
        model(tokens(step)[0])
    model.train().set_adapter("default")
    yield


TURNS = {"rests": rests_between_steps, "takes turns": takes_turns, "evaluation": rests_in_evaluation}


@pytest.mark.parametrize("turn", TURNS)
def test_what_was_trained_at_prepare_may_rest_and_take_turns(turn: str, alone: RankContext) -> None:
    base = seeded(Policy)
    for layer in base.layers:
        layer.down.requires_grad_(True)
        layer.up.requires_grad_(True)
    (model, optimizer), (plain, reference) = made(base, ours=True), made(base, ours=False)
    for each, of_it in ((model, optimizer), (plain, reference)):
        for step in range(6):
            for _ in TURNS[turn](each, step):
                token_loss(each, tokens(step)).backward()
            of_it.step()
            of_it.zero_grad()
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())
    ours, theirs = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert {key: float(entry["step"]) for key, entry in ours.items()} == {
        key: float(entry["step"]) for key, entry in theirs.items()
    }


def test_a_parameter_added_after_prepare_is_named_where_it_would_be_lost(alone: RankContext, tmp_path: Path) -> None:
    model, optimizer = made(seeded(Policy), ours=True)
    model.layers[1].up["late"] = nn.Parameter(torch.zeros(WIDTH, RANK))
    token_loss(model, tokens(0)).backward()
    optimizer.step()
    for use in (
        lambda: rayzero.full_state_dict(model),
        lambda: rayzero.save_checkpoint(optimizer, tmp_path / "saved"),
        lambda: optimizer.add_param_group({"params": [model.layers[1].up["late"]]}),
    ):
        with pytest.raises(UnsupportedError, match=r"'layers.1.up.late' was added .* before prepare\(\), or keep it"):
            use()
    del model.layers[1].up["late"]
    rayzero.save_checkpoint(optimizer, tmp_path / "saved")
