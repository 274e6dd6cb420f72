"""Keeps hyper-parameters equal between the user's parameter groups and those of the sub-optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]


def options_of(group: Group) -> Group:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def numbers_of(group: Group) -> Group:
    """``options_of`` with numbers in place of 0-dim tensors: the worker reads them while a scheduler may write the
    tensors."""
    return {key: _number(value) for key, value in options_of(group).items()}


def _number(value: Any) -> Any:
    if isinstance(value, tuple):  # betas
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


class HyperLink:
    """Keeps a sub-optimizer's groups equal to the user's groups that they stand for. Knows options; not parameters. An
    option that only the sub-optimizer changed since the last ``push`` is taken from it; all others are copied to it."""

    def __init__(
        self,
        indices: Sequence[int],
        groups_of_sub: Callable[[], Sequence[Group]],
        adapt: Callable[[Group], Group] = numbers_of,
    ) -> None:
        """``indices``: which user group each of the sub-optimizer's groups stands for. ``groups_of_sub``: returns the
        latter; called each time, because loading a state replaces them. ``adapt``: turns a user group into theirs."""
        self._indices, self._groups_of_sub, self._adapt = list(indices), groups_of_sub, adapt
        self._last: list[Group] = [{} for _ in indices]

    def pull(self, groups: Sequence[Group]) -> None:
        """Take over options that the sub-optimizer changed."""
        for index, sub, last in zip(self._indices, self._groups_of_sub(), self._last, strict=True):
            ours = self._adapt(groups[index])
            for key, value in last.items():
                if key in sub and not equal(sub[key], value) and key in ours and equal(ours[key], value):
                    groups[index][key] = sub[key]

    def push(self, groups: Sequence[Group]) -> None:
        """Copy all options to the sub-optimizer."""
        self._last = [self._adapt(groups[index]) for index in self._indices]
        for sub, options in zip(self._groups_of_sub(), self._last, strict=True):
            sub.update(options)

    def changed(self, groups: Sequence[Group]) -> list[str]:
        """The names of the options that ``push`` would change."""
        pairs = ((self._adapt(groups[index]), last) for index, last in zip(self._indices, self._last, strict=True))
        return sorted({key for ours, last in pairs for key in ours if key in last and not equal(ours[key], last[key])})


def equal(a: Any, b: Any) -> bool:
    """Whether two options have equal values."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return bool(torch.equal(torch.as_tensor(a).cpu().double(), torch.as_tensor(b).cpu().double()))
    return bool(a == b)
