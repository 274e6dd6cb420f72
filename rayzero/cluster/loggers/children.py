"""The driver's end of its loggers: starts a process for each, listens to how far it is, ends it.

No logger can end, block or slow a run: the driver never waits for one while the run goes on, and at the end for
``_END_S`` at most. What a logger's library prints is in ``.loggers/`` in the run's folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rayzero.cluster.interrupts import shielded
from rayzero.concurrency.survivor import with_own_path
from rayzero.config.loggers import LoggerName

FOLDER = ".loggers"
_END_S = {"finished": 30.0, "restarting": 30.0}  # for the last rows of a run that ended so; else:
_STOP_S = 5.0
_LAST_S = 2.0  # to read what a process has said before it ended

Tell = Callable[[LoggerName, int, int], None]  # which one, rows sent, rows refused: since it was told last

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerJob:
    """What the process of a logger is to do."""

    logger: LoggerName
    run: str  # its name
    run_dir: str
    folder: str  # for the bookmark
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerProgress:
    """How far a logger is in this start of the run."""

    where: str | None  # a folder, a file or a URL; None: it is not open
    sent: int = 0  # rows
    lost: int = 0  # rows that it refused while it took others
    step: int = -1  # of the last row
    error: str | None = None  # the last one
    complete: bool = False  # it has ended, and has every row


@dataclass(slots=True)
class _Child:
    """One logger's process."""

    name: LoggerName
    process: subprocess.Popen[bytes]  # freed by: Loggers.__exit__
    line: socket.socket
    listener: threading.Thread | None = None
    progress: LoggerProgress = field(default_factory=lambda: LoggerProgress(where=None))
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
                [sys.executable, "-m", f"{__package__}.feed", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the driver's: it says how the run ends
                env=with_own_path(),
            )
        request = LoggerJob(
            logger=name, run=self._run, run_dir=str(self._run_dir), folder=str(folder), settings=self._settings
        )
        child = _Child(name, process, ours)
        _say(child, asdict(request))
        child.listener = threading.Thread(target=self._listen, args=(child,), name=f"rayzero-{name}", daemon=True)
        child.listener.start()
        return child

    def _listen(self, child: _Child) -> None:
        with suppress(ConnectionResetError), child.line.makefile("rb") as lines:  # it was killed
            for line in lines:
                self._take(child, LoggerProgress(**json.loads(line)))

    def _take(self, child: _Child, now: LoggerProgress) -> None:
        before, child.progress, tell = child.progress, now, self._tell
        if tell is not None and (now.sent, now.lost) != (before.sent, before.lost):
            tell(child.name, now.sent - before.sent, now.lost - before.lost)
        if now.error is not None and not child.warned:
            child.warned = True
            log.warning("%s does not take rows of this run (%s); training goes on, see %s", child.name, now.error,
                        self._run_dir / FOLDER / f"{child.name}.log")  # fmt: skip

    def described(self) -> list[dict[str, Any]]:
        return [{"logger": child.name, **asdict(child.progress)} for child in self._children]

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
        if not child.progress.complete:
            log.warning(
                "%s has not got the rows after step %d (%s); metrics.jsonl has them, and a resumed run sends them",
                child.name, max(0, child.progress.step), child.progress.error or _how(child.process.returncode),
            )  # fmt: skip


def _how(code: int) -> str:
    """How a process that did not say that it was done has ended."""
    return "it did not end in time" if code == -9 else f"its process ended with code {code}"


def _say(child: _Child, what: Mapping[str, Any]) -> None:
    with suppress(OSError):  # it has ended, which its listener sees
        child.line.sendall(json.dumps(what).encode() + b"\n")
