"""Schedulers whose rates a resumed run must have as the uninterrupted one has them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import lr_scheduler

STEPS = 6  # of each training that is interrupted after every one of them

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=2 * STEPS),  # Accelerate: a step a rank
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=8),
    "StepLR": partial(lr_scheduler.StepLR, step_size=2, gamma=0.1),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 3, 4]),
}
