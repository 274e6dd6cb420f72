"""The recipe's rows of metrics.jsonl: one per step, joined from every rank's report."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rayzero.cluster.files.metrics_log import METRICS, Row, read_log
from rayzero.cluster.run import Report
from rayzero.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of the whole run. A number that is inf or NaN is null in the file."""

    step: int  # steps done, this one included
    loss: float  # mean over all ranks' tokens, nats
    grad_norm: float  # of the averaged gradients, before clipping
    lr: float
    tokens: int  # all ranks, from the run's first step on
    tokens_per_second: float  # all ranks, in this step
    step_seconds: (
        float  # of the slowest rank, end of step() to end of step(), so a validation or save in between counts
    )
    fetch_wait_seconds: float  # of the rank that waited longest for parameters
    optimizer_exposed_seconds: float  # of the rank that waited longest inside step()
    memory_bytes: int  # of the largest rank
    validation_loss: float | None = None  # nats; null if the step was not validated


_MOST_OF_RANKS = ("step_seconds", "fetch_wait_seconds", "optimizer_exposed_seconds", "memory_bytes")


def merge_reports(reports: Mapping[int, Mapping[str, Any]]) -> StepRow:
    """One row from every rank's report of the same step (``recipes.lm.StepReport`` as a dict)."""
    ranks = [reports[rank] for rank in sorted(reports)]
    first, tokens = ranks[0], sum(report["tokens"] for report in ranks)
    most = {name: max(report[name] for report in ranks) for name in _MOST_OF_RANKS}
    return StepRow(
        step=first["step"],
        loss=sum(report["loss"] * report["tokens"] for report in ranks) / tokens,
        grad_norm=first["grad_norm"],
        lr=first["lr"],
        tokens=first["total_tokens"],
        tokens_per_second=tokens / most["step_seconds"],
        validation_loss=_joined_validation(ranks),
        **most,
    )


def _joined_validation(ranks: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean over all ranks' validation batches; None if the step was not validated."""
    shares = [(float(r["validation_loss"]), int(r["validation_batches"])) for r in ranks if r["validation_batches"]]
    if not shares:
        return None
    return sum(loss * batches for loss, batches in shares) / sum(batches for _, batches in shares)


class StepRows:
    """Joins the ranks' reports of a step into one row, once every rank has reported it.

    Knows reports and rows; not where reports come from, or who writes or draws rows."""

    def __init__(self) -> None:
        self._pending: dict[int, dict[int, Mapping[str, Any]]] = {}  # step -> rank -> report

    def add(self, report: Report) -> StepRow | None:
        """Take one rank's report; the step's row once it is complete."""
        step = report.metrics["step"]
        self._pending.setdefault(step, {})[report.rank] = report.metrics
        if len(self._pending[step]) < report.world_size:
            return None
        return merge_reports(self._pending.pop(step))

    def __call__(self, report: Report) -> Row | None:
        """The row that this report completes; None if others are missing."""
        row = self.add(report)
        return None if row is None else asdict(row)


def trained_since(rows: Sequence[StepRow], step: int) -> tuple[int, int]:
    """(steps, tokens of all ranks) of the rows after ``step``."""
    tokens = [round(row.tokens_per_second * row.step_seconds) for row in rows if row.step > step]
    return len(tokens), sum(tokens)


def read_rows(run_dir: Path) -> list[StepRow]:
    """The rows of a recipe's metrics.jsonl in order; empty if there is no file. Skips a last line that a crash cut
    short. Raises DataError if the file holds something else."""
    rows = []
    for number, found in enumerate(read_log(run_dir), start=1):
        try:
            rows.append(StepRow(**{name: _read(name, value) for name, value in found.items()}))
        except (ValueError, TypeError) as exc:
            raise DataError(f"{run_dir / METRICS} line {number} is not a row of this recipe: {exc}") from exc
    return rows


def _read(name: str, value: Any) -> Any:
    if value is None:
        return None if name == "validation_loss" else math.nan
    number = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)
    if not number or (name == "step" and not isinstance(value, int)):
        raise ValueError(f"{name} is {reprlib.repr(value)}")
    return value
