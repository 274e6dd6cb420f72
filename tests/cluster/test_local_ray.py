"""A Ray of a process of its own: it begins beside its driver, and nothing of it is left, whenever it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayzero.cluster.nodes import worker_fork
from rayzero.cluster.nodes.local_ray import NOT_FOR_RAY, LocalRay, begin_ray
from rayzero.cluster.nodes.session import ray_session
from rayzero.errors import RunFailedError
from tests.support.leftovers import still_there

from .processes import everyone_of, is_called

pytestmark = [pytest.mark.timeout(120), pytest.mark.promise("refused", "hosts")]

BEGIN = "from rayzero.cluster.nodes.local_ray import LocalRay; import time; ray = LocalRay(); time.sleep(600)"


@pytest.fixture(autouse=True)
def no_other_ray(monkeypatch: pytest.MonkeyPatch, ray_files: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(ray_files))


def below(pid: int, until: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """All processes below one, as soon as one of them is so."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        processes = everyone_of(pid)[1:]
        if any(map(until, processes)):
            return processes
        time.sleep(0.01)
    raise AssertionError(f"none came: {processes}")


def test_a_ray_that_does_not_start_is_a_failed_run_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sockets cannot have so long a path."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 100)))
    (tmp_path / ("x" * 100)).mkdir()
    before = set(psutil.Process().children())
    with pytest.raises(RunFailedError, match=r"cannot start Ray on this machine: .*socket") as error, ray_session():
        pytest.fail("the session began")
    assert "\n" not in str(error.value)
    assert set(psutil.Process().children()) <= before


def test_a_process_of_ray_that_is_killed_is_a_failed_run() -> None:
    with LocalRay() as local:
        os.kill(local._process.pid, signal.SIGKILL)
        with pytest.raises(RunFailedError, match=r"its process ended \(-9\)"):
            local.address()


@pytest.mark.parametrize("named", ["nonsense", "auto"])
def test_what_the_driver_refuses_is_not_started(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    assert begin_ray() is None
    with LocalRay() as local:
        assert local.address() is None


def test_a_signal_that_comes_as_it_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, Ctrl-C raises wherever the driver is."""
    made = []

    def interrupted(*arguments: Any, **more: Any) -> subprocess.Popen[bytes]:
        made.append(start(*arguments, **more))
        os.kill(os.getpid(), signal.SIGINT)
        return made[0]

    start, before = subprocess.Popen, signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            LocalRay()
    finally:
        signal.signal(signal.SIGINT, before)
    assert made[0].poll() is not None


def test_what_python_prints_as_it_starts_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    greeting = "import sys; sys.stdout.buffer.write(b'Willkommen, Gr\\xfc\\xdfe\\n'); sys.stdout.flush()"  # Latin-1
    (tmp_path / "sitecustomize.py").write_text(greeting)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with LocalRay() as local:
        assert local.address() is None


@pytest.mark.parametrize("errors", ["", "2>&-"])
def test_what_ray_prints_is_no_answer(errors: str) -> None:
    """Nor where the driver's errors are closed."""
    code = (
        "import os; from rayzero.cluster.nodes.local_ray import _answer_file; file = _answer_file();"
        "os.system('echo noise'); print('noise', flush=True); os.write(file, b'answer')"
    )
    shell = ["sh", "-c", f'"$@" {errors}', "sh", sys.executable, "-c", code]
    assert subprocess.run(shell, capture_output=True, check=True, text=True).stdout == "answer"


@pytest.mark.ray
@pytest.mark.thorough
def test_signals_to_everyone_leave_its_end_to_the_driver() -> None:
    """From its first moment on."""
    with LocalRay() as local:
        for number in NOT_FOR_RAY:
            os.kill(local._process.pid, number)
        assert local.address()
        for number in NOT_FOR_RAY:
            os.kill(local._process.pid, number)
        processes = everyone_of(local._process.pid)
        (raylet,) = filter(is_called("raylet"), processes)
        assert any(worker_fork.__file__ in part for part in raylet.cmdline()), "it starts workers as we do"
    assert still_there(processes, timeout_s=0.0) == []


@pytest.mark.ray
@pytest.mark.thorough
def test_it_ends_with_a_driver_that_is_killed_while_it_starts() -> None:
    with subprocess.Popen([sys.executable, "-c", BEGIN]) as driver:
        processes = below(driver.pid, is_called("raylet"))
        driver.kill()
    assert still_there(processes, timeout_s=20) == []
