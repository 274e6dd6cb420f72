"""Trains a model with plain PyTorch and with RayZero in one process, and compares every bit.

Plain: AdamW(fused=True) unless a family says otherwise, fp32, one thread. RayZero: the same with the smallest
`gpu_param_memory_budget` that the model allows, so that units come and go all the time.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

import numpy
import torch
from torch import Tensor, nn

import rayzero
import rayzero.engine.prepare  # here, not in each case's process
import rayzero.store.inprocess
from rayzero.errors import MemoryPlanError, RayZeroError

from .trial import NOT_TRIED, REFUSED, ROUNDING, SAME, WRONG, Outcome

STEPS = 3
LR = 1e-3
_MOST = 30_000_000  # parameters: larger ones take too long here
_ROUNDING = 1e-4  # of the distance that Adam can have moved a weight: more is no rounding

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Loss = Callable[[nn.Module, int], Tensor]  # of the model at a step; the same at each call


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for what is trained of a model."""
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=LR, fused=True)


def trained_beside_plain(build: Callable[[], nn.Module], loss: Loss, optim: MakeOptimizer = adamw) -> Outcome:
    """What came of a model: ``build`` makes it on the CPU, from the global generator. ``loss``: see ``Loss``."""
    torch.set_num_threads(1)
    try:
        plain = _built(build)
        size = sum(param.numel() for param in plain.parameters())
        if size > _MOST:
            return Outcome(NOT_TRIED, f"{size / 1e6:.0f} million parameters")
        expected = _trained(plain, optim(plain), loss)
    except Exception as exc:  # the edge to foreign libraries: what they raise without RayZero
        return Outcome(NOT_TRIED, f"plain PyTorch: {type(exc).__name__}: {exc}")
    if not all(map(torch.isfinite, expected)):
        return Outcome(NOT_TRIED, "plain PyTorch: the loss is not finite")
    before = _state(_built(build))
    if not all(_same(value, before[name]) for name, value in _state(_built(build)).items()):
        return Outcome(NOT_TRIED, "the same seed makes other weights each time")
    try:
        found, weights, units = _with_least_budget(build, loss, optim)
    except RayZeroError as exc:
        return Outcome(REFUSED, str(exc))
    return _compared(_state(plain), weights, before, expected, found, units)


def project(outputs: object, step: int) -> Tensor:
    """A loss that depends on every float tensor in a model's outputs: each times noise of its own, added up."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = [value for value in _tensors(outputs) if value.is_floating_point() and value.requires_grad]
    if not found:
        raise ValueError("the outputs need no gradient")
    noise = [torch.randn(value.shape, generator=generator, dtype=torch.float32) for value in found]
    return torch.stack([(value.float() * n).mean() for value, n in zip(found, noise, strict=True)]).sum()


def _tensors(outputs: object) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for name, value in outputs.items():
            if name != "past_key_values":
                yield from _tensors(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    _seed(0)
    return build().train()


def _seed(number: int) -> None:
    """All three, because models draw masks and what is dropped from any of them."""
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def _with_least_budget(
    build: Callable[[], nn.Module], loss: Loss, optim: MakeOptimizer
) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """(losses, weights, units) of training with the smallest budget: a refusal says what it lacks."""
    budget = 1
    while True:
        model = _built(build)
        try:
            prepared, optimizer = rayzero.prepare(
                model, optim(model), rayzero.ZeroConfig(gpu_param_memory_budget=budget)
            )
            found = _trained(prepared, optimizer, loss)
            return found, rayzero.full_state_dict(prepared), len(optimizer.engine.layout.units)
        except MemoryPlanError as exc:
            least = re.search(r"set it to at least ([\d,]+)", str(exc))
            if least is None or int(least[1].replace(",", "")) <= budget:
                raise
            budget = int(least[1].replace(",", ""))


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer | rayzero.ZeroOptimizer, loss: Loss) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        _seed(step)
        value = loss(model, step)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach().clone())
    return losses


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = {name: param for name, param in model.named_parameters()} | dict(model.state_dict())
    return {name: value.detach().clone() for name, value in state.items() if isinstance(value, Tensor)}


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def _compared(
    expected: dict[str, Tensor],
    found: dict[str, Tensor],
    before: dict[str, Tensor],
    losses: list[Tensor],
    others: list[Tensor],
    units: int,
) -> Outcome:
    moved = sum(not _same(value, before[name]) for name, value in expected.items())
    missing = sorted(expected.keys() - found.keys())
    if missing:
        return Outcome(WRONG, f"full_state_dict lacks {missing[:3]}")
    differs = [name for name, value in expected.items() if not _same(value, found[name])]
    if not differs and all(map(torch.equal, losses, others)):
        return Outcome(SAME, f"{units} units, {moved} of {len(expected)} tensors changed")
    if not differs:
        by = max(float((one - other).abs()) for one, other in zip(losses, others, strict=True))
        return Outcome(ROUNDING, f"losses by {by:.1g}")
    worst = max(differs, key=lambda name: float((expected[name].double() - found[name].double()).abs().max()))
    by = float((expected[worst].double() - found[worst].double()).abs().max())
    said = f"{len(differs)} of {len(expected)} tensors differ, {worst} by {by:.1g} of {STEPS * LR:g}"
    return Outcome(ROUNDING if by <= _ROUNDING * STEPS * LR else WRONG, said)
