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

from rayzero.cluster.session import ray_session

from .processes import everyone_of, start_script, still_there


def terminate(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


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
    assert not (tmp_path / "script" / "run.json").exists()


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
