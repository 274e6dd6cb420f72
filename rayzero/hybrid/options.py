"""The options of two optimizer classes, merged into one set of parameter groups."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.hybrid.hyper import Group, options_of

OptimizerClass = type[torch.optim.Optimizer]

ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def defaults(cpu: OptimizerClass, gpu: OptimizerClass, given: Mapping[str, Any]) -> dict[str, Any]:
    """Both classes' options: ``given``, completed by the defaults of their constructors.

    Raises TypeError for an option that neither class has, ConfigError if their defaults differ, UnsupportedError for
    ``differentiable=True``."""
    if given.get("differentiable"):
        raise UnsupportedError("differentiable=True is not supported: the update runs outside autograd")
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
    return options_of(make([nn.Parameter(torch.zeros(2, 2))], **mine).param_groups[0])


def fused(options: Group, cls: OptimizerClass) -> Group:
    """Choose torch's fused Adam kernel, whose bits the tile kernels have, unless the user chose another
    implementation."""
    chosen = options.get("fused") is not None or options.get("foreach") or options.get("capturable")
    return options if cls not in ADAMS or chosen else {**options, "fused": True}


def on_cpu(options: Group) -> Group:
    """``options``, changed so that the class runs on the CPU."""
    return {key: value for key, value in options.items() if key not in ("fused", "capturable")}


def fitting(saved: Sequence[Group], groups: Sequence[Group]) -> Sequence[Group]:
    """``saved`` if its groups have the sizes of ``groups``; else raises ValueError, as torch does."""
    sizes, ours = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != ours:
        raise ValueError(
            f"the state to load has parameter groups of {sizes} parameters, this optimizer of {ours}: "
            "make it with the groups that were saved"
        )
    return saved
