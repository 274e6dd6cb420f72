"""What every logger can do: take a row's values, write out what it has, end.

A reporter may be slow, raise anything and hang: it lives in a process of its own (``children.py``), and what it could
not take is still in metrics.jsonl (``feed.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from rayzero.cluster.files.metrics_log import Value
from rayzero.config.loggers import LoggerName


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The run as a logger sees it."""

    name: str
    directory: Path
    settings: Mapping[str, Any] = field(default_factory=dict)  # dotted names: see ``flat_settings``
    memory: MutableMapping[str, str] = field(default_factory=dict)  # what the logger keeps for a resumed run


class Reporter(Protocol):
    """One logger of one run. Every method may raise anything."""

    where: str  # a folder, a file or a URL

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        """Take a row. ``step``: steps that were done; ``time``: seconds since 1970."""
        ...

    def flush(self) -> None:
        """Rows taken until now outlive this process when this returns."""
        ...

    def close(self, state: str) -> None:
        """The run has ended: "finished", "failed" or "stopped"; "restarting": it goes on at once."""
        ...


_CLASSES = {
    "tensorboard": "tensorboard:TensorBoardReporter",
    "wandb": "wandb:WandbReporter",
    "mlflow": "mlflow:MlflowReporter",
    "csv": "csv_file:CsvReporter",
}


def opener(name: LoggerName) -> Callable[[LoggedRun, int], Reporter]:
    """The class of a logger's reporters: of (the run, the first step that it will be given). Imports its package."""
    module, _, kind = _CLASSES[name].partition(":")
    return cast(Callable[[LoggedRun, int], Reporter], getattr(import_module(f"{__package__}.{module}"), kind))


def replaces(name: LoggerName) -> bool:
    """Whether rows of steps that come again replace the earlier ones, as in metrics.jsonl. Others keep what they
    had."""
    return name in ("tensorboard", "csv")


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by dotted names; what is no number, text, truth value or None becomes text."""
    return dict(_flat(settings, ""))


def _flat(settings: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value if isinstance(value, int | float | str | None) else str(value)
