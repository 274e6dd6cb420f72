"""Sends rows from metrics.jsonl to loggers, each row once, in order: a process for each logger, ``python -m
rayzero.cluster.files.logger_feed FD``, and the driver's end, which starts it, listens to how far it is, and ends it.

The process reads one line that says what to do, then the word that the run has ended; it answers with lines on how far
it is. If the driver is killed, it sends what is in the file and ends.

No logger can end, block or slow a run: the driver never waits for one while the run goes on, and at the end for
``_END_S`` at most. What a logger's library prints is in ``.loggers/`` in the run's folder.

[Note: the file is the queue] Rows wait in metrics.jsonl, not in memory. So a logger that is slow, down or killed holds
up nobody and loses nothing: it goes on after its bookmark when it can, or when the run is resumed. A row that it
refuses while it takes others is skipped and counted, else nothing would come after it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rayzero.cluster.files.logger_reporter import REPLACING, REPORTERS, LoggedRun, Reporter
from rayzero.cluster.files.metrics_log import Row, RowTail, read_log, values_of
from rayzero.cluster.run import LoggerState
from rayzero.cluster.supervision import shielded
from rayzero.concurrency.survivor import with_own_path
from rayzero.config.choices import LoggerName
from rayzero.files import replace_file, to_json
from rayzero.records import JsonRecord, Whole, load_record

FOLDER = ".loggers"
_END_S = {"finished": 30.0, "restarting": 30.0}  # for the last rows of a run that ended so; else:
_STOP_S = 5.0
_LAST_S = 2.0  # to read what a process has said before it ended
_MOST_ROWS = 500  # at once
_MOST_SAVED = 1 << 16  # bytes of a bookmark's file
_LOOK_S = 0.5  # between two looks at the file
_RETRY_S = (1.0, 60.0)  # between two tries where the logger takes nothing: at first, at most
_LOCK_S = 20.0  # for the process of an earlier start of the run to end
_KILLED = "stopped"  # the state of a run whose driver is gone

Tell = Callable[[LoggerName, int, int], None]  # which one, rows sent, rows refused: since it was told last

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerJob:
    """What the process of a logger is to do."""

    logger: LoggerName
    run: str  # its name
    run_dir: str
    settings: Mapping[str, Any]


@dataclass(slots=True)
class _Child:
    """One logger's process."""

    name: LoggerName
    process: subprocess.Popen[bytes]  # freed by: Loggers.__exit__
    line: socket.socket
    state: LoggerState
    listener: threading.Thread | None = None
    warned: bool = False


class Loggers:
    """A run's loggers, from ``start`` to the end of the ``with`` block.

    Knows processes and what they say; not what a row is."""

    def __init__(
        self, names: Sequence[LoggerName], run: str, run_dir: Path, settings: Mapping[str, Any], anew: bool
    ) -> None:
        """``settings``: shown as the run's, by dotted names. ``anew``: an earlier run's bookmarks do not count."""
        self._names, self._run, self._run_dir, self._settings = names, run, run_dir, settings
        self._children: list[_Child] = []
        self._tell: Tell | None = None
        self.state = "finished"  # how the run ends, unless by an error
        if anew:
            shutil.rmtree(run_dir / FOLDER, ignore_errors=True)

    def __enter__(self) -> Loggers:
        return self

    def start(self, tell: Tell) -> None:
        """Start the processes. ``tell``: called in threads of this object with the rows that were sent. A process that
        cannot be started is a warning."""
        self._tell = tell
        for name in self._names:
            try:
                self._children.append(self._started(name))
            except OSError as error:
                log.warning("%s gets no rows of this run, because its process cannot be started: %s", name, error)

    def _started(self, name: LoggerName) -> _Child:
        folder = self._run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, (folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.logger_feed", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the driver's: it says how the run ends
                env=with_own_path(),
            )
        request = LoggerJob(logger=name, run=self._run, run_dir=str(self._run_dir), settings=self._settings)
        child = _Child(name, process, ours, LoggerState(logger=name))
        _say(child, asdict(request))
        child.listener = threading.Thread(target=self._listen, args=(child,), name=f"rayzero-{name}", daemon=True)
        child.listener.start()
        return child

    def _listen(self, child: _Child) -> None:
        with suppress(ConnectionResetError), child.line.makefile("rb") as lines:  # it was killed
            for line in lines:
                self._take(child, LoggerState(logger=child.name, **json.loads(line)))

    def _take(self, child: _Child, now: LoggerState) -> None:
        before, child.state, tell = child.state, now, self._tell
        if tell is not None and (now.sent, now.lost) != (before.sent, before.lost):
            tell(child.name, now.sent - before.sent, now.lost - before.lost)
        if now.error is not None and not child.warned:
            child.warned = True
            log.warning("%s does not take rows of this run (%s); training goes on, see %s", child.name, now.error,
                        self._run_dir / FOLDER / f"{child.name}.log")  # fmt: skip

    @property
    def states(self) -> list[LoggerState]:
        return [child.state for child in self._children]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._tell = None  # whom it told has ended
        if kind is not None:
            self.state = "stopped" if issubclass(kind, KeyboardInterrupt | SystemExit) else "failed"
        with shielded():
            for child in self._children:
                _say(child, {"end": self.state})
            until = time.monotonic() + _END_S.get(self.state, _STOP_S)
            for child in self._children:
                self._end(child, max(0.0, until - time.monotonic()))

    def _end(self, child: _Child, within_s: float) -> None:
        try:
            child.process.wait(within_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)  # libraries have processes of their own
            child.process.wait()
        if child.listener is not None:
            child.listener.join(_LAST_S)
            with suppress(OSError):  # the other end is gone
                child.line.shutdown(socket.SHUT_RDWR)  # what such a process still holds open ends, too
            child.listener.join()
        child.line.close()
        if not child.state.complete:
            log.warning(
                "%s has not got the rows after step %d (%s); metrics.jsonl has them, and a resumed run sends them",
                child.name, max(0, child.state.step), child.state.error or _how(child.process.returncode),
            )  # fmt: skip


