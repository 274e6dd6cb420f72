"""A process that outlives its maker, as its maker knows it."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from rayzero.concurrency import survivor
from rayzero.concurrency.ends import kill, lives, process_born, wait_or_kill
from rayzero.concurrency.survivor import Survivor


def test_a_survivor_that_a_shell_cannot_start_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sh`` says that it cannot fork, and ends."""
    monkeypatch.setattr(survivor, "_DETACH", "exit 2")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="could not start another process"):
        Survivor("rayzero.slabs.slab_janitor", "/nowhere", "one", "0", detached=True)
    assert os.listdir("/proc/self/fd") == before


def test_a_survivor_that_ends_when_it_is_to_be_killed_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was too slow, and then it was not."""

    class Gone:
        def kill(self) -> None:
            raise psutil.NoSuchProcess(1)

    made = Survivor("rayzero.slabs.slab_janitor", "/nowhere", "one", "0", detached=True)
    monkeypatch.setattr(survivor, "ends", lambda process, patience_s: False)
    monkeypatch.setattr(made, "_process", Gone())
    made.close()
    made.close()


def test_a_process_is_known_by_its_birth() -> None:
    own = psutil.Process()
    assert process_born(own.pid, own.create_time()) == own
    assert process_born(own.pid, own.create_time() - 1) is None


def test_who_does_not_end_is_killed() -> None:
    started = [subprocess.Popen([sys.executable, "-c", code]) for code in ("import time; time.sleep(99)", "")]
    processes = [psutil.Process(each.pid) for each in started]
    wait_or_kill(processes, 0.5, 30.0)
    assert not any(map(lives, processes))
    for each in started:
        each.wait()
    kill(processes[0])
