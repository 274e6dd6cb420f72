"""Rows from metrics.jsonl to one logger, each once, in order.

[Note: the file is the queue] Rows wait in metrics.jsonl, not in memory. So a logger that is slow, down or killed holds
up nobody and loses nothing: it goes on after its bookmark when it can, or when the run is resumed. A row that it
refuses while it takes others is skipped and counted, else nothing would come after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rayzero.cluster.files.metrics_log import Row, read_log
from rayzero.cluster.files.row_tail import RowTail, values_of
from rayzero.cluster.loggers.reporter import Reporter
from rayzero.files import replace_file, to_json
from rayzero.records import JsonRecord, Whole, load_record

_MOST_ROWS = 500  # at once
_MOST_SAVED = 1 << 16  # bytes of a bookmark's file

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Bookmark:
    """The rows that a logger has had: those of earlier steps, and this many of this step."""

    step: int = -1
    rows: int = 0


class _SavedFile(JsonRecord):
    """What is in the file of a logger."""

    step: int
    rows: Whole
    memory: dict[str, str]


@dataclass(slots=True)
class FeedState:
    """What a logger remembers from one start of the run to the next, in a file."""

    path: Path
    bookmark: Bookmark = Bookmark()
    memory: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> FeedState:
        """What is in the file; nothing if there is none. Raises ConfigError or OSError if it is damaged."""
        what, instead = "a logger's bookmark", "delete it, and the logger gets every row again"
        try:
            found = load_record(path, _SavedFile, what, instead, at_most=_MOST_SAVED)
        except FileNotFoundError:
            return cls(path)
        return cls(path, Bookmark(found.step, found.rows), found.memory)

    def write(self) -> None:
        """Replace the file. Raises OSError."""
        saved = _SavedFile(step=self.bookmark.step, rows=self.bookmark.rows, memory=self.memory)
        replace_file(self.path, to_json(saved.model_dump()))


def begin(saved: FeedState, run_dir: Path, *, replaces: bool) -> int:
    """The first step whose rows a logger gets. If it ``replaces`` earlier ones, those of the bookmark's step come
    again, and so do those that were cut off metrics.jsonl since; the bookmark moves there. Raises OSError."""
    if replaces and saved.bookmark.step >= 0:
        last = max((row["step"] for row in read_log(run_dir)), default=-1)
        saved.bookmark = Bookmark(min(saved.bookmark.step, last + 1), 0)
        saved.write()  # before the logger drops them
    return max(0, saved.bookmark.step)


class Feed:
    """Sends rows to one reporter, and keeps its bookmark. Knows rows; not processes."""

    def __init__(self, tail: RowTail, reporter: Reporter, saved: FeedState) -> None:
        self._tail, self._reporter, self._saved = tail, reporter, saved
        self._at = Bookmark()  # in the file
        self._waiting: list[tuple[Bookmark, Row]] = []
        self.sent = 0
        self.lost = 0  # refused, while other rows were taken
        self.error: str | None = None  # the last one

    @property
    def bookmark(self) -> Bookmark:
        return self._saved.bookmark

    def forward(self) -> bool:
        """Send what has come. False: the logger took nothing of it, and gets it again with the next call."""
        self._fetch()
        while self._waiting:
            refused = [why for _, row in self._waiting if (why := self._offer(row)) is not None]
            if len(refused) == len(self._waiting) or not self._is_flushed():
                return False
            self.sent += len(self._waiting) - len(refused)
            self.lost += len(refused)
            self._saved.bookmark, self._waiting = self._waiting[-1][0], []
            self._saved.write()
            self._fetch()
        return True

    def _fetch(self) -> None:
        """Read rows until enough new ones wait, or there are no more."""
        while len(self._waiting) < _MOST_ROWS and (rows := self._tail.next()):
            known = self._waiting[-1][0] if self._waiting else self._saved.bookmark
            self._waiting += [(at, row) for at, row in self._numbered(rows) if at > known]

    def _numbered(self, rows: list[Row]) -> Iterator[tuple[Bookmark, Row]]:
        for row in rows:
            if values_of(row) is not None:
                step = row["step"]
                if step < self._at.step:  # the file is read again
                    self._at = Bookmark()
                self._at = Bookmark(step, self._at.rows + 1 if step == self._at.step else 1)
                yield self._at, row

    def _offer(self, row: Row) -> str | None:
        """Why the logger does not take a row; None: it has it."""
        values = values_of(row)
        assert values is not None, "rows without values are left out"
        try:
            self._reporter.log(row["step"], row.get("time") or time.time(), values)
        except Exception as error:  # the edge to a foreign library
            return self._note(error)
        return None

    def _is_flushed(self) -> bool:
        try:
            self._reporter.flush()
        except Exception as error:  # the edge to a foreign library
            self._note(error)
            return False
        return True

    def _note(self, error: Exception) -> str:
        if said(error) != self.error:
            log.warning("the logger refuses a row", exc_info=error)
        self.error = said(error)
        return self.error


def said(error: Exception) -> str:
    """An error in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