def _how(code: int) -> str:
    """How a process that did not say that it was done has ended."""
    return "it did not end in time" if code == -9 else f"its process ended with code {code}"


def _say(child: _Child, what: Mapping[str, Any]) -> None:
    with suppress(OSError):  # it has ended, which its listener sees
        child.line.sendall(json.dumps(what).encode() + b"\n")


# ---- rows on their way ----------------------------------------------------------------------------------------------


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
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# ---- the process ------------------------------------------------------------------------------------------------


class Driver:
    """The driver, as its child sees it."""

    def __init__(self, line: socket.socket, pid: int) -> None:
        self._line, self._pid, self._came = line, pid, b""

    def request(self) -> LoggerJob:
        word = self.word(_LOCK_S)
        if word is None:
            raise SystemExit(f"the driver said nothing for {_LOCK_S:g} s")
        return LoggerJob(**word)

    def word(self, wait_s: float) -> Any:
        """The next thing that it says; None: nothing within ``wait_s``. If it is gone, that the run has ended."""
        until = time.monotonic() + wait_s
        while b"\n" not in self._came:
            gone = os.getppid() != self._pid
            left = until - time.monotonic()
            ready, _, _ = select.select([self._line], [], [], 0 if gone else max(0.0, min(left, _LOOK_S)))
            more = self._line.recv(1 << 16) if ready else b""
            if not more and (ready or gone):
                return {"end": _KILLED}
            self._came += more
            if not more and left <= 0:
                return None
        told, _, self._came = self._came.partition(b"\n")
        return json.loads(told)

    def tell(self, progress: Mapping[str, Any]) -> None:
        """Say how far this process is (``LoggerState``). A driver that is gone is not told."""
        try:
            self._line.sendall(json.dumps(progress).encode() + b"\n")
        except OSError as error:
            log.info("the driver is gone: %s", error)


def _locked(path: Path) -> int:
    """A lock that only one process of a logger and run has. Raises OSError if another one keeps it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.1)


def _feed(request: LoggerJob, saved: FeedState) -> tuple[Feed, Reporter]:
    run_dir = Path(request.run_dir)
    first = begin(saved, run_dir, replaces=request.logger in REPLACING)
    run = LoggedRun(name=request.run, directory=run_dir, settings=request.settings, memory=saved.memory)
    reporter = REPORTERS[request.logger](run, first)
    saved.write()
    return Feed(RowTail(run_dir), reporter, saved), reporter


def _opened(driver: Driver, request: LoggerJob, saved: FeedState) -> tuple[Feed, Reporter] | None:
    """Open the logger, trying again until the run has ended; then None."""
    wait_s = _RETRY_S[0]
    while True:
        try:
            return _feed(request, saved)
        except Exception as error:  # the edge to a foreign library
            log.warning("cannot open the logger", exc_info=error)
            driver.tell({"error": said(error)})
        if driver.word(wait_s) is not None:
            return None
        wait_s = min(2 * wait_s, _RETRY_S[1])


def _follow(driver: Driver, feed: Feed, reporter: Reporter) -> None:
    wait_s, word, told = _RETRY_S[0], None, None
    while word is None:
        taken = feed.forward()
        wait_s = _RETRY_S[0] if taken else min(2 * wait_s, _RETRY_S[1])
        progress = _progress(feed, reporter)
        if progress != told:
            driver.tell(progress)
            told = progress
        word = driver.word(_LOOK_S if taken else wait_s)
    complete = feed.forward()
    reporter.close(word["end"])
    driver.tell(_progress(feed, reporter, complete))


def _progress(feed: Feed, reporter: Reporter, complete: bool = False) -> dict[str, Any]:
    return {
        "where": reporter.where,
        "sent": feed.sent,
        "lost": feed.lost,
        "step": feed.bookmark.step,
        "error": feed.error,
        "complete": complete,
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    driver = Driver(socket.socket(fileno=int(sys.argv[1])), os.getppid())
    request = driver.request()
    folder = Path(request.run_dir) / FOLDER
    lock = _locked(folder / f"{request.logger}.lock")
    opened = _opened(driver, request, FeedState.read(folder / f"{request.logger}.json"))
    if opened is not None:
        _follow(driver, *opened)
    os.close(lock)


if __name__ == "__main__":
    main()
