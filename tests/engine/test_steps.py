"""The rank's side of a step: clipping, discards, accumulation, closures, schedulers, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.autograd.gradients import GradientSums
from rayzero.engine.context import RankContext
from rayzero.errors import (
    AccumulationError,
    ConfigError,
    GradientAccessError,
    NonFiniteGradientError,
    UnsupportedError,
)
from rayzero.protocol.messages import Action

from .models import Net, fit, same_bits, seeded, tight, token_loss, tokens

adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)
Optimizer = torch.optim.Optimizer


def prepared(model: nn.Module, config: ZeroConfig | None = None) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    return rayzero.prepare(model, adamw(model.parameters()), config)


def clip(model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
    if isinstance(optimizer, rayzero.ZeroOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def both(
    loop: Callable[[nn.Module, Optimizer], None],
    config: ZeroConfig | None = None,
    make: Callable[..., Optimizer] = adamw,
    groups: Callable[[nn.Module], list[dict[str, object]]] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The states after the same loop on a prepared and on a plain model."""
    plain = seeded(Net)
    model = copy.deepcopy(plain)
    arguments = groups or (lambda m: m.parameters())
    loop(plain, make(arguments(plain)))
    model, optimizer = rayzero.prepare(model, make(arguments(model)), config)
    loop(model, optimizer)
    return rayzero.full_state_dict(model), plain.state_dict()


# ---- clipping ---------------------------------------------------------------------------------------------------


def unscale(optimizer: rayzero.ZeroOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))  # or it has no scale yet
    scaler.unscale_(optimizer)


ACTS: dict[str, Callable[[rayzero.ZeroOptimizer], object]] = {
    r"optimizer.clip_grad_norm_\(\)": lambda optimizer: optimizer.clip_grad_norm_(0.5),
    r"optimizer.clip_grad_value_\(\)": lambda optimizer: optimizer.clip_grad_value_(0.5),
    r"scaler.unscale_\(optimizer\)": unscale,
}


@pytest.mark.parametrize("act", ACTS)
def test_a_backward_between_clip_and_step_is_refused_and_the_step_stays_right(act: str, alone: RankContext) -> None:
    model, optimizer = prepared(seeded(Net))
    token_loss(model, tokens(0)).backward()
    ACTS[act](optimizer)
    with pytest.raises(GradientAccessError, match=rf"between {act} and .*step"):
        token_loss(model, tokens(1)).backward()
    optimizer.step()
    again, same = prepared(seeded(Net))
    token_loss(again, tokens(0)).backward()
    ACTS[act](same)
    same.step()
    assert same_bits(rayzero.full_state_dict(model), rayzero.full_state_dict(again))


@pytest.mark.parametrize("number", [float("nan"), -1.0, "1", None, True])
@pytest.mark.parametrize(("call", "name"), [("clip_grad_norm_", "max_norm"), ("clip_grad_value_", "clip_value")])
def test_a_limit_that_is_none_is_refused(call: str, name: str, number: Any, alone: RankContext) -> None:
    _, optimizer = prepared(seeded(Net))
    with pytest.raises(ConfigError, match=f"{name} must be a number >= 0"):
        getattr(optimizer, call)(number)


def test_torchs_own_clip_is_an_error_that_names_ours_and_the_caller(alone: RankContext) -> None:
    for config in (ZeroConfig(), tight(Net(), prefetch_buffer_size=1), ZeroConfig(offload_grads=False)):
        model, optimizer = prepared(seeded(Net), config)
        token_loss(model, tokens(0)).backward()
        with pytest.raises(GradientAccessError, match=r"clip_grad_value_ at .*optimizer\.clip_grad_value_\(cl"):
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        with pytest.raises(GradientAccessError, match=r"'embed.weight' has left.*clip_grad_norm_ at .*optimizer\.clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with pytest.raises(
            GradientAccessError, match=r"'embed.weight' has left .* cannot be read \(by clip_grad_norm_"
        ):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        assert all(param.grad is None for param in model.parameters())


# ---- discards ---------------------------------------------------------------------------------------------------


def test_zero_grad_after_clip_reopens_the_step(alone: RankContext) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        token_loss(model, tokens(10)).backward()
        clip(model, optimizer, 0.1)
        optimizer.zero_grad()
        token_loss(model, tokens(0)).backward()
        optimizer.step()

    state, expected = both(loop)
    assert same_bits(state, expected)


# ---- steps ------------------------------------------------------------------------------------------------------


def test_parameters_without_an_optimizer_keep_their_gradient(alone: RankContext) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        fit(model, optimizer, range(2))
        assert model.layers[0].up.weight.grad is not None

    state, expected = both(loop, groups=lambda m: [{"params": m.layers[1].parameters()}])
    assert same_bits(state, expected)


