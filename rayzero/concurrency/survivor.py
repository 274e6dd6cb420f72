"""A small process that outlives the one that starts it, and clears up after it.

It reads a pipe from its maker. A last line means that the maker has cleared up itself. If the pipe ends without one, or
the maker no longer exists, the maker is dead. The pipe alone does not do: a child that the maker forked also holds it,
and may outlive the maker.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Maker", "Survivor"]

# a shell's background jobs read nothing unless told what; a reader of the maker's output must not wait for one
_DETACH = 'exec 3<&0; "$@" <&3 3<&- >/dev/null & echo $!'
_LOOK_S = 1.0  # how long a maker may be gone unnoticed while a child of it keeps the pipe open
_READ_BYTES = 1 << 16
_DONE = "done"
_END_S = 5.0  # how long a survivor may take to end after the last line
_DIES_S = 30.0  # how long the kernel may take to end a maker whose files it has closed


class Survivor:
    """The maker's end: starts the survivor, tells it things, and releases it."""

    def __init__(self, module: str, *arguments: str, detached: bool) -> None:
        """``module``: whose main makes a ``Maker`` and gets these arguments from it. ``detached``: the survivor is
        nobody's child, because Ray kills those of an actor's process with it. Raises OSError."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        program = [sys.executable, "-m", module, *_identity(psutil.Process()), *arguments]
        reads, writes = os.pipe()
        self.pipe = os.fdopen(writes, "w")  # freed by: close()
        start = ["sh", "-c", _DETACH, "sh"] if detached else []
        try:
            self._child = subprocess.Popen(
                [*start, *program],
                stdin=reads,
                stdout=subprocess.PIPE if detached else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a signal to the maker's group does not end it
                text=True,
                env=os.environ | {"PYTHONPATH": path},
                cwd="/",
            )
        finally:
            os.close(reads)
        self.pid = int(self._child.communicate()[0]) if detached else self._child.pid
        self._identity = _identity_of(self.pid)

    def tell(self, what: Any) -> None:
        """Send what ``Maker.told`` yields: of JSON's types."""
        with suppress(OSError):  # it was killed: the next start sweeps, as after any other death
            self.pipe.write(json.dumps(what) + "\n")
            self.pipe.flush()

    def close(self) -> None:
        """The maker has cleared up itself; returns once the survivor has ended. Idempotent."""
        if self.pipe.closed:
            return
        self.tell(_DONE)
        with suppress(OSError):  # it was killed
            self.pipe.close()
        if not _ends(self._identity, _END_S):
            os.kill(self.pid, signal.SIGKILL)
        self._child.wait()


class Maker:
    """The survivor's end: what its maker says."""

    def __init__(self, arguments: list[str]) -> None:
        """``arguments``: ``sys.argv`` of the survivor."""
        self._identity = arguments[1], arguments[2]
        self.arguments = arguments[3:]

    def told(self) -> Iterator[Any]:
        """What the maker tells; returns once it is dead. Raises SystemExit once it has released the survivor."""
        for line in self._lines():
            told = json.loads(line)
            if told == _DONE:
                raise SystemExit
            yield told
        # the kernel closes a dying process's files before it counts as dead; until then others still take it for alive
        _ends(self._identity, _DIES_S)

    def _lines(self) -> Iterator[bytes]:
        """The whole lines of the pipe. A maker that was killed may have written half of one more."""
        pipe, rest = sys.stdin.fileno(), b""
        while True:
            gone = not _lives(self._identity)
            ready, _, _ = select.select([pipe], [], [], 0 if gone else _LOOK_S)
            came = os.read(pipe, _READ_BYTES) if ready else b""
            if not came and (ready or gone):
                return
            *lines, rest = (rest + came).split(b"\n")
            yield from lines


_Identity = tuple[str, str]  # pid and time of birth: another process may have the pid later


def _identity(process: psutil.Process) -> _Identity:
    return str(process.pid), repr(process.create_time())


def _identity_of(pid: int) -> _Identity | None:
    """None: it has ended."""
    try:
        return _identity(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return None


def _lives(identity: _Identity | None) -> bool:
    """False also of a process that has ended, and whose parent has not asked how."""
    if identity is None:
        return False
    try:
        process = psutil.Process(int(identity[0]))
        return _identity(process) == identity and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _ends(identity: _Identity | None, patience_s: float) -> bool:
    """Whether a process ends so soon."""
    deadline = time.monotonic() + patience_s
    while _lives(identity):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
