"""A small process that outlives the one that starts it, and clears up after it.

It reads a pipe from its maker. A last line means that the maker has cleared up itself. If the pipe ends without one, or
the maker no longer exists, the maker is dead. The pipe alone does not do: a child that the maker forked also holds it,
and may outlive the maker.

The ends of processes, as psutil knows them, are here too: janitors import this and are to stay small, so it needs no
event loop.
"""

from __future__ import annotations

import errno
import json
import os
import select
import site
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import psutil

# a shell's background jobs read nothing unless told what; a reader of the maker's output must not wait for one
_DETACH = 'exec 3<&0; "$@" <&3 3<&- >/dev/null & echo $!'
_LOOK_S = 1.0  # how long a maker may be gone unnoticed while a child of it keeps the pipe open
_READ_BYTES = 1 << 16
_DONE = "done"
_END_S = 5.0  # how long a survivor may take to end after the last line
_DIES_S = 30.0  # how long the kernel may take to end a maker whose files it has closed


def with_own_path() -> dict[str, str]:
    """This process's environment, for a Python that it starts; ``PYTHONPATH`` begins with the folder of this RayZero
    unless it is installed, because an installed one is found anyway."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


class Survivor:
    """The maker's end: starts the survivor, tells it things, and releases it."""

    def __init__(self, module: str, *arguments: str, detached: bool) -> None:
        """``module``: whose main makes a ``Maker`` and gets these arguments from it. ``detached``: the survivor is
        not a child of the maker, because Ray kills an actor's children with the actor. Raises OSError."""
        own = psutil.Process()
        program = [sys.executable, "-m", module, str(own.pid), repr(own.create_time()), *arguments]
        reads, writes = os.pipe()
        self._pipe = os.fdopen(writes, "w")  # freed by: close()
        start = ["sh", "-c", _DETACH, "sh"] if detached else []
        try:
            self._child = subprocess.Popen(
                [*start, *program],
                stdin=reads,
                stdout=subprocess.PIPE if detached else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a signal to the maker's group does not end it
                text=True,
                env=with_own_path(),
                cwd="/",
            )
            self.pid = _said(self._child.communicate()[0]) if detached else self._child.pid
        except BaseException:
            self._pipe.close()
            raise
        finally:
            os.close(reads)
        self._process: psutil.Process | None = None  # it has ended
        with suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(self.pid)

    def tell(self, what: Any) -> None:
        """Send what ``Maker.told`` yields: of JSON's types."""
        with suppress(OSError):  # it was killed: the next start sweeps, as after any other death
            self._pipe.write(json.dumps(what) + "\n")
            self._pipe.flush()

    def close(self) -> None:
        """The maker has cleared up itself; returns once the survivor has ended. Idempotent."""
        if self._pipe.closed:
            return
        self.tell(_DONE)
        with suppress(OSError):  # it was killed
            self._pipe.close()
        if self._process is not None and not ends(self._process, _END_S):
            kill(self._process)
        self._child.wait()


def _said(pid: str) -> int:
    """The process id that the shell has written. Raises OSError if it has not: it could not fork."""
    if not pid.strip():
        raise OSError(errno.EAGAIN, "the shell could not start another process")
    return int(pid)


class Maker:
    """The survivor's end: what its maker says."""

    def __init__(self, arguments: list[str]) -> None:
        """``arguments``: ``sys.argv`` of the survivor."""
        self._process = process_born(int(arguments[1]), float(arguments[2]))
        self.arguments = arguments[3:]

    def told(self) -> Iterator[Any]:
        """What the maker tells; returns once it is dead. Raises SystemExit once it has released the survivor."""
        for line in self._lines():
            told = json.loads(line)
            if told == _DONE:
                raise SystemExit
            yield told
        # the kernel closes a dying process's files before it counts as dead; until then others still take it for alive
        if self._process is not None:
            ends(self._process, _DIES_S)

    def _lines(self) -> Iterator[bytes]:
        """The whole lines of the pipe. A maker that was killed may have written half of one more."""
        pipe, rest = sys.stdin.fileno(), b""
        while True:
            gone = self._process is None or not lives(self._process)
            ready, _, _ = select.select([pipe], [], [], 0 if gone else _LOOK_S)
            came = os.read(pipe, _READ_BYTES) if ready else b""
            if not came and (ready or gone):
                return
            *lines, rest = (rest + came).split(b"\n")
            yield from lines


# ---- ends of processes: looked for by their birth, waited for, killed -----------------------------------------------


def process_born(pid: int, born: float) -> psutil.Process | None:
    """The process with this pid and ``create_time``; None: it has ended, and another one may have its pid."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == born:
            return process
    return None


def lives(process: psutil.Process) -> bool:
    """False also of a process that has ended, and whose parent has not asked how. Not by a pidfd (processes.py): where
    these are forbidden, a janitor has to know it, too."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def ends(process: psutil.Process, patience_s: float) -> bool:
    """Whether a process ends so soon."""
    deadline = time.monotonic() + patience_s
    while lives(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def kill(process: psutil.Process) -> None:
    """Kill a process, unless it has ended."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


def wait_or_kill(processes: Iterable[psutil.Process], ends_s: float, dies_s: float) -> None:
    """Wait ``ends_s`` until processes have ended, kill those that stay, and wait ``dies_s`` for the kernel."""
    _, stay = psutil.wait_procs(list(processes), timeout=ends_s)
    for process in stay:
        kill(process)
    psutil.wait_procs(stay, timeout=dies_s)