def test_a_step_without_gradients_changes_nothing(alone: RankContext) -> None:
    def loop(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step()
        token_loss(model, tokens(0)).backward()
        optimizer.step()

    state, expected = both(loop)
    assert same_bits(state, expected)


# ---- inf and nan ------------------------------------------------------------------------------------------------


def test_a_step_with_a_nan_gradient_is_skipped(alone: RankContext) -> None:
    model, optimizer = prepared(seeded(Net))
    before = rayzero.full_state_dict(model)
    (token_loss(model, tokens(0)) * float("nan")).backward()
    optimizer.step()
    assert optimizer.last_decision().result().action is Action.SKIP
    assert same_bits(rayzero.full_state_dict(model), before)
    optimizer.zero_grad()
    token_loss(model, tokens(0)).backward()
    optimizer.step()
    assert optimizer.last_decision().result().action is Action.APPLY


def test_a_nan_gradient_raises_under_nonfinite_raise(alone: RankContext) -> None:
    model, optimizer = prepared(seeded(Net), ZeroConfig(nonfinite="raise"))
    (token_loss(model, tokens(0)) * float("nan")).backward()
    with pytest.raises(NonFiniteGradientError, match=r"gradient of 'embed\.weight' is inf or nan"):
        optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    (token_loss(model, tokens(0)) * float("inf")).backward()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    optimizer.zero_grad()
    token_loss(model, tokens(0)).backward()
    optimizer.step()
    assert optimizer.last_decision().result().action is Action.APPLY


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("refused", "accumulation")
def test_an_unplanned_second_backward_in_bf16_names_the_setting(alone: RankContext) -> None:
    model, optimizer = prepared(seeded(Net), ZeroConfig(precision="bf16"))
    token_loss(model, tokens(0)).backward()

    def go_on() -> None:  # found when the push fails: in a later push or in the step
        token_loss(model, tokens(1)).backward()
        optimizer.step()

    for _ in range(2):  # a notebook's cell, run again: it does not wait for a turn that never comes
        with pytest.raises(AccumulationError, match="gradient_accumulation_steps"):
            go_on()
    optimizer.zero_grad()
    token_loss(model, tokens(0)).backward()
    optimizer.step()
    assert optimizer.last_decision().result(30).step == 0


@pytest.mark.promise("refused", "precisions")
@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda m, o: rayzero.prepare(m, o), "prepared already"),
        (lambda m, o: rayzero.full_state_dict(Net()), "was not prepared"),
    ],
    ids=["prepare twice", "not prepared"],
)
def test_what_is_not_supported_is_refused_by_name(
    act: Callable[[nn.Module, rayzero.ZeroOptimizer], object], says: str, alone: RankContext
) -> None:
    model, optimizer = prepared(seeded(Net))
    with pytest.raises(UnsupportedError, match=says):
        act(model, optimizer)


def _stranger() -> tuple[nn.Module, Optimizer]:
    return seeded(Net), adamw([nn.Parameter(torch.ones(3, 2))])


def _on_meta() -> tuple[nn.Module, Optimizer]:
    with torch.device("meta"):
        model = Net()
    return model, adamw(model.parameters())


def _scripted() -> tuple[nn.Module, Optimizer]:
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    return model, adamw(model.parameters())


def _averaged() -> tuple[nn.Module, Optimizer]:
    """Wrapped, but for the process group that its constructor asks for."""
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = nn.Linear(2, 2)
    return wrapper, adamw(wrapper.parameters())


def _stepped() -> tuple[nn.Module, Optimizer]:
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(model, optimizer, [0])
    return model, optimizer


def _shared() -> tuple[nn.Module, Optimizer]:
    first = nn.Linear(2, 2)
    rayzero.prepare(first, adamw(first.parameters()))
    second = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    second.a.weight = first.weight
    return second, adamw(second.b.parameters())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_stranger, r"parameter 0 of the optimizer's group 0 \(shape \(3, 2\)\) is not in the model"),
        (_on_meta, "'embed.weight' is on the meta device"),
        (_scripted, "ScriptModule"),
        (_averaged, "DistributedDataParallel in it"),
        (_stepped, "stepped already"),
        (_shared, "'a.weight' belongs to another prepared model"),
    ],
)
def test_what_cannot_be_prepared_is_refused_before_anything_changes(
    make: Callable[[], tuple[nn.Module, Optimizer]], says: str, alone: RankContext
) -> None:
    model, optimizer = make()
    with pytest.raises(UnsupportedError, match=says):
        rayzero.prepare(model, optimizer)
    assert make is _shared or all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize(
    ("model", "optimizer", "config", "what"),
    [
        ("x", None, None, "model must be a torch.nn.Module"),
        (nn.Linear(2, 2), nn.Linear(2, 2).parameters(), None, "optimizer must be a torch.optim.Optimizer"),
        (nn.Linear(2, 2), adamw(nn.Linear(2, 2).parameters()), {"precision": "bf16"}, "config must be a ZeroConfig"),
    ],
)
def test_arguments_of_the_wrong_kind_are_one_line(model: Any, optimizer: Any, config: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        rayzero.prepare(model, optimizer, config)


def test_alone_there_is_no_grpc(alone: RankContext) -> None:
    with pytest.raises(UnsupportedError, match="transport='grpc' needs the owners of a trainer"):
        prepared(seeded(Net), ZeroConfig(transport="grpc"))


# ---- sums of gradients where they stay on the device until the step


def test_gradients_of_16_bits_are_added_in_32() -> None:
    """In bfloat16 257 small gradients would stay at the first one's 1.0, and the second would be written into the
    first."""
    unit: Any = SimpleNamespace(index=0, layout=SimpleNamespace(dtype=torch.bfloat16))
    sums, first = GradientSums(), torch.ones(4, dtype=torch.bfloat16)
    sums.add(unit, [first, None])
    for _ in range(256):
        sums.add(unit, [torch.full((4,), 2.0**-9, dtype=torch.bfloat16), None])
    assert sums.slots(0) == {0}
    total, nothing = sums.take(unit)
    assert nothing is None
    assert total is not None
    assert total.tolist() == [1.5] * 4
    assert total.dtype is torch.bfloat16
    assert first.tolist() == [1.0] * 4
    assert 0 not in sums
