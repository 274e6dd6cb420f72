"""The optimizer a training loop holds: a real ``torch.optim.Optimizer`` whose update happens with the owners."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.messages import Decision, Hyper

if TYPE_CHECKING:
    from rayzero.engine.engine import Engine


class ZeroOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer it was made from: the same parameter groups, live, for loops and LR schedulers.

    Knows parameter groups; not parameters' values, gradients or moments: those are with the owners."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        """``optimizer``: a torch optimizer that has not stepped yet; its group dicts become ours."""
        self.engine = engine
        self.optimizer_class = type(optimizer)
        super().__init__(optimizer.param_groups, dict(optimizer.defaults))
        self._num_prepared_groups = len(self.param_groups)

    def __repr__(self) -> str:
        return f"ZeroOptimizer of {self.optimizer_class.__name__} at step {self.engine.step_state.step}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Have the owners apply the step; returns once the finish is sent (``overlap="forward"``).

        closure: called once, before; its result is returned. (Optimizers that call it several times are not
        element-wise and are refused at prepare.) Raises what failed on the way: pushes, the last step. Under
        ``nonfinite="raise"`` it waits for the norm, and raises NonFiniteGradientError with nothing committed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_new_groups()
        self.engine.step(hyper_of(self))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Take back the gradients of this step. After clip_grad_norm_ every rank must do so, or none."""
        self.engine.discard()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the step's global gradient norm to ``max_norm``; call it after the last backward of the step.

        Returns the norm of the gradients before this clip, averaged over ranks, as a 0-dim fp32 tensor. Waits for
        all ranks. Called again, it clips what the first left. Under ``nonfinite="raise"`` an inf or nan norm
        raises NonFiniteGradientError; under ``"skip"`` it is returned and the step will change nothing."""
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm >= 0:
            raise ConfigError(f"max_norm must be a number >= 0, got {max_norm!r}")
        return torch.tensor(self.engine.clip(max_norm), dtype=torch.float32, device=self.engine.device)

    def last_decision(self) -> Future[Decision]:
        """What the last step() was decided to be: norm, scale, apply or skip. Done when every rank has finished it."""
        return self.engine.step_state.decision()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, while preparing; afterwards refused: owners' memory is laid out at prepare."""
        if hasattr(self, "_num_prepared_groups"):
            raise UnsupportedError("add_param_group after rayzero.prepare() is not supported yet; add it before")
        super().add_param_group(param_group)

    def _refuse_new_groups(self) -> None:
        if len(self.param_groups) != self._num_prepared_groups:
            raise UnsupportedError(
                f"the optimizer had {self._num_prepared_groups} parameter groups at rayzero.prepare() and has "
                f"{len(self.param_groups)} now; add groups before"
            )

    def state_dict(self) -> dict[str, Any]:
        """Refused by name: moments are with the owners."""
        raise UnsupportedError(
            "optimizer.state_dict() is not supported yet: moments are with the optimizer owners; use "
            "rayzero.save_checkpoint(optimizer, directory, loop_state)"
        )

    def load_state_dict(self, state_dict: Any) -> None:
        """Refused by name: moments are with the owners."""
        raise UnsupportedError(
            "optimizer.load_state_dict() is not supported yet: moments are with the optimizer owners; resume from a "
            "checkpoint of rayzero.save_checkpoint"
        )


def hyper_of(optimizer: torch.optim.Optimizer) -> tuple[Hyper, ...]:
    """Each parameter group's own options as plain JSON values, read now; other people's keys are left out."""
    return tuple(
        {name: _plain(group[name]) for name in optimizer.defaults if name in group} for group in optimizer.param_groups
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnsupportedError(f"a parameter group's option is {value!r}, which is not a plain number, flag or text")
