"""Cleans up after a driver that was killed: a small process that outlives it.

[Note: a killed driver] When a driver dies, Ray ends its actors by SIGKILL. They cannot remove their shared memory, and
nothing removes the run from the folder that Prometheus watches. So each driver has a janitor: an interpreter in its own
session, which reads a pipe from the driver. A last line means that the driver has cleaned up. If the pipe ends without
one, or the janitor's parent changes, the driver is dead; the parent matters because a child that the driver forked also
holds the pipe and may outlive it. Then the janitor waits for the run's processes on this host, kills those that stay,
and sweeps.

[Note: states are kept] If what the dead processes left is enough for a run that continues this one, it is not swept for
a while: the janitor holds it (slabs/hold.py) and sleeps. A driver that continues the run ends it, with SIGTERM.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from rayzero.slabs.hold import Hold

__all__ = ["Janitor", "KeptStates", "clear_up"]

_ENDS_S = 30.0  # how long Ray may take to end the actors of a driver that is gone
_KILL_S = 20.0  # how long the kernel may take to free a killed process
_LOOK_S = 1.0  # how long a driver may be gone unnoticed while a child of it keeps the pipe open
_READ_BYTES = 1 << 16
_DONE = "done"
_END_S = 5.0  # how long a janitor may take to end after the driver's last line


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStates:
    """The states of a run that are kept if its driver is killed."""

    run: str
    lineage: str
    seconds: float  # how long; 0: not at all


class Janitor:
    """The driver's end: starts the janitor process, sends it the run's processes, and releases it.

    Knows processes and two folders; not Ray or runs."""

    def __init__(self, slab_dir: Path | None, discovery_dir: Path | None, *, keep: KeptStates | None = None) -> None:
        """``slab_dir``: where the run's shared memory is; ``discovery_dir``: where it is announced; None: nowhere.
        ``keep``: the states that are kept there if the driver is killed; None: none."""
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        folders = ["" if folder is None else str(folder.absolute()) for folder in (slab_dir, discovery_dir)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), *folders, json.dumps(keep and asdict(keep))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # a reader of the driver's output must not wait for this process
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the driver's group does not end it
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            cwd="/",
        )  # freed by: close()

    @property
    def pid(self) -> int:
        """The janitor's process id."""
        return self._process.pid

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """If the driver dies, wait for the end of these processes before sweeping."""
        self._tell([[process.pid, process.create_time()] for process in processes])

    def close(self) -> None:
        """The driver has cleared up itself. Idempotent."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        self._tell(_DONE)
        with suppress(OSError):  # it was killed
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, what: Any) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it was killed: the next start sweeps, as after any other death
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def __enter__(self) -> Janitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def clear_up(
    processes: Iterable[psutil.Process],
    slab_dir: Path | None,
    discovery_dir: Path | None,
    ends_s: float = _ENDS_S,
    *,
    keep: KeptStates | None = None,
) -> None:
    """Remove the dead driver's run from Prometheus' folder, wait ``ends_s`` for its processes and kill those that stay,
    keep their states for a while, and remove their shared memory."""
    hold = _hold(slab_dir, keep)  # before they end: other runs' starts sweep
    if discovery_dir is not None:
        with suppress(OSError):  # the next start removes what stays, as below
            _sweep_announcements(discovery_dir)
    _, stay = psutil.wait_procs(list(processes), timeout=ends_s)
    for process in stay:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stay, timeout=_KILL_S)
    if hold is not None and slab_dir is not None and keep is not None:
        _wait_for_a_driver(hold, slab_dir, keep)
        hold.close()
    if slab_dir is not None and slab_dir.is_dir():
        with suppress(OSError):
            _sweep_slabs(slab_dir)


def _hold(slab_dir: Path | None, keep: KeptStates | None) -> Hold | None:
    """Hold the states. None: none are kept, or the folder takes no file."""
    if slab_dir is not None and keep is not None and keep.seconds > 0:
        with suppress(OSError):
            return Hold(slab_dir, keep.lineage, time.time() + keep.seconds)
    return None


def _wait_for_a_driver(hold: Hold, slab_dir: Path, keep: KeptStates) -> None:
    """See [Note: states are kept]. Returns when time is up, or at once if nobody can go on from what is left. Another
    process looks at it, because it imports torch."""
    code = [sys.executable, "-m", "rayzero.cluster.continuation", keep.run, keep.lineage, str(slab_dir)]
    found = subprocess.run(code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if found.returncode == 0:
        hold.tell(int(found.stdout), time.time() + keep.seconds)
        time.sleep(keep.seconds)


def _sweep_announcements(folder: Path) -> None:
    from rayzero.cluster.files.file_discovery import sweep_announcements

    sweep_announcements(folder)


def _sweep_slabs(folder: Path) -> None:
    from rayzero.slabs.sweep import sweep  # imports torch, which the janitor of a run that ends well never needs

    sweep(folder)


def _watched(told: Iterable[list[Any]]) -> list[psutil.Process]:
    """The processes that still exist, without new ones that have their pids."""
    found = []
    for pid, born in told:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == born:
                found.append(process)
    return found


def _wait_for_the_end_of(driver: int) -> None:
    """The kernel closes a dying process's files, and so the pipe, before the process counts as dead, and until then its
    announcement is taken for that of a living run."""
    deadline = time.monotonic() + _ENDS_S
    while os.getppid() == driver and time.monotonic() < deadline:
        time.sleep(0.01)


def _lines(pipe: int, driver: int) -> Iterator[bytes]:
    """The whole lines that come from ``pipe``, until it ends or ``driver``, this process's parent, is gone. A driver
    that was killed may have written half of one more."""
    rest = b""
    while True:
        gone = os.getppid() != driver  # a new parent at once, even where a dead driver stays as a zombie
        ready, _, _ = select.select([pipe], [], [], 0 if gone else _LOOK_S)
        came = os.read(pipe, _READ_BYTES) if ready else b""
        if not came and (ready or gone):
            return
        *lines, rest = (rest + came).split(b"\n")
        yield from lines


def main() -> None:
    """Read the driver's pipe to its end."""
    driver = int(sys.argv[1])  # it may be dead already; then this process has another parent
    slab_dir, discovery_dir = (Path(folder) if folder else None for folder in sys.argv[2:4])
    kept = json.loads(sys.argv[4])
    keep = None if kept is None else KeptStates(**kept)
    processes: list[psutil.Process] = []
    for line in _lines(sys.stdin.fileno(), driver):
        told = json.loads(line)
        if told == _DONE:
            return
        processes = _watched(told)
    _wait_for_the_end_of(driver)
    clear_up(processes, slab_dir, discovery_dir, keep=keep)


if __name__ == "__main__":
    main()
