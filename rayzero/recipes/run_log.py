"""metrics.jsonl: one JSON object a step, made of every rank's report of it. Written by the driver."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rayzero.checkpoint.safe_read import parse_json, read_text
from rayzero.errors import DataError

METRICS = "metrics.jsonl"
_MAX_METRICS = 1 << 32  # bytes: some ten million steps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One line of metrics.jsonl: a step as the whole run saw it. A number that is inf or nan is null in the file."""

    step: int  # steps done, this one included
    loss: float  # mean over all ranks' tokens, nats
    grad_norm: float  # of the averaged gradients, before clipping
    lr: float
    tokens: int  # all ranks, from the run's first step on
    tokens_per_second: float  # all ranks, in this step
    step_seconds: float  # of the slowest rank, validation and checkpoint excluded
    fetch_wait_seconds: float  # of the rank that waited longest for parameters
    optimizer_exposed_seconds: float  # of the rank that waited longest inside step()
    memory_bytes: int  # of the largest rank
    validation_loss: float | None = None  # nats; null where the step was not validated


def merge_reports(reports: Mapping[int, Mapping[str, Any]]) -> StepRow:
    """One row from every rank's report of the same step (``recipes.lm.StepReport`` as a dict)."""
    ranks = [reports[rank] for rank in sorted(reports)]
    first, tokens = ranks[0], sum(report["tokens"] for report in ranks)
    seconds = max(report["step_seconds"] for report in ranks)
    return StepRow(
        step=first["step"],
        loss=sum(report["loss"] * report["tokens"] for report in ranks) / tokens,
        grad_norm=first["grad_norm"],
        lr=first["lr"],
        tokens=first["total_tokens"],
        tokens_per_second=tokens / seconds,
        step_seconds=seconds,
        fetch_wait_seconds=max(report["fetch_wait_seconds"] for report in ranks),
        optimizer_exposed_seconds=max(report["optimizer_exposed_seconds"] for report in ranks),
        memory_bytes=max(report["memory_bytes"] for report in ranks),
        validation_loss=_joined_validation(ranks),
    )


def _joined_validation(ranks: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean over all ranks' validation batches; None where the step was not validated."""
    shares = [(float(r["validation_loss"]), int(r["validation_batches"])) for r in ranks if r["validation_batches"]]
    if not shares:
        return None
    return sum(loss * batches for loss, batches in shares) / sum(batches for _, batches in shares)


class RunLog:
    """Gathers reports into rows and appends each to metrics.jsonl once every rank has reported the step.

    Knows reports and rows; not where reports come from or who draws them."""

    def __init__(self, run_dir: Path, world_size: int, *, resume_step: int = 0) -> None:
        """Keeps the rows up to ``resume_step`` of an earlier part of the run; later ones are dropped."""
        self.rows = [row for row in read_rows(run_dir) if row.step <= resume_step]
        self._world_size = world_size
        self._pending: dict[int, dict[int, Mapping[str, Any]]] = {}  # step -> rank -> report
        _rewrite(run_dir / METRICS, self.rows)
        self._file = (run_dir / METRICS).open("a", encoding="utf-8")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def add(self, rank: int, report: Mapping[str, Any]) -> StepRow | None:
        """Take one rank's report; the step's row once it is complete."""
        step = report["step"]
        self._pending.setdefault(step, {})[rank] = report
        if len(self._pending[step]) < self._world_size:
            return None
        row = merge_reports(self._pending.pop(step))
        self.rows.append(row)
        self._write(row)
        return row

    def _write(self, row: StepRow) -> None:
        self._file.write(_line(row))
        self._file.flush()


def _rewrite(path: Path, rows: Sequence[StepRow]) -> None:
    """Replace the file as a whole: a crash leaves the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(map(_line, rows)), encoding="utf-8")
    os.replace(temporary, path)


def _line(row: StepRow) -> str:
    finite = {name: value if _finite(value) else None for name, value in asdict(row).items()}
    return json.dumps(finite) + "\n"


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _read(name: str, value: Any) -> Any:
    if value is None:
        return None if name == "validation_loss" else math.nan
    number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)
    if not number or (name == "step" and not isinstance(value, int)):
        raise ValueError(f"{name} is {reprlib.repr(value)}")
    return value


def read_rows(run_dir: Path) -> list[StepRow]:
    """The rows of a run's metrics.jsonl in order; none where there is no file. A line cut short by a crash, which can
    only be the last, is left out. Raises DataError for a file that is something else."""
    path = run_dir / METRICS
    if not path.exists():
        return []
    return list(_parse_rows(path))


def _parse_rows(path: Path) -> Iterator[StepRow]:
    try:
        lines = read_text(path, at_most=_MAX_METRICS).splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise DataError(f"cannot read {path}: {exc}") from exc
    for number, line in enumerate(lines, start=1):
        try:
            found = parse_json(line)
            yield StepRow(**{name: _read(name, value) for name, value in found.items()})
        except (ValueError, TypeError, AttributeError) as exc:
            if number < len(lines):
                raise DataError(f"{path} line {number} is not a row of metrics: {exc}") from exc
