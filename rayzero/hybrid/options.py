"""The options of two optimizer classes, merged into one set of parameter groups and kept equal in both directions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels import ADAMS
from rayzero.kernels.torch_classes.optimizer_class import is_counter, options_of, own_option

OptimizerClass = type[torch.optim.Optimizer]
Group = dict[str, Any]


def defaults(cpu: OptimizerClass, gpu: OptimizerClass, given: Mapping[str, Any]) -> dict[str, Any]:
    """Both classes' options: ``given``, completed by the defaults of their constructors.

    Raises TypeError for an option that neither class has, ConfigError if their defaults differ, UnsupportedError for
    ``differentiable=True``."""
    if given.get("differentiable"):
        raise UnsupportedError(
            "differentiable=True of the optimizer is not supported: the update runs outside of autograd; leave it out"
        )
    known = [_options(cls, given) for cls in dict.fromkeys((cpu, gpu))]
    unknown = sorted(key for key in given if not any(key in options for options in known))
    if unknown:
        raise TypeError(f"{cpu.__name__} and {gpu.__name__} have no option {', '.join(unknown)}")
    differ = sorted(k for k in known[0] if len(known) > 1 and k in known[1] and known[0][k] != known[1][k])
    if differ:
        raise ConfigError(
            f"{cpu.__name__} and {gpu.__name__} have different defaults for {', '.join(differ)}; pass a value for each"
        )
    return fused({key: value for options in known for key, value in options.items()}, gpu)


def _options(cls: OptimizerClass, given: Mapping[str, Any]) -> dict[str, Any]:
    accepted = inspect.signature(cls).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    mine = {key: value for key, value in given.items() if takes_all or key in accepted}
    make: Any = cls
    return options_of(
        make([nn.Parameter(torch.zeros(2, 2, dtype=torch.float32, device="cpu"))], **mine).param_groups[0]
    )


def fused(options: Group, cls: OptimizerClass) -> Group:
    """Choose torch's fused Adam kernel, whose bits the tile kernels have, unless the user chose another
    implementation."""
    chosen = options.get("fused") is not None or options.get("foreach") or options.get("capturable")
    return options if cls not in ADAMS or chosen else {**options, "fused": True}


def fitting(saved: Sequence[Group], groups: Sequence[Group]) -> Sequence[Group]:
    """``saved`` if its groups have the sizes of ``groups``; else raises ValueError, as torch does."""
    sizes, ours = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != ours:
        raise ValueError(
            f"the state to load has parameter groups of {sizes} parameters, this optimizer of {ours}: "
            "make it with the groups that were saved"
        )
    return saved


def numbers_of(group: Group) -> Group:
    """``options_of`` with numbers in place of 0-dim tensors, because the worker reads them while a scheduler may write
    the tensors; counters are copied."""
    return {key: _number(value) for key, value in options_of(group).items()}


def _number(value: Any) -> Any:
    if isinstance(value, tuple):  # betas
        return tuple(map(_number, value))
    if is_counter(value):
        return own_option(value)
    return value.item() if isinstance(value, Tensor) and value.dim() == 0 else value


class HyperLink:
    """Keeps a sub-optimizer's groups equal to the user's groups that they stand for. Knows options; not parameters. An
    option that only the sub-optimizer changed or added since the last ``push`` is taken from it; all others are copied
    to it. Each has counters of its own."""

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
        """Take over options that the sub-optimizer changed or added."""
        for index, sub, last in zip(self._indices, self._groups_of_sub(), self._last, strict=True):
            ours = self._adapt(groups[index])
            for key, value in last.items():
                if key in sub and not equal(sub[key], value) and key in ours and equal(ours[key], value):
                    groups[index][key] = own_option(sub[key])
            for key in options_of(sub).keys() - last.keys() - groups[index].keys():
                groups[index][key] = own_option(sub[key])

    def push(self, groups: Sequence[Group]) -> None:
        """Copy all options to the sub-optimizer."""
        adapted = [self._adapt(groups[index]) for index in self._indices]
        self._last = [{key: own_option(value) for key, value in options.items()} for options in adapted]
        for sub, options in zip(self._groups_of_sub(), adapted, strict=True):
            sub.update({key: own_option(value) for key, value in options.items()})

    def changed(self, groups: Sequence[Group]) -> list[str]:
        """The names of the options that ``push`` would change."""
        pairs = ((self._adapt(groups[index]), last) for index, last in zip(self._indices, self._last, strict=True))
        return sorted({key for ours, last in pairs for key in ours if key in last and not equal(ours[key], last[key])})


def equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        first, second = (torch.as_tensor(value, dtype=torch.float64, device="cpu") for value in (a, b))
        return bool(torch.equal(first, second))
    return bool(a == b)
