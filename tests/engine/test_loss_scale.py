"""fp16 with torch's own GradScaler, and clipping by value, against fp32 masters trained by plain torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.protocol.messages import Action
from rayzero.testing import run_ranks

from .models import Net, averaged, prepared_copy, relative_difference, same_bits, seeded, tight, token_loss, tokens

STEPS = 9
adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True)


def make_scaler() -> torch.amp.GradScaler:
    """Starts so high that the first steps overflow in fp16, and grows again within the test."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)


Clip = Callable[[Any, list[nn.Parameter]], list[float]]  # (optimizer, its parameters) -> norms


def by_norm(optimizer: Any, params: list[nn.Parameter]) -> list[float]:
    ours = isinstance(optimizer, rayzero.ZeroOptimizer)
    return [float(optimizer.clip_grad_norm_(0.5) if ours else nn.utils.clip_grad_norm_(params, 0.5))]


def by_value(optimizer: Any, params: list[nn.Parameter]) -> list[float]:
    ours = isinstance(optimizer, rayzero.ZeroOptimizer)
    optimizer.clip_grad_value_(0.02) if ours else nn.utils.clip_grad_value_(params, 0.02)
    return []


def both(optimizer: Any, params: list[nn.Parameter]) -> list[float]:
    return [norm for clip in (by_norm, by_value, by_norm) for norm in clip(optimizer, params)]


CLIPS: dict[str, Clip | None] = {"no clip": None, "norm": by_norm, "value": by_value, "norm, value, norm": both}


def train(context: RankContext, base: nn.Module, precision: str, clip: Clip | None) -> Any:
    """The loop of torch's documentation on one rank: state, scales, norms."""
    config = tight(base, precision=precision, prefetch_buffer_size=1, shard_bytes=16 << 10)
    model, optimizer = prepared_copy(base, adamw, config)
    scaler = make_scaler()
    scales, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(token_loss(model, tokens(step, context.rank))).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            norms += clip(optimizer, list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return rayzero.full_state_dict(model), scales, norms


def masters_oracle(base: nn.Module, dtype: torch.dtype, clip: Clip | None, world_size: int) -> Any:
    """The same with replicas in ``dtype`` and a GradScaler over fp32 masters, gradients added up in rank order."""
    model = copy.deepcopy(base)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(dtype)
    optimizer, scaler = adamw(masters), make_scaler()
    scales, norms = [], []
    for step in range(STEPS):
        replicas = []
        for rank in range(world_size):
            model.zero_grad()
            scaler.scale(token_loss(model, tokens(step, rank))).backward()
            replicas.append([p.grad for p in model.parameters()])
        for master, grad in zip(masters, averaged(replicas), strict=True):
            master.grad = grad
        if clip is not None:
            scaler.unscale_(optimizer)
            norms += clip(optimizer, masters)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
    names = dict(zip((name for name, _ in model.named_parameters()), masters, strict=True))
    names["head.weight"] = names["embed.weight"]
    return {name: names[name].detach() for name in model.state_dict()}, scales, norms


@pytest.fixture(scope="module")
def base() -> Iterator[nn.Module]:
    return seeded(partial(Net, num_layers=2))


@pytest.mark.promise("exact", "precisions")
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fp16_with_torchs_scaler_is_fp16_with_fp32_masters(base: nn.Module, clip: str, world_size: int) -> None:
    expected, scales, norms = masters_oracle(base, torch.float16, CLIPS[clip], world_size)
    skipped = sum(later < earlier for earlier, later in zip([2.0**16, *scales], scales, strict=False))
    assert 0 < skipped < STEPS - 3, "some steps must overflow, and the scale grow again"
    assert scales[-1] > min(scales)
    results = run_ranks(lambda ctx: train(ctx, base, "fp16", CLIPS[clip]), world_size, 2)
    for state, its_scales, its_norms in results:
        assert its_scales == scales
        taken = [(mine, its) for mine, its in zip(its_norms, norms, strict=True) if math.isfinite(its)]
        assert [mine for mine, _ in taken] == pytest.approx([its for _, its in taken], rel=1e-5)
        # a factor that differs in its last bit can round a master to the next fp16 parameter
        assert relative_difference(state, expected) <= (1e-3 if norms else 1e-6)
        assert same_bits(state, results[0][0])


def prepared(base: nn.Module, **settings: Any) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    return prepared_copy(base, adamw, ZeroConfig(**settings))


def test_other_optimizers_are_unscaled_as_ever(base: nn.Module, alone: RankContext) -> None:
    prepared(base)
    param = nn.Parameter(torch.ones(2))
    plain, scaler = torch.optim.SGD([param], lr=0.5), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.unscale_(plain)
    assert param.grad is not None
    assert param.grad.tolist() == [1.0, 1.0]


# ---- clipping by value ------------------------------------------------------------------------------------------


def test_zero_grad_takes_back_a_clip_by_value(base: nn.Module, alone: RankContext) -> None:
    model, optimizer = prepared(base)
    plain = copy.deepcopy(base)
    theirs = adamw(plain.parameters())
    for act in (lambda: None, lambda: token_loss(model, tokens(9)).backward()):
        act()
        optimizer.clip_grad_value_(1e-9)
        optimizer.zero_grad()
    for each, its in ((model, optimizer), (plain, theirs)):
        token_loss(each, tokens(0)).backward()
        its.step()
    assert same_bits(rayzero.full_state_dict(model), plain.state_dict())


def test_max_grad_norm_clips_what_clipping_by_value_left(base: nn.Module, alone: RankContext) -> None:
    model, optimizer = prepared(base, max_grad_norm=1e-3)
    plain = copy.deepcopy(base)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    for each in (model, plain):
        token_loss(each, tokens(0)).backward()
    optimizer.clip_grad_value_(1e-3)
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    assert float(nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)) > 1e-3
    optimizer.step()
    optimizer.zero_grad()
    theirs.step()
    assert relative_difference(rayzero.full_state_dict(model), plain.state_dict()) <= 1e-6
    assert optimizer.last_decision().result().limit < 1e-3


def test_an_inf_is_not_clipped_away(base: nn.Module, alone: RankContext) -> None:
    model, optimizer = prepared(base)
    (token_loss(model, tokens(0)) * float("inf")).backward()
    optimizer.clip_grad_value_(1.0)
    assert not math.isfinite(optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.last_decision().result().action is Action.SKIP
