"""The loggers that a run can report to, by the names that transformers gives them, and the packages they need."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from rayzero.errors import ConfigError

__all__ = ["LoggerName", "named_loggers", "require_loggers"]

LoggerName = Literal["tensorboard", "wandb", "mlflow", "csv"]

_NAMES: tuple[str, ...] = get_args(LoggerName)
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_NEED_NOTHING = ("csv",)  # the others are named like their package


def named_loggers(value: object) -> object:
    """What ``report_to`` stands for: a name, several, "none", or "all", which is every logger that is installed and
    has a place for its runs."""
    names = (value,) if isinstance(value, str) else value
    if names in (("none",), ["none"]):
        return ()
    if names in (("all",), ["all"]):
        return tuple(name for name in _NAMES if _is_there(name))
    return tuple(dict.fromkeys(names)) if isinstance(names, list | tuple) else names


def require_loggers(names: tuple[LoggerName, ...]) -> None:
    """Raise ConfigError for the first logger whose package is not installed here, or cannot open the place for its
    runs."""
    for name in names:
        if name not in _NEED_NOTHING and not _is_package(name):
            raise ConfigError(
                f"run.report_to has {name!r}, but the package {name} is not installed; "
                f"pip install 'rayzero[{name}]', or leave {name!r} out"
            )
        if name == "mlflow" and (fault := _mlflow_fault()):
            raise ConfigError(f"run.report_to has 'mlflow', but {fault}, pip install mlflow, or leave 'mlflow' out")


def _is_there(name: str) -> bool:
    if name in _NEED_NOTHING:
        return True
    return _is_package(name) and (name != "mlflow" or _mlflow_fault() is None)


def _is_package(name: str) -> bool:
    found = find_spec(name)
    return found is not None and found.origin is not None  # W&B writes to a folder wandb/, which alone is no package


def _mlflow_fault() -> str | None:
    """Why MLflow cannot open the place for its runs, as far as that is known without a connection; None: it can.

    Without MLFLOW_TRACKING_URI, that is a database in the working folder, unless there is a folder mlruns. Databases
    need sqlalchemy, which mlflow brings and mlflow-skinny does not."""
    if _is_package("sqlalchemy"):
        return None
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        fault = "MLFLOW_TRACKING_URI is not set, and mlflow-skinny cannot open MLflow's own database"
        return None if Path("mlruns").is_dir() else f"{fault}; set it to a server"
    kind = re.split(r"[+:]", uri, maxsplit=1)[0]
    if kind not in _DATABASES:
        return None
    shown = uri if kind == "sqlite" else kind  # others have a password
    return f"MLFLOW_TRACKING_URI is {shown!r}, and mlflow-skinny cannot open a database; set it to a server"
