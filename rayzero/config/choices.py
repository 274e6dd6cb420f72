"""The named choices of the config, and what each stands for: numbers; loggers, by the names that transformers gives
them, and the packages they need."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self, get_args

from rayzero.errors import ConfigError

CheckpointErrors = Literal["warn", "raise"]
"""What happens to the training when its storage does not take a checkpoint."""


class _NamedChoice(StrEnum):
    """A choice that can be looked up by its name or its value, in upper or lower case."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        wanted = value.lower() if isinstance(value, str) else None
        return next((member for member in cls if wanted in (member.value, member.name.lower())), None)


class CpuCompressionMethod(_NamedChoice):
    """How tensors are stored on the host."""

    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    QUANTIZATION = "quantization"
    LOSSLESS = "lossless"

    def ratio(self) -> float:
        """Stored bytes per original byte of fp32 weights. A lossless ratio is of normally distributed ones."""
        return _COMPRESSION[self][0]

    def is_lossy(self) -> bool:
        """True when a decoded tensor may differ from the original."""
        return _COMPRESSION[self][1]

    def description(self) -> str:
        """The choice in one phrase, for people."""
        return _COMPRESSION[self][2]


_COMPRESSION = {
    CpuCompressionMethod.NONE: (1.0, False, "stored as it is"),
    CpuCompressionMethod.FP16: (0.5, True, "stored as 16-bit IEEE floats"),
    CpuCompressionMethod.BF16: (0.5, True, "stored as bfloat16"),
    CpuCompressionMethod.INT8: (260 / 1024, True, "stored as 8-bit integers with a scale per block"),
    CpuCompressionMethod.QUANTIZATION: (140 / 1024, True, "stored as 4-bit integers with two scales per block"),
    CpuCompressionMethod.LOSSLESS: (0.83, False, "stored by a lossless code; decodes to the same bits"),
}


class AutoMemoryStrategy(_NamedChoice):
    """How early and how much is done about memory pressure (engine/engine_memory.py)."""

    OFF = "off"
    CONSERVATIVE = "conservative"
    BALANCED = "balanced"
    AGGRESSIVE = "aggressive"
    EXTREME = "extreme"

    @property
    def pressure_threshold(self) -> float:
        """Pressure (used / limit, 0 to 1) above which the prefetch depth is reduced."""
        return _STRATEGY[self][0]

    @property
    def aggressiveness(self) -> float:
        """Share of the prefetch depth that is given up at full pressure, 0 to 1."""
        return _STRATEGY[self][1]

    def description(self) -> str:
        """The choice in one phrase, for people."""
        return _STRATEGY[self][2]


_STRATEGY = {
    AutoMemoryStrategy.OFF: (1.0, 0.0, "measures memory pressure and leaves everything as it is"),
    AutoMemoryStrategy.CONSERVATIVE: (
        0.9,
        0.2,
        "acts late: garbage above 75 %, little of depth and residency",
    ),
    AutoMemoryStrategy.BALANCED: (
        0.75,
        0.5,
        "acts above 60 %: at most half of the depth, most of the residency",
    ),
    AutoMemoryStrategy.AGGRESSIVE: (
        0.6,
        0.8,
        "acts above 50 %: most of the depth and of the residency",
    ),
    AutoMemoryStrategy.EXTREME: (
        0.4,
        1.0,
        "acts above 30 %: all of the depth, nearly all of the residency",
    ),
}


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
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return tuple(dict.fromkeys(names))
    return names


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
