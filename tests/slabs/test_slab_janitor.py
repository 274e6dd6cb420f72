"""What a killed process has left on a host without a driver goes, once nobody there can need it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rayzero.slabs.sweep import SlabJanitor, clear_up, held_in, main, sweep
from tests.support.leftovers import still_there
from tests.support.waiting import until

from .test_hold import leave, made

MAKER = """
import json, os, sys
from pathlib import Path
from rayzero.slabs.sweep import SlabJanitor
janitor = SlabJanitor(Path(sys.argv[1]), "one", float(sys.argv[2]))
assert "torch" not in sys.modules
child = os.fork() if sys.argv[3:] else None
if child != 0:
    print(json.dumps([janitor._survivor.pid, child]), flush=True)
sys.stdin.readline()
janitor.close()
"""


@pytest.fixture
def makers(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes with a janitor each, which are ended with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def patient(tmp_path: Path, makers: list[subprocess.Popen[str]]) -> Iterator[psutil.Process]:
    """The janitor of the first maker, which waits for long, once it holds the slabs of lineage "one"."""
    found, _ = start(makers, tmp_path, 3600.0)
    until(lambda: held_in(tmp_path))
    yield found
    with suppress(psutil.NoSuchProcess):
        found.kill()


def start(makers: list[subprocess.Popen[str]], *arguments: object) -> tuple[psutil.Process, int | None]:
    """A maker; returns its janitor, and its child."""
    command = [sys.executable, "-c", MAKER, *map(str, arguments)]
    makers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    said = makers[-1].stdout
    assert said is not None
    found, child = json.loads(said.readline())
    return psutil.Process(found), child


def test_it_removes_what_its_dead_maker_has_left_after_its_patience(tmp_path: Path, makers: list) -> None:
    found, _ = start(makers, tmp_path, 1.0)
    assert psutil.Process(makers[0].pid).children() == [], "Ray would kill them with an actor"
    leave(tmp_path, "one")
    began = time.monotonic()
    makers[0].kill()
    assert still_there([found], timeout_s=30) == []
    assert time.monotonic() - began > 1.0, "a successor may need it"
    assert list(tmp_path.iterdir()) == []


def test_it_waits_for_nobody_if_nothing_is_left(tmp_path: Path, makers: list) -> None:
    found, _ = start(makers, tmp_path, 3600.0)
    makers[0].kill()
    assert still_there([found], timeout_s=30) == []


def test_a_child_that_holds_its_makers_pipe_does_not_keep_it_waiting(tmp_path: Path, makers: list) -> None:
    """Such as a loader's worker process."""
    found, child = start(makers, tmp_path, 0.0, "fork")
    assert child is not None
    leave(tmp_path, "one")
    makers[0].kill()
    try:
        assert still_there([found], timeout_s=30) == []
        assert psutil.pid_exists(child)
        assert list(tmp_path.iterdir()) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_maker_that_ends_well_takes_it_along_and_removes_what_others_have_left(tmp_path: Path, makers: list) -> None:
    found, _ = start(makers, tmp_path, 3600.0)
    leave(tmp_path, "one")
    makers[0].communicate("end\n", timeout=30)
    assert makers[0].returncode == 0
    assert still_there([found], timeout_s=30) == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_leaves_whose_successor_is_awaited_stays_when_others_start_or_end(
    tmp_path: Path, makers: list, patient: psutil.Process
) -> None:
    """Also if it was the only process of its run on the host."""
    awaited, other = leave(tmp_path, "one"), leave(tmp_path, "two")
    makers[0].kill()
    makers[0].wait()
    SlabJanitor(tmp_path, "one", 3600.0).close()  # another process of the same run
    assert awaited.exists()
    assert [path for path, _ in sweep(tmp_path)] == [other], "another run starts"
    patient.kill()
    patient.wait(30)
    assert [path for path, _ in sweep(tmp_path)] == [awaited], "nobody awaits it any more"


def test_a_process_that_ends_removes_nothing_of_other_runs(tmp_path: Path) -> None:
    theirs = leave(tmp_path, "B")
    ours = leave(tmp_path, "A")
    SlabJanitor(tmp_path, "A", 0.0).close()
    assert (theirs.exists(), ours.exists()) == (True, False)


@pytest.mark.parametrize("patience_s", [0.0, 0.01])
def test_a_janitor_holds_what_a_successor_may_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    """A process that nobody replaces has none."""
    held: list[str] = []

    class Maker:
        def __init__(self, _: list[str]) -> None:
            self.arguments = [str(tmp_path), "one", str(patience_s)]

        def told(self) -> list[object]:
            held.extend(each.lineage for each in held_in(tmp_path))
            return []

    monkeypatch.setattr("rayzero.slabs.sweep.Maker", Maker)
    leave(tmp_path, "one")
    main()
    assert held == ["one"] * (patience_s > 0)
    assert list(tmp_path.iterdir()) == []


def test_a_janitor_that_was_killed_disturbs_nobody(tmp_path: Path) -> None:
    made = SlabJanitor(tmp_path, "one", 0.0)
    os.kill(made._survivor.pid, signal.SIGKILL)
    made.close()
    made.close()


def test_slabs_stay_while_a_process_of_their_run_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayzero.slabs.sweep._LOOK_S", 0.01)
    leave(tmp_path, "one")
    lives, other = made(tmp_path), made(tmp_path, lineage="two")
    waits = threading.Thread(target=clear_up, args=(tmp_path, "one", 0.0))
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    assert len(list(tmp_path.iterdir())) == 3
    lives.close(unlink=False)
    waits.join(30)
    assert not waits.is_alive()
    assert list(tmp_path.iterdir()) == [other.path]
    other.close()
