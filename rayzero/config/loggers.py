"""The loggers that a run can report to, by the names that transformers gives them, and the packages they need."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, get_args

from rayzero.errors import ConfigError

__all__ = ["LoggerName", "named_loggers", "require_loggers"]

LoggerName = Literal["tensorboard", "wandb", "mlflow", "csv"]

_NAMES: tuple[str, ...] = get_args(LoggerName)
_NEED_NOTHING = ("csv",)  # the others are named like their package


def named_loggers(value: object) -> object:
    """What ``report_to`` stands for: a name, several, "none", or "all", which is every logger that is installed."""
    names = (value,) if isinstance(value, str) else value
    if names in (("none",), ["none"]):
        return ()
    if names in (("all",), ["all"]):
        return tuple(name for name in _NAMES if _is_there(name))
    return tuple(dict.fromkeys(names)) if isinstance(names, list | tuple) else names


def require_loggers(names: tuple[LoggerName, ...]) -> None:
    """Raise ConfigError for the first logger whose package is not installed here."""
    for name in names:
        if not _is_there(name):
            raise ConfigError(
                f"run.report_to has {name!r}, but the package {name} is not installed; "
                f"pip install 'rayzero[{name}]', or leave {name!r} out"
            )


def _is_there(name: str) -> bool:
    if name in _NEED_NOTHING:
        return True
    found = find_spec(name)
    return found is not None and found.origin is not None  # W&B writes to a folder wandb/, which alone is no package
