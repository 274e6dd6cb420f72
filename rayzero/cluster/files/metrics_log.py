"""metrics.jsonl: one JSON object per line, made from the ranks' reports. Only the coordinator writes it.

[Note: rows reach the file] A rank's report becomes a line of the file as soon as the coordinator has it. It does not
wait for the driver, which may be busy, and is not lost if a rank or the driver is killed later.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayzero.cluster.run import Report
from rayzero.errors import DataError
from rayzero.files import parse_json, read_bytes, replace_file, to_json
from rayzero.quantities import count
from rayzero.telemetry.metric import fault_of

METRICS = "metrics.jsonl"
_MAX_LOG = 1 << 32  # bytes: about ten million steps
_MOST_ROWS = 500  # that a tail reads at once
_MOST_BYTES = 1 << 20  # that it reads at once, and of one row

Row = dict[str, Any]
Value = float | int | str  # that loggers and the live page show
MakeRow = Callable[[Report], Row | None]  # the row that this report completes; None if it completes none

_OWN = ("step", "rank", "time")  # keys of a row that are not the loop's

log = logging.getLogger(__name__)


def row_of_report(report: Report) -> Row:
    """A row for each report: steps committed, rank, seconds since 1970, then what the loop reported.

    A value that the loop reports as step, rank or time is stored as reported_step and so on."""
    metrics = {f"reported_{name}" if name in _OWN else name: value for name, value in report.metrics.items()}
    return {"step": report.step, "rank": report.rank, "time": report.time, **metrics}


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The rows that a run has written before it was killed."""

    of_ranks: Mapping[tuple[int, int], int]  # (rank, step) -> how many
    last: int  # the last step of rows that are no rank's own

    def has(self, row: Row, report: Report) -> bool:
        """Whether a row is one of them: a rank makes its reports of a step in the same order again."""
        if "rank" not in row:
            return _step_of(row) <= self.last
        return report.number < self.of_ranks.get((report.rank, report.step), 0)


class MetricsLog:
    """Appends rows to a run's metrics.jsonl.

    Skips a row that cannot be written, with one warning until rows can be written again; no row is cut short. Knows
    rows and one file; not who reports."""

    def __init__(self, run_dir: Path, make_row: MakeRow = row_of_report, written: WrittenRows | None = None) -> None:
        """The file is made by the first row. ``written``: what an earlier part of the run has written, whose last
        reports are made again."""
        self.run_dir = run_dir
        self._path = run_dir / METRICS
        self._make_row = make_row
        self._written = written
        self._file: int | None = None  # freed by: close()
        self.lost = 0  # rows that could not be written

    def go_on(self) -> None:
        """Another process has written the log until now, and reports may come that it has had. Raises DataError as
        ``read_log``."""
        trim_log(self._path.parent, sys.maxsize)
        self._written = written_rows(self._path.parent)

    def add(self, reports: Iterable[Report]) -> None:
        """Write the rows that these reports complete. They are in the file when this returns."""
        made, written = [(self._make_row(report), report) for report in reports], self._written
        rows = [row for row, of in made if row is not None and (written is None or not written.has(row, of))]
        if not rows:
            return
        try:
            self._append("".join(to_json(row) + "\n" for row in rows).encode())
        except OSError as error:
            if not self.lost:
                log.warning("%s cannot be written (%s); training goes on without its rows", self._path, error.strerror)
            self.lost += len(rows)

    def _append(self, lines: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        whole = os.fstat(self._file).st_size
        left = memoryview(lines)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, whole)  # the part of the lines that was written
            raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def trim_log(run_dir: Path, resume_step: int) -> None:
    """Drop the rows after ``resume_step`` of an earlier part of the run, and a last line that a crash cut short. A line
    that cannot be read goes or stays as the row before it does.

    Cuts off the end, which needs no room on a full disk; where that is not enough, replaces the file as a whole. Raises
    DataError if the file cannot be read or replaced."""
    path = run_dir / METRICS
    lines = _lines(run_dir)
    staying, step = [], -1
    for line in lines:
        with suppress(ValueError):
            step = _step_of(parse_row(line))
        if step <= resume_step and line.endswith(b"\n"):
            staying.append(line)
    written, kept = b"".join(lines), b"".join(staying)
    try:
        if written.startswith(kept):
            if written != kept:
                os.truncate(path, len(kept))
        else:
            replace_file(path, kept)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def written_rows(run_dir: Path) -> WrittenRows:
    """What is in a run's metrics.jsonl. Raises DataError as ``read_log``."""
    rows = read_log(run_dir)
    of_ranks = Counter((row["rank"], row["step"]) for row in rows if "rank" in row)
    return WrittenRows(of_ranks, max((row["step"] for row in rows if "rank" not in row), default=-1))


