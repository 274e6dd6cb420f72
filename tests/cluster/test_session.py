"""Joining and leaving Ray while signals come."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rayzero.cluster.files.run_record import read_record
from rayzero.cluster.nodes import session
from rayzero.cluster.nodes.ray_address import RayAddress
from rayzero.cluster.nodes.session import ray_session
from tests.support.leftovers import still_there
from tests.support.waiting import until

from .processes import everyone_of, is_called, start_script


def terminate(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.thorough
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_sigterm_while_ray_starts_is_a_stop_and_leaves_nothing_of_it(tmp_path: Path, ray_files: Path) -> None:
    script = start_script(tmp_path, 0, RAY_TMPDIR=str(ray_files))
    until(lambda: script.poll() is not None or any(map(is_called("raylet"), everyone_of(script.pid))), 200)
    assert script.poll() is None
    script.terminate()
    said = script.communicate(timeout=100)[0]
    assert script.returncode == 143, said
    assert still_there([one for one in psutil.process_iter() if logs_to(str(ray_files), one)], timeout_s=20) == []
    assert read_record(tmp_path / "script")["state"] == "stopped"


def logs_to(ray_files: str, process: psutil.Process) -> bool:
    """Whether a process belongs to the Ray of this folder: Ray's own hide their command line and environment."""
    try:
        return any(file.path.startswith(ray_files) for file in process.open_files())
    except psutil.Error:  # it is gone, or another user's
        return False


class Started:
    """In place of a Ray on this machine."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def address(self) -> str:
        return "127.0.0.1:1"

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("ended")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What a session in this process starts."""
    started = Started()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: started.events.append("joined"))
    monkeypatch.setattr(ray, "shutdown", lambda: started.events.append("left"))
    monkeypatch.setattr(session, "LocalRay", lambda: started)
    return started


@pytest.mark.parametrize("begins", [False, True])
def test_a_session_joins_its_own_ray_leaves_it_and_ends_it(begun: Started, begins: bool) -> None:
    """Also one that has begun to start before."""
    with ray_session(begun=begun if begins else None):  # type: ignore[arg-type]
        assert begun.events == ["joined"]
    assert begun.events == ["joined", "left", "ended"]


def test_a_signal_while_ray_is_taken_down_waits(begun: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    left = []
    monkeypatch.setattr(ray, "shutdown", lambda: left.append(terminate()))
    with ray_session():
        pass
    assert left == [None]
    assert begun.events == ["joined", "ended"]


@pytest.mark.parametrize("joined", [None, "127.0.0.1:6379"])
def test_a_signal_ends_a_join_at_once(begun: Started, monkeypatch: pytest.MonkeyPatch, joined: str | None) -> None:
    monkeypatch.setattr(session, "find_ray", lambda: RayAddress(joined))
    monkeypatch.setattr(ray, "init", terminate)
    with pytest.raises(SystemExit) as stopped, ray_session():
        pytest.fail("the session began")
    assert stopped.value.code == 143
    assert begun.events == (["left", "ended"] if joined is None else ["left"])
