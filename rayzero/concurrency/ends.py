"""The ends of processes of this host that psutil knows: looked for by their birth, waited for, killed.

Needs no event loop, because janitors import it and are to stay small."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil


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
