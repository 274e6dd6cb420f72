"""Threads, files and processes that a test has begun and that are still there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable
from threading import Thread

import psutil

PATIENCE_S = 60.0  # a machine is busy; what is forgotten stays for ever
FOR_GOOD = ("rayzero-grpc-loop", "_poll_wrapper")  # ours and grpc.aio's own, one each for the process


def threads() -> set[Thread]:
    """Those of this process."""
    return set(threading.enumerate())


def threads_left(before: Collection[Thread], *names: str) -> list[str]:
    """Names of the threads that have begun since ``before``, do not last as long as the process and do not end.
    ``names``: only those that begin so."""
    begun = [thread for thread in threads() - set(before) if thread.name.startswith(names or "")]
    begun = [thread for thread in begun if not any(name in thread.name for name in FOR_GOOD)]
    until = time.monotonic() + PATIENCE_S
    for thread in begun:
        thread.join(max(0.0, until - time.monotonic()))
    return [thread.name for thread in begun if thread.is_alive()]


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended. It is a zombie until its parent, perhaps not this process, has asked how."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_there(processes: Iterable[psutil.Process], timeout_s: float) -> list[str]:
    """Those that have not ended after a while, by command line."""
    alive, until = list(processes), time.monotonic() + timeout_s
    while (alive := [process for process in alive if lives(process)]) and time.monotonic() < until:
        time.sleep(0.02)
    return [" ".join(process.cmdline()) for process in alive]


def open_files() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def files_left(before: int) -> int:
    """How many more are open than ``before``, once that many are closed that will be."""
    until = time.monotonic() + PATIENCE_S
    while (left := open_files() - before) > 0 and time.monotonic() < until:
        time.sleep(0.01)
    return max(0, left)
