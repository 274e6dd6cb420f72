"""A run that has lost one of its hosts starts again from its newest checkpoint on what the cluster still has."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from rayzero.checkpoint import CheckpointReader
from rayzero.cluster.files.run_record import read_record
from rayzero.slabs.sweep import SHARED_MEMORY

from .processes import start_script, until_it_says
from .ray_cluster import Cluster, two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400), pytest.mark.thorough]

SCRIPT, STEPS = Path(__file__).with_name("killed_run.py"), 100


def second_raylet(cluster: Cluster) -> psutil.Process:
    """The process with which all others of the second node end."""
    raylets = [process for process in cluster.processes if process.name() == "raylet"]
    return next(process for process in raylets if "--head" not in process.cmdline())


def test_it_goes_on_with_as_many_processes_as_have_a_place(tmp_path: Path) -> None:
    with two_nodes() as cluster, tempfile.TemporaryDirectory(prefix="test-", dir=SHARED_MEMORY) as slabs:
        script = start_script(tmp_path, STEPS, slabs, "rescale", script=SCRIPT, RAY_ADDRESS=cluster.address)
        said = until_it_says(json.dumps({"rank": 0, "done": 22})[:-1], script)
        members = {member["who"]: member["node"] for member in read_record(tmp_path / "demo")["members"]}
        assert members["rank 0"] != members["rank 1"]
        os.kill(second_raylet(cluster).pid, signal.SIGKILL)
        said += script.communicate(timeout=300)[0]
        assert script.returncode == 0, said
    record = read_record(tmp_path / "demo")
    assert [member["who"] for member in record["members"]] == ["optimizer 0", "rank 0"], said
    assert "Its host has left the cluster: only a checkpoint brings back what it had." in said
    assert re.search(rf"starting from step (\d+), with {tmp_path}/demo/checkpoints/step-\1, in 1 s", said)
    assert [one["who"] for one in record["recoveries"]] == ["the run"]
    assert "(2 more failures would be outlived)" in said, "processes that die with their host are one failure"
    with CheckpointReader(tmp_path / "demo" / "checkpoints" / f"step-{STEPS}") as last:
        assert last.step == STEPS
