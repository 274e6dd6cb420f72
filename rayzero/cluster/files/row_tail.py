"""Follows metrics.jsonl while it grows, for whoever shows its rows elsewhere."""

from __future__ import annotations

import logging
from pathlib import Path

from rayzero.cluster.files.metrics_log import METRICS, Row, parse_row

Value = float | int | str

_MOST_ROWS = 500  # at once
_MOST_BYTES = 1 << 20  # read at once, and of one row

log = logging.getLogger(__name__)


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
