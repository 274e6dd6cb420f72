"""Hyper-parameters in both directions: what users and schedulers set, and what a sub-optimizer's group says."""

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
    """The same with numbers in place of 0-dim tensors: another thread reads them while a scheduler writes there."""
    return {key: _number(value) for key, value in options_of(group).items()}


def _number(value: Any) -> Any:
    if isinstance(value, tuple):  # betas
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


class HyperLink:
    """Keeps a sub-optimizer's groups and the groups that they stand for equal.

    Knows options; not parameters. An option that only the sub-optimizer has changed since the last ``push`` is taken
    from there, every other one goes there."""

    def __init__(
        self,
        indices: Sequence[int],
        groups_of_sub: Callable[[], Sequence[Group]],
        adapt: Callable[[Group], Group] = numbers_of,
    ) -> None:
        """``indices``: of the groups that the sub-optimizer's stand for. ``groups_of_sub``: those, asked each time, as
        loading a state replaces them. ``adapt``: what they are given for a group."""
        self._indices, self._groups_of_sub, self._adapt = list(indices), groups_of_sub, adapt
        self._last: list[Group] = [{} for _ in indices]

    def pull(self, groups: Sequence[Group]) -> None:
        """Take what the sub-optimizer's side changed."""
        for index, sub, last in zip(self._indices, self._groups_of_sub(), self._last, strict=True):
            ours = self._adapt(groups[index])
            for key, value in last.items():
                if key in sub and not equal(sub[key], value) and key in ours and equal(ours[key], value):
                    groups[index][key] = sub[key]

    def push(self, groups: Sequence[Group]) -> None:
        """Give it everything."""
        self._last = [self._adapt(groups[index]) for index in self._indices]
        for sub, options in zip(self._groups_of_sub(), self._last, strict=True):
            sub.update(options)

    def changed(self, groups: Sequence[Group]) -> list[str]:
        """Names of options that ``push`` would change."""
        pairs = ((self._adapt(groups[index]), last) for index, last in zip(self._indices, self._last, strict=True))
        return sorted({key for ours, last in pairs for key in ours if key in last and not equal(ours[key], last[key])})


def equal(a: Any, b: Any) -> bool:
    """Whether two options say the same."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return bool(torch.equal(torch.as_tensor(a).cpu().double(), torch.as_tensor(b).cpu().double()))
    return bool(a == b)
