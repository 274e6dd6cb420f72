"""Joining and leaving Ray while signals come."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rayzero.cluster.files.run_record import read_record
from rayzero.cluster.nodes import session
from rayzero.cluster.nodes.ray_address import RayAddress
from rayzero.cluster.nodes.session import ray_session

from .processes import everyone_of, start_script, still_there


def terminate(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.thorough
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_sigterm_while_ray_starts_is_a_stop_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rz", dir="/tmp") as ray_files:  # short: sockets have their path there
        script = start_script(tmp_path, 0, RAY_TMPDIR=ray_files)
        while not any(process.name() == "raylet" for process in everyone_of(script.pid)):
            assert script.poll() is None
            time.sleep(0.01)
        script.terminate()
        said = script.communicate(timeout=100)[0]
        assert script.returncode == 143, said
        assert still_there([one for one in psutil.process_iter() if logs_to(ray_files, one)], timeout_s=20) == []
    assert read_record(tmp_path / "script")["state"] == "stopped"


def logs_to(ray_files: str, process: psutil.Process) -> bool:
    """Whether a process belongs to the Ray of this folder: Ray's own hide their command line and environment."""
    try:
        return any(file.path.startswith(ray_files) for file in process.open_files())
    except psutil.Error:  # it is gone, or another user's
        return False


def test_a_signal_while_ray_is_taken_down_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: left.append(terminate()))
    with ray_session():
        pass
    assert left == [None]


@pytest.mark.parametrize(("joined", "went_on"), [(None, [None]), ("127.0.0.1:6379", [])])
def test_a_signal_waits_while_ray_is_started_here_and_ends_a_join_at_once(
    monkeypatch: pytest.MonkeyPatch, joined: str | None, went_on: list[None]
) -> None:
    """Ray that is told to start and left in the middle of it stays; a cluster that does not answer is waited for."""
    left: list[None] = []
    monkeypatch.setattr(session, "find_ray", lambda: RayAddress(joined))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: left.append(terminate()))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(SystemExit) as stopped, ray_session():
        pytest.fail("the session began")
    assert stopped.value.code == 143
    assert left == went_on
