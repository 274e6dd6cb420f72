"""metrics.csv in the run's folder: one column for each name, in the order in which they came."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from rayzero.cluster.files.metrics_log import Value
from rayzero.cluster.loggers.reporter import LoggedRun
from rayzero.files import replace_file

FILE = "metrics.csv"
_FIRST = ("step", "time")


class CsvReporter:
    """Appends lines; a name that is new makes a column, and then the file is written anew. Keeps the rows before
    ``first_step`` that are in the file."""

    def __init__(self, run: LoggedRun, first_step: int) -> None:
        self._path = run.directory / FILE
        self.where = str(self._path)
        self._columns = list(_FIRST)
        self._file: IO[str] | None = None  # freed by: close()
        rows = [row for row in _read(self._path) if int(row["step"]) < first_step]
        self._add_columns(dict.fromkeys(name for row in rows for name in row))
        self._write(rows)

    def log(self, step: int, time: float, values: Mapping[str, Value]) -> None:
        if self._add_columns(values):
            self.flush()
            self._write(_read(self._path))
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


def _read(path: Path) -> list[dict[str, str]]:
    """The file's whole lines: the last one may have been cut short by a crash."""
    if not path.exists():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    rows = csv.DictReader(io.StringIO(whole + "\n", newline=""))
    return [{name: value for name, value in row.items() if value} for row in rows if (row["step"] or "").isdigit()]
