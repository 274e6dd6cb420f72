"""Checks the hyper-parameters and finds the optimizer class that ranks send to owners."""

from __future__ import annotations

import importlib
from numbers import Real
from typing import Any

import torch

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.protocol.messages import Hyper


def require_numbers(group: int, options: Hyper, like: Hyper) -> None:
    """Raise ConfigError, naming the option, unless every option that is a number in ``like`` is one, and every one that
    is several numbers is as many."""
    for name, example in like.items():
        value = options.get(name)
        if _is_number(example) and not _is_number(value):
            raise ConfigError(f"{name} of parameter group {group} must be a number, got {value!r}")
        if _are_numbers(example) and not (_are_numbers(value) and len(value or ()) == len(example)):
            raise ConfigError(f"{name} of parameter group {group} must be {len(example)} numbers, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _are_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_number, value))


def resolve_optimizer(path: str) -> type[torch.optim.Optimizer]:
    """The class behind ``"module:qualname"``. Raises UnsupportedError if it cannot be imported, ConfigError if it is no
    optimizer class."""
    module, _, qualname = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise UnsupportedError(
            f"optimizer {path!r} cannot be imported where the optimizer actors run ({exc}); "
            "define the class at the top level of a module they can import"
        ) from exc
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer {path!r} is not a torch.optim.Optimizer class")
    return found
