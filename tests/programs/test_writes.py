"""Writes: what programs do to weights and optimizer states themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine.models import Net, token_loss
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from .case import Case, Program, Run
from .engines import Setting


def every_step(write: Callable[[Run], Any], *, before: str) -> Program:
    """The plain loop, with a write before each "forward" or "step"."""

    def program(run: Run) -> None:
        for step in range(3):
            if before == "forward":
                write(run)
            token_loss(run.model, run.batch(step)).backward()
            if before == "step":
                write(run)
            run.update()

    return program


def clamp(run: Run) -> None:
    for param in run.model.parameters():
        param.data.clamp_(-0.05, 0.05)


def decay(run: Run) -> None:
    with torch.no_grad():
        for group in run.optimizer.param_groups:
            for param in run.model.parameters():
                param.mul_(1 - group["lr"])


def initialise(run: Run) -> None:
    torch.manual_seed(5)
    nn.init.constant_(run.model.layers[1].up.weight, 0.02)
    nn.init.zeros_(run.model.layers[2].down.bias)


def flat(run: Run) -> None:
    some = list(run.model.layers[1].parameters())
    vector_to_parameters(parameters_to_vector(some).detach() * 0.5, some)


def clamp_after_clip(run: Run) -> None:
    run.clip(0.5)
    clamp(run)


def average(run: Run) -> None:
    """An exponential moving average, copied back in the middle."""
    mean = [param.detach().clone() for param in run.model.parameters()]
    for step in range(4):
        token_loss(run.model, run.batch(step)).backward()
        run.update()
        for smooth, param in zip(mean, run.model.parameters(), strict=True):
            smooth.mul_(0.5).add_(param.detach(), alpha=0.5)
        if step == 1:
            for smooth, param in zip(mean, run.model.parameters(), strict=True):
                param.data.copy_(smooth)


def swap(run: Run) -> list[float]:
    """The first rank evaluates with other weights, and puts its own back."""
    losses = []
    for step in range(2):
        token_loss(run.model, run.batch(step)).backward()
        if run.rank == 0:
            with torch.no_grad():
                backup = [param.clone() for param in run.model.parameters()]
                for param in run.model.parameters():
                    param.fill_(0.1)
                losses.append(float(token_loss(run.model, run.batch(9))))
                for param, value in zip(run.model.parameters(), backup, strict=True):
                    param.copy_(value)
        run.update()
    return losses


def go_back(run: Run) -> None:
    """Weights and optimizer state of step 2 are loaded after step 4."""
    saved: Any = None
    for step in range(6):
        if step == 2:
            saved = copy.deepcopy((run.full_state(), run.optimizer.state_dict()))
        if step == 4:
            run.model.load_state_dict(saved[0])
            run.optimizer.load_state_dict(saved[1])
        token_loss(run.model, run.batch(step)).backward()
        run.update()


def add_group(run: Run) -> None:
    """The second block is trained from the second step on."""
    for step in range(4):
        if step == 1:
            run.optimizer.add_param_group({"params": list(run.model.layers[1].parameters()), "lr": 0.02})
        token_loss(run.model, run.batch(step)).backward()
        run.update()
        for param in run.model.layers[1].parameters() if step == 0 else ():
            param.grad = None


def freeze_and_unfreeze(run: Run) -> None:
    for step in range(4):
        run.model.layers[1].requires_grad_(step >= 2)
        token_loss(run.model, run.batch(step)).backward()
        run.update()


def without_second_block(model: nn.Module) -> Optimizer:
    late = {id(param) for param in model.layers[1].parameters()}
    return torch.optim.SGD([p for p in model.parameters() if id(p) not in late], lr=0.1, momentum=0.9)


def clamp_up(layer: nn.Module, _: Any) -> None:
    layer.up.weight.data.clamp_(-0.05, 0.05)


class Clamping(Net):
    """A block, and the model itself, clamp weights in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_pre_hook(clamp_up)

    def forward(self, tokens: Tensor) -> Tensor:
        self.norm.weight.data.clamp_(max=0.99)
        return super().forward(tokens)


class Checkpointed(Clamping):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.wrap = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)


class Teacher(Net):
    """A block's teacher is the average of it, made in forward."""

    def __init__(self) -> None:
        super().__init__(num_layers=4)
        self.layers[3].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        for student, teacher in zip(self.layers[0].parameters(), self.layers[3].parameters(), strict=True):
            teacher.data = teacher.data * 0.9 + student.data * 0.1
        return super().forward(tokens)


def evaluate_with_average(run: Run) -> list[float]:
    """An average of a block takes the weights' place for an evaluation, and they come back."""
    params = dict(run.model.layers[1].named_parameters())
    mean = {name: param.data.clone() for name, param in params.items()}
    losses, own = [], {}
    for step in range(3):
        token_loss(run.model, run.batch(step)).backward()
        run.update()
        for name, param in params.items():
            mean[name] = 0.5 * mean[name] + 0.5 * param.data
            own[name], param.data = param.data, mean[name]
        with torch.no_grad():
            losses.append(float(token_loss(run.model, run.batch(9))))
        for name, param in params.items():
            param.data = own[name]
    return losses


FP32 = ("fp32",)  # where the oracle has no masters to load or to add

CASES = [
    Case("weights clamped before each forward", every_step(clamp, before="forward")),
    Case("weights clamped between clip and step", every_step(clamp_after_clip, before="step"), tolerance=1e-6),
    Case("weight decay by hand", every_step(decay, before="step")),
    Case("nn.init on parts", every_step(initialise, before="forward"), ranks=(2,)),
    Case("vector_to_parameters", every_step(flat, before="forward"), ranks=(2,)),
    Case("an average of weights copied back", average, ranks=(1, 2)),
    Case("one rank swaps weights for an evaluation", swap, ranks=(1, 2)),
    Case("weights and optimizer state loaded", go_back, precisions=FP32),
    Case("a parameter group added later", add_group, optimizer=without_second_block, precisions=FP32),
    Case("a block frozen and unfrozen", freeze_and_unfreeze, precisions=FP32),
    Case(".data clamped in forward", build=Clamping),
    Case(".data clamped in a checkpointed forward", build=lambda: Checkpointed(False), ranks=(1, 2)),
    Case(".data clamped in a reentrant checkpoint", build=lambda: Checkpointed(True), ranks=(1, 2)),
    Case("a teacher averaged by .data in forward", build=Teacher, ranks=(1, 2)),
    Case("an average in the weights' place, by .data", evaluate_with_average, ranks=(1, 2)),
]


@pytest.mark.spread(6)
def test_trains_as_unsharded(case: Case, setting: Setting, check: Callable[[Case, Setting], None]) -> None:
    check(case, setting)
