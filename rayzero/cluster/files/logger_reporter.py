"""What every logger can do: take a row's values, write out what it has, end.

A reporter may be slow, raise anything and hang: it lives in a process of its own (``logger_feed.py``), and what it
could not take is still in metrics.jsonl. Each imports its package when it is made. Variables of the packages count:
WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE, WANDB_API_KEY; MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and those for its
server's password.

[Note: steps that come again] A TensorBoard event file can begin with the mark of a session's start, which carries a
step: TensorBoard then drops what earlier files have from that step on. So a resumed run shows each step once.
"""

from __future__ import annotations

import csv
import io
import os
import re
import secrets
import time as clock
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from rayzero.cluster.files.metrics_log import Value
from rayzero.config.choices import LoggerName
from rayzero.files import replace_file


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


class TensorBoardReporter:
    """An event file in the run's folder ``tensorboard/`` for each time that the run starts. Numbers become scalars
    under their own names; text is left out. [Note: steps that come again]"""

    def __init__(self, run: LoggedRun, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self.where = str(run.directory / "tensorboard")
        self._writer = EventFileWriter(self.where)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(event_pb2.Event(wall_time=clock.time(), step=first_step, session_log=start))

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        of, numbers = self._summaries.Summary, _numbers(values)
        scalars = of(value=[of.Value(tag=name, simple_value=value) for name, value in numbers.items()])
        self._writer.add_event(self._events.Event(wall_time=time, step=step, summary=scalars))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()


class WandbReporter:
    """One W&B run for the whole run, however often it is resumed. W&B's step is the run's; it takes no step that it has
    had, so steps that come again stay as they were."""

    def __init__(self, run: LoggedRun, first_step: int) -> None:
        import wandb

        run.memory.setdefault("id", secrets.token_hex(4))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rayzero"),
            name=os.environ.get("WANDB_NAME", run.name),
            id=run.memory["id"],
            resume="allow",
            dir=str(run.directory),
            config=dict(run.settings),
            allow_val_change=True,
            settings=wandb.Settings(console="off", disable_code=True),
        )
        self.where = self._run.url or self._run.dir.removesuffix("/files")

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        self._run.log({**values, "time": time}, step=step)

    def flush(self) -> None:
        """W&B's own process has the rows, and writes them to its file."""

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state in ("finished", "restarting") else 1)


_MLFLOW_STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MOST_PARAMS = 100  # in one call
_MOST_TEXT = 6000  # of one parameter


class MlflowReporter:
    """One MLflow run for the whole run, however often it is resumed. MLflow keeps every value of a step, so each is
    sent once, and steps that come again stay as they were."""

    def __init__(self, run: LoggedRun, first_step: int) -> None:
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self._entities, self._client = entities, MlflowClient()
        if "run_id" not in run.memory:
            run.memory["run_id"] = self._made(run)
        self._id = run.memory["run_id"]
        self._client.update_run(self._id, status="RUNNING")
        experiment = self._client.get_run(self._id).info.experiment_id
        self.where = f"{self._client.tracking_uri} (experiment {experiment}, run {self._id})"

    def _made(self, run: LoggedRun) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rayzero")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known is not None else self._client.create_experiment(name)
        made: str = self._client.create_run(experiment, run_name=run.name).info.run_id
        param = self._entities.Param
        params = [param(_allowed(key), str(value)[:_MOST_TEXT]) for key, value in run.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(made, params=params[first : first + _MOST_PARAMS])
        return made

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        moment, metric = round(time * 1000), self._entities.Metric
        numbers = {_allowed(name): value for name, value in _numbers(values).items()}
        self._client.log_batch(self._id, metrics=[metric(name, n, moment, step) for name, n in numbers.items()])

    def flush(self) -> None:
        """Each call has been answered."""

    def close(self, state: str) -> None:
        if state in _MLFLOW_STATES:
            self._client.set_terminated(self._id, _MLFLOW_STATES[state])


def _allowed(name: str) -> str:
    """The name, without the characters that MLflow refuses."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _numbers(values: Mapping[str, Value]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if not isinstance(value, str)}


class CsvReporter:
    """metrics.csv in the run's folder: one column for each name, in the order in which they came. A name that is new
    makes a column, and then the file is written anew. Keeps the rows before ``first_step`` that are in the file."""

    def __init__(self, run: LoggedRun, first_step: int) -> None:
        self._path = run.directory / "metrics.csv"
        self.where = str(self._path)
        self._columns = ["step", "time"]
        self._file: IO[str] | None = None  # freed by: close()
        rows = [row for row in _csv_rows(self._path) if int(row["step"]) < first_step]
        self._add_columns(dict.fromkeys(name for row in rows for name in row))
        self._write(rows)

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        if self._add_columns(values):
            self.flush()
            self._write(_csv_rows(self._path))
        assert self._file is not None
        self._writer.writerow({"step": step, "time": time, **values})

    def _add_columns(self, names: Iterable[str]) -> bool:
        new = [name for name in names if name not in self._columns]
        self._columns += new
        return bool(new)

    def _write(self, rows: Iterable[Mapping[str, str]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        self.close("")
        replace_file(self._path, text.getvalue())
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self._columns, restval="")

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self, state: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _csv_rows(path: Path) -> list[dict[str, str]]:
    """The file's whole lines: the last one may have been cut short by a crash."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    rows = csv.DictReader(io.StringIO(whole + "\n", newline=""))
    return [{name: value for name, value in row.items() if value} for row in rows if (row["step"] or "").isdigit()]


# by name, of (the run, the first step that it will be given)
REPORTERS: dict[LoggerName, Callable[[LoggedRun, int], Reporter]] = {
    "tensorboard": TensorBoardReporter,
    "wandb": WandbReporter,
    "mlflow": MlflowReporter,
    "csv": CsvReporter,
}


# whose rows of steps that come again replace the earlier ones, as in metrics.jsonl; others keep what they had
REPLACING: tuple[LoggerName, ...] = ("tensorboard", "csv")


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings by dotted names; what is no number, text, truth value or None becomes text."""
    return dict(_flat(settings, ""))


def _flat(settings: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value if isinstance(value, int | float | str | None) else str(value)
