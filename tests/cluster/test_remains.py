"""What processes of a run remove on hosts other than the driver's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from slabs.test_hold import leave

from rayzero.cluster import run_actors
from rayzero.cluster.janitor import Remains, leaving_nothing
from rayzero.cluster.run import Member
from rayzero.cluster.run_actors import RunActors
from rayzero.slabs.sweep import Hold


@pytest.fixture(autouse=True)
def _on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)


def test_a_run_that_starts_again_does_not_wait_for_what_it_had_before(tmp_path: Path) -> None:
    """A janitor of a process that was killed would keep it for a successor."""
    before, other = leave(tmp_path, "one"), leave(tmp_path, "other")
    hold = Hold(tmp_path, "one")
    found = Remains.of_run("two", "elsewhere", replaces=False, over="one").janitor(tmp_path)
    assert found is not None
    assert (before.exists(), other.exists()) == (False, True)
    found.close()
    hold.close()


def test_the_driver_sees_to_its_own_node(tmp_path: Path) -> None:
    before = leave(tmp_path, "one")
    assert Remains.of_run("two", "here", replaces=True, over="one").janitor(tmp_path) is None
    assert before.exists()


def test_the_janitor_is_released_also_where_what_follows_raises(tmp_path: Path) -> None:
    own = leave(tmp_path, "two")
    with (
        pytest.raises(OSError, match="no thread"),
        leaving_nothing(Remains.of_run("two", "elsewhere", replaces=False), tmp_path),
    ):
        raise OSError("no thread")
    assert not own.exists()
    with leaving_nothing(None, tmp_path):
        pass


def test_where_ray_is_gone_the_end_of_a_run_ends_its_processes_and_removes_what_killed_ones_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the driver's janitor holds it for their successors."""
    monkeypatch.setattr(run_actors, "ray_answers", lambda: False)
    actors = RunActors("r", SimpleNamespace(plan=None), None)  # type: ignore[arg-type]
    killed, hold = leave(tmp_path, "one"), Hold(tmp_path, "one")
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            actors.local.find({"rank 0": Member(who="rank 0", pid=process.pid, node="n", host="h")}, "n")
            actors._share, actors.local.janitor = tmp_path, hold  # type: ignore[assignment]
            actors.end(politely=False)
            assert not psutil.pid_exists(process.pid)
        finally:
            process.kill()
    assert not killed.exists()
