"""Every learning rate scheduler of torch, and one of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

STEPS = 12  # that each is made for; within four of them its rate changes


class Scheduler(schedules.LRScheduler):
    """A user's own, with a ``load_state_dict`` of its own and an entry of its own in the groups."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["floor"], group["note"] = 1e-4, ["mine", 1]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [max(group["lr"] * 0.7, group["floor"]) for group in self.optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)


def _sequential(optimizer: Any) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.CosineAnnealingLR(optimizer, 8)]
    return schedules.SequentialLR(optimizer, parts, milestones=[4])


def _chained(optimizer: Any) -> Any:
    parts = [schedules.ConstantLR(optimizer, 0.5, total_iters=5), schedules.ExponentialLR(optimizer, 0.9)]
    return schedules.ChainedScheduler(parts, optimizer)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 3, gamma=0.1),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 5, 9], gamma=0.3),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.25, total_iters=5),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, total_iters=7),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.8),
    "SequentialLR": _sequential,
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 10, power=2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, STEPS),
    "ChainedScheduler": _chained,
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 1e-3, 2e-2, step_size_up=3, mode="triangular2"),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, T_mult=2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 2e-2, total_steps=STEPS + 1),
    "SWALR": lambda o: SWALR(o, swa_lr=1e-3, anneal_epochs=5),
    "Scheduler": Scheduler,
}
