"""A run of which every process is killed goes on with resume=True from the last step that was decided, and one that has
lost a host starts again from its newest checkpoint. One whose driver alone is killed: test_jobs.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rayzero.checkpoint import CheckpointReader
from rayzero.cluster.files.metrics_log import read_log
from rayzero.cluster.files.run_record import read_record
from rayzero.engine.context import RankContext
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.leftovers import still_there

from .killed_run import train
from .processes import everyone_of, start_script, until_it_says
from .ray_cluster import Cluster, two_nodes

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(500),
    needs.shared_memory,
]

SCRIPT, STEPS = Path(__file__).with_name("killed_run.py"), 120
CONTINUES = "with what the killed run has left in this host's shared memory"


class Runs:
    """Runs of the script, each in the same folders."""

    def __init__(self, storage: Path, ray_files: str, slabs: str) -> None:
        self.storage, self.ray_files, self.slabs = storage, ray_files, slabs

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return start_script(self.storage, STEPS, self.slabs, *arguments, script=SCRIPT, RAY_TMPDIR=self.ray_files)

    def ended(self, *arguments: str) -> str:
        """What a run says that ends well."""
        script = self.start(*arguments)
        said, _ = script.communicate(timeout=200)
        assert script.returncode == 0, said
        return said

    def killed(self, reports: int) -> None:
        """A run that is killed with all that it has started, its janitor too, once rank 0 has reported so often."""
        script = self.start()
        for _ in range(reports):
            until_it_says('{"rank": 0,', script)
        below = everyone_of(script.pid)
        for process in below:
            os.kill(process.pid, signal.SIGKILL)
        script.communicate(timeout=100)
        assert still_there(below, timeout_s=20) == []


@pytest.fixture
def runs(tmp_path: Path, ray_files: Path) -> Iterator[Runs]:
    with tempfile.TemporaryDirectory(prefix="test-", dir=SHARED_MEMORY) as slabs:  # which no other test's runs sweep
        yield Runs(tmp_path, str(ray_files), slabs)
        assert os.listdir(slabs) == []


def undisturbed(context: RankContext) -> Any:
    """The script's loop without a run: a row for each report. Its weights are where the script would put them."""
    train({"steps": STEPS, "storage": str(context.run_dir)})
    return [(context.rank, row["done"], row["done"], row["loss"], row["mean"]) for row in context.reports]


def test_it_ends_with_the_bits_and_the_rows_of_one_that_was_not_killed(runs: Runs) -> None:
    runs.killed(7)
    said = runs.ended("resume")
    assert CONTINUES in said
    (runs.storage / "undisturbed").mkdir()
    rows, others = run_ranks(undisturbed, 2, 2, "shm", True, run_dir=runs.storage / "undisturbed")
    ours, weights = (load_file(each / "weights.safetensors") for each in (runs.storage, runs.storage / "undisturbed"))
    assert all(torch.equal(weight, ours[name]) for name, weight in weights.items())
    log = read_log(runs.storage / "demo")
    found = [(row["rank"], row["step"], row["done"], row["loss"], row["mean"]) for row in log]
    right = {*rows, *others}
    assert len(set(found)) == len(found), "each row once"
    assert set(found) <= right
    missing = {row[1] for row in right - set(found)}
    assert len(missing) <= 2, "the end of an iteration that was killed is repeated, without its reports"
    assert read_record(runs.storage / "demo")["resumed_from"] is None


# ---- a host is lost -------------------------------------------------------------------------------------------------


FEW = 100  # steps


def second_raylet(cluster: Cluster) -> psutil.Process:
    """The process with which all others of the second node end."""
    raylets = [process for process in cluster.processes if process.name() == "raylet"]
    return next(process for process in raylets if "--head" not in process.cmdline())


def test_it_goes_on_with_as_many_processes_as_have_a_place(tmp_path: Path) -> None:
    with two_nodes() as cluster, tempfile.TemporaryDirectory(prefix="test-", dir=SHARED_MEMORY) as slabs:
        script = start_script(tmp_path, FEW, slabs, "rescale", script=SCRIPT, RAY_ADDRESS=cluster.address)
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
    with CheckpointReader(tmp_path / "demo" / "checkpoints" / f"step-{FEW}") as last:
        assert last.step == FEW
