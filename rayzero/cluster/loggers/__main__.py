"""The process of one logger: ``python -m rayzero.cluster.loggers FD``, a child of the driver (``children.py``).

It reads one line that says what to do, then the word that the run has ended; it answers with lines on how far it is. If
the driver is killed, it sends what is in the file and ends.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayzero.cluster.files.row_tail import RowTail
from rayzero.cluster.loggers.children import LoggerJob, Progress
from rayzero.cluster.loggers.feed import Feed, FeedState, begin, said
from rayzero.cluster.loggers.reporter import LoggedRun, Reporter, opener, replaces

_LOOK_S = 0.5  # between two looks at the file
_RETRY_S = (1.0, 60.0)  # between two tries where the logger takes nothing: at first, at most
_LOCK_S = 20.0  # for the process of an earlier start of the run to end
_KILLED = "stopped"  # the state of a run whose driver is gone

log = logging.getLogger(__name__)


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

    def tell(self, progress: Progress) -> None:
        """Say how far this process is. A driver that is gone is not told."""
        try:
            self._line.sendall(json.dumps(asdict(progress)).encode() + b"\n")
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
    """Open the logger. Raises whatever it raises."""
    run_dir = Path(request.run_dir)
    first = begin(saved, run_dir, replaces=replaces(request.logger))
    run = LoggedRun(name=request.run, directory=run_dir, settings=request.settings, memory=saved.memory)
    reporter = opener(request.logger)(run, first)
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
            driver.tell(Progress(where=None, error=said(error)))
        if driver.word(wait_s) is not None:
            return None
        wait_s = min(2 * wait_s, _RETRY_S[1])


def _follow(driver: Driver, feed: Feed, reporter: Reporter) -> None:
    """Send rows until the run has ended, then the last ones."""
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


def _progress(feed: Feed, reporter: Reporter, complete: bool = False) -> Progress:
    return Progress(
        where=reporter.where,
        sent=feed.sent,
        lost=feed.lost,
        step=feed.bookmark.step,
        error=feed.error,
        complete=complete,
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    driver = Driver(socket.socket(fileno=int(sys.argv[1])), os.getppid())
    request = driver.request()
    folder = Path(request.folder)
    lock = _locked(folder / f"{request.logger}.lock")
    opened = _opened(driver, request, FeedState.read(folder / f"{request.logger}.json"))
    if opened is not None:
        _follow(driver, *opened)
    os.close(lock)


if __name__ == "__main__":
    main()