def _step_of(row: Row) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step


def read_log(run_dir: Path) -> list[Row]:
    """The rows of a run's metrics.jsonl in order; empty if there is no file. A number that was inf or NaN is None.

    Skips a last line that a crash cut short, and others that cannot be read, with one warning for all of these. Raises
    DataError if the file cannot be read."""
    rows, faults = [], {}
    for number, line in enumerate(_lines(run_dir), start=1):
        try:
            rows.append(parse_row(line))
        except ValueError as exc:
            if line.endswith(b"\n"):
                faults[number] = exc
    if faults:
        first, fault = next(iter(faults.items()))
        log.warning(
            "%s of %s cannot be read, and are left out; line %d is not a row: %s",
            count(len(faults), "line"),
            run_dir / METRICS,
            first,
            fault,
        )
    return rows


def _lines(run_dir: Path) -> list[bytes]:
    """The lines of metrics.jsonl with their ends, of which the last one may lack it; none if there is no file."""
    path = run_dir / METRICS
    if not path.exists():
        return []
    try:
        return read_bytes(path, at_most=_MAX_LOG).splitlines(keepends=True)
    except OSError as exc:
        raise DataError(f"cannot read {path}: {exc}") from exc


def parse_row(line: bytes) -> Row:
    """The row in a line of metrics.jsonl; a number that is inf or NaN is None. Raises ValueError if it is none."""
    row = parse_json(line.decode())
    if not isinstance(row, dict) or type(row.get("step")) is not int or type(row.get("rank", 0)) is not int:
        raise ValueError("it has no step, or no number as its rank")
    for name, value in row.items():
        if fault := fault_of(name, value):
            raise ValueError(fault)
    return {name: None if isinstance(n, float) and not math.isfinite(n) else n for name, n in row.items()}


def latest_metrics(rows: Sequence[Row]) -> Row | None:
    """The last value of each name that a run reported, and the last step; None without rows.

    The loss is the mean over ranks; every other value is the lowest rank's."""
    by_rank: dict[int, Row] = {}
    for row in rows:
        by_rank.setdefault(row.get("rank", 0), {}).update(row)
    if not by_rank:
        return None
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    merged: Row = {}
    for rank in reversed(ranks):
        merged |= {name: value for name, value in rank.items() if name not in ("rank", "time")}
    merged["step"] = max(_step_of(rank) for rank in ranks)
    if "loss" in merged:
        merged["loss"] = _mean([rank["loss"] for rank in ranks if "loss" in rank])
    return merged


def _mean(values: Sequence[Any]) -> float | None:
    if not all(isinstance(value, int | float) for value in values):
        return None
    return sum(map(float, values)) / len(values)


# ---- read while it grows ----------------------------------------------------------------------------------------


def values_of(row: Row) -> dict[str, Value] | None:
    """What a logger or the live page shows of a row; None: nothing. Shown are the rows of the whole run,
    or else rank 0's. A number that was inf or NaN is left out."""
    if row.get("rank", 0) != 0:
        return None
    values = {name: value for name, value in row.items() if name not in ("step", "rank", "time") and value is not None}
    return values or None


class RowTail:
    """Reads the rows that come to a file, some at a time. Its size in memory does not depend on the file's."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        self._read = 0  # bytes of whole lines

    def next(self) -> list[Row]:
        """Rows not read before, as many as fit; none if there are no more now. A line that is no row, or is longer than
        1 MiB, is skipped."""
        rows: list[Row] = []
        while not rows and (lines := self._lines()):
            for line in lines:
                try:
                    rows.append(parse_row(line))
                except ValueError as error:
                    log.warning("a line of %s is no row: %s", self._path, error)
        return rows

    def _lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._read:
                    self._read = 0  # rows were cut off; the bookmark tells which ones are new
                file.seek(self._read)
                read = file.read(_MOST_BYTES)
                if len(read) == _MOST_BYTES and b"\n" not in read:
                    self._read += len(read)  # the rest is a line that is no row, either
                    return [read]
        except FileNotFoundError:
            return []
        lines = read.splitlines(keepends=True)[:_MOST_ROWS]
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # the rest of it comes
        self._read += sum(map(len, lines))
        return lines
