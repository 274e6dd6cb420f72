"""Processes of the tests' own: started in a session of their own, and looked for by what they left."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rayzero.cluster.files.run_record import read_record
from rayzero.slabs.sweep import list_slabs

SCRIPT = Path(__file__).with_name("script_run.py")
_started: list[subprocess.Popen[str]] = []  # by the present test


def start_script(
    storage: Path, steps: int, *arguments: str, script: Path = SCRIPT, **env: str
) -> subprocess.Popen[str]:
    """The user's script as a shell would start it: its own process group, one pipe for all it says. ``end_scripts``
    ends it if the test does not."""
    script = subprocess.Popen(
        [sys.executable, str(script), str(storage), str(steps), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])} | env,
    )
    _started.append(script)
    return script


def end_scripts() -> None:
    """Kill what is left of the scripts that a failed test has started, and all below them."""
    while _started:
        script = _started.pop()
        if script.poll() is None:
            for process in reversed(everyone_of(script.pid)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            script.wait()


def until_it_trains(script: subprocess.Popen[str]) -> str:
    """What the script said until its first report."""
    return until_it_says('{"rank"', script)


def until_it_says(what: str, script: subprocess.Popen[str]) -> str:
    """What the script said until a line that begins so."""
    said = ""
    assert script.stdout is not None
    for line in script.stdout:
        said += line
        if line.startswith(what):
            return said
    raise AssertionError(f"the script ended before it said {what}:\n{said}")


def everyone_of(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def is_called(name: str) -> Callable[[psutil.Process], bool]:
    """Whether a process, which may end at any time, has this name."""

    def has_name(process: psutil.Process) -> bool:
        try:
            return process.name() == name
        except psutil.NoSuchProcess:
            return False

    return has_name


def listens(address: str) -> bool:
    """True when something accepts connections there."""
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def shared_memory() -> set[str]:
    """Files in /dev/shm, without the slabs and holds of processes that live, and without the folders of the store's
    tests (tests/store/conftest.py): others may train or test on this machine."""
    alive = {slab.path.name for slab in list_slabs() if slab.alive}
    found = {name for name in os.listdir("/dev/shm") if not name.startswith("test-")} - alive
    return {name for name in found if not (name.endswith(".hold") and _is_held(Path("/dev/shm") / name))}


def _is_held(hold: Path) -> bool:
    try:
        with hold.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def left_in_shared_memory(before: set[str], timeout_s: float = 60.0) -> set[str]:
    """Files that are there now, were not in ``before`` and stay: those that another run's killed processes leave are
    swept at some time."""
    left, deadline = shared_memory() - before, time.monotonic() + timeout_s
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left &= shared_memory()
    return left


class Kills:
    """Sends a signal to a member as rank 0 reports that it has done so many steps. The loop calls ``until_killed``."""

    def __init__(self, run_dir: Path, kills: dict[int, str], how: int = signal.SIGKILL) -> None:
        self.run_dir, self.kills, self.how, self.steps = run_dir, kills, how, sorted(kills)

    def __call__(self, one: Any) -> None:
        if one.rank == 0 and one.metrics["done"] in self.kills:
            who = self.kills.pop(one.metrics["done"])
            members = read_record(self.run_dir)["members"]
            os.kill(next(m["pid"] for m in members if m["who"] == who), self.how)
            _killed_at(self.run_dir, one.metrics["done"]).touch()


def until_killed(run_dir: Path, steps: Iterable[int], step: int) -> None:
    """Wait before ``step`` until ``Kills`` has done what was due by then: a loop that goes on meanwhile may have ended
    before the driver hears of the report."""
    for at in steps:
        while step > at and not _killed_at(run_dir, at).exists():
            time.sleep(0.02)


def _killed_at(run_dir: Path, done: int) -> Path:
    return run_dir / f"killed-{done}"
