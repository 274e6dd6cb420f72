"""A process that outlives its maker, as its maker knows it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import rayzero
from rayzero.concurrency import survivor
from rayzero.concurrency.survivor import Survivor, kill, lives, process_born, wait_or_kill
from tests.support.leftovers import files_left, open_files

FILE = "import rayzero; print(rayzero.__file__)"
START = (
    "import subprocess, sys; from rayzero.concurrency.survivor import with_own_path;"
    f"subprocess.run([sys.executable, '-P', '-c', {FILE!r}], env=with_own_path(), cwd='/', check=True)"
)


def test_a_survivor_that_a_shell_cannot_start_is_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sh`` says that it cannot fork, and ends."""
    monkeypatch.setattr(survivor, "_DETACH", "exit 2")
    before = open_files()
    with pytest.raises(OSError, match="could not start another process"):
        Survivor("rayzero.slabs.sweep", "/nowhere", "one", "0", detached=True)
    assert files_left(before) == 0


def test_a_survivor_that_ends_when_it_is_to_be_killed_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was too slow, and then it was not."""

    class Gone:
        def kill(self) -> None:
            raise psutil.NoSuchProcess(1)

    made = Survivor("rayzero.slabs.sweep", "/nowhere", "one", "0", detached=True)
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


def test_a_copy_that_is_not_installed_goes_before_the_one_that_is(tmp_path: Path) -> None:
    """As in a clone, beside another RayZero."""
    package = Path(rayzero.__file__).parent
    (tmp_path / "rayzero").mkdir()
    shutil.copy(package / "__init__.py", tmp_path / "rayzero")
    shutil.copytree(package / "concurrency", tmp_path / "rayzero" / "concurrency")
    started = subprocess.run([sys.executable, "-c", START], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert started.stdout.strip() == str(tmp_path / "rayzero" / "__init__.py")


def test_an_installed_one_leaves_the_path_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages would go before Python's own library."""
    monkeypatch.setenv("PYTHONPATH", "/there")
    monkeypatch.setattr(survivor.site, "getsitepackages", lambda: [str(Path(rayzero.__file__).parents[1])])
    assert survivor.with_own_path()["PYTHONPATH"] == "/there"
