"""On a cluster that others started, and that is left running: ``rayzero train`` as a Ray job, to its end, stopped and
resumed, and beside another; a script that joins the cluster, also as a job."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rayzero.cluster.files.run_record import read_record
from rayzero.convert.remote_checkpoints import newest_checkpoint
from tests.support.leftovers import still_there

from .processes import SCRIPT, listens, start_script, until_it_trains
from .ray_cluster import Cluster, run_ray, submit
from .ray_cluster import one_node as a_node

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TRAIN = (sys.executable, "-m", "rayzero", "train", "recipe.yaml")
RECIPE = """\
num_layers: 1
num_heads: 2
dim: 32
seq_len: 16
batch_size: 1
eval_every: 1000
eval_batches: 1
data: text.txt
split: tail
scaling: {num_workers: 1, num_optimizers: 1, threads_per_worker: 1, threads_per_optimizer: 1}
"""


@pytest.fixture(scope="module")
def one_node() -> Iterator[Cluster]:
    """A node that others have started."""
    with a_node() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(one_node: Cluster) -> Cluster:
    """The same with a second one."""
    one_node.add_node()
    return one_node


@pytest.fixture
def working_dir(tmp_path: Path) -> Path:
    """What a user has: a recipe and a text."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "text.txt").write_text("It is a truth universally acknowledged. " * 200)
    return folder


def settings(tmp_path: Path, name: str, **others: object) -> list[str]:
    return [f"run.storage_path={tmp_path}", f"run.name={name}", *(f"{key}={value}" for key, value in others.items())]


@pytest.mark.promise("installs", "jobs")
def test_a_recipe_runs_as_a_job_and_its_log_is_the_jobs(one_node: Cluster, working_dir, tmp_path):
    done = submit(one_node, working_dir, *TRAIN, *settings(tmp_path, "whole", steps=3))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "validation loss" in done.stdout
    assert "succeeded" in done.stdout
    assert read_record(tmp_path / "whole")["state"] == "finished"


@pytest.mark.thorough
def test_a_job_outlives_a_death_beside_another_and_is_resumed_after_its_driver_is_killed_and_after_a_stop(
    cluster, working_dir, tmp_path
):
    run, checkpoints = tmp_path / "killed", tmp_path / "killed" / "checkpoints"

    def until(job: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not done():
            assert time.monotonic() < deadline, run_ray("job", "logs", "--address", cluster.dashboard, job).stdout
            time.sleep(0.2)

    def rows() -> list[int]:
        written = run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in written.read_text().splitlines()] if written.exists() else []

    def start(job: str, *options: str) -> None:
        forever = settings(tmp_path, "killed", steps=100000, **{"run.checkpoint_every": 20})
        submit(cluster, working_dir, *TRAIN, *forever, *options, options=("--no-wait", "--submission-id", job))

    start("first")
    until("first", lambda: len(rows()) > 5)
    (optimizer,) = [m for m in read_record(run)["members"] if m["who"] == "optimizer 0"]
    os.kill(optimizer["pid"], signal.SIGKILL)
    until("first", lambda: bool(read_record(run)["recoveries"]))
    (rank,) = [m for m in read_record(run)["members"] if m["who"] == "rank 0"]
    os.kill(rank["pid"], signal.SIGSTOP)  # so that the first takes no CPU, and waits
    beside = submit(cluster, working_dir, *TRAIN, *settings(tmp_path, "beside", steps=3))
    os.kill(rank["pid"], signal.SIGCONT)
    assert beside.returncode == 0, beside.stdout + beside.stderr
    assert read_record(tmp_path / "beside")["state"] == "finished"
    now = len(rows())
    until("first", lambda: len(rows()) > now + 5)
    driver = read_record(run)["driver"]["pid"]
    os.kill(driver, signal.SIGKILL)

    start("second", "--resume")
    until("second", lambda: read_record(run)["driver"]["pid"] != driver and read_record(run)["state"] == "running")
    now, saved = len(rows()), newest_checkpoint(checkpoints)
    until("second", lambda: len(rows()) > now + 5 and newest_checkpoint(checkpoints) != saved)
    said = run_ray("job", "logs", "--address", cluster.dashboard, "second").stdout
    assert "with what the killed run has left in this host's shared memory" in said
    members = [psutil.Process(member["pid"]) for member in read_record(run)["members"]]
    stopped = run_ray("job", "stop", "--address", cluster.dashboard, "second")
    assert stopped.returncode == 0, stopped.stdout
    assert still_there(members, timeout_s=30) == []
    left_at = int(newest_checkpoint(checkpoints).name.removeprefix("step-"))

    done = submit(cluster, working_dir, *TRAIN, *settings(tmp_path, "killed", steps=left_at + 2), "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = rows()
    first = steps[: steps.index(left_at + 1)]
    assert first == list(range(1, len(first) + 1)), "each step once"
    assert left_at - len(first) <= 1, (
        "rows that ranks have reported are kept; a rank may be stopped after it has saved and before it reports"
    )
    assert steps[len(first) :] == [left_at + 1, left_at + 2]


@pytest.mark.thorough
def test_a_script_joins_the_cluster_of_ray_address_and_sigterm_ends_the_run_and_not_the_cluster(cluster, tmp_path):
    script = start_script(tmp_path, 0, RAY_ADDRESS=cluster.address)
    said = until_it_trains(script)
    record = read_record(tmp_path / "script")
    assert record["ray_address"] == cluster.address
    places = {member["who"]: member["node"] for member in record["members"]}
    assert places["rank 0"] == places["optimizer 0"] != places["rank 1"], "the optimizer is beside its rank"
    hosts = {member["host"] for member in record["members"]}
    assert {address.rpartition(":")[0] for address in record["addresses"]} <= hosts, "not on loopback"
    members = [psutil.Process(member["pid"]) for member in record["members"]]
    (nodes,) = (json.loads(line) for line in said.splitlines() if line.startswith('{"driver"'))
    assert nodes["coordinator"] == nodes["driver"], "who looks for http_sd looks beside the driver"
    script.terminate()
    said += script.communicate(timeout=200)[0]
    assert script.returncode == 128 + signal.SIGTERM, said
    assert still_there(members, timeout_s=20) == []
    assert not any(listens(address) for address in record["addresses"])
    assert read_record(tmp_path / "script")["state"] == "stopped"
    ended = sorted(path.name for path in (tmp_path / "script").glob("ended-*"))
    assert ended == ["ended-0", "ended-1"], "the loops' finally ran"
    raylets = [process for process in cluster.processes if process.name() in ("raylet", "gcs_server")]
    assert len(raylets) == 3
    assert all(process.is_running() for process in raylets)


@pytest.mark.thorough
def test_a_script_finds_its_cluster_under_ray_job_submit_and_its_optimizers_the_nodes_with_their_label(
    cluster, tmp_path
):
    done = submit(cluster, SCRIPT.parent, sys.executable, SCRIPT.name, str(tmp_path), "2", "cpu_nodes")
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"result"')]
    assert results[0]["result"]["step"] == 1
    assert results[0]["transfers"]["push"] > 0
    record = read_record(tmp_path / "script")
    assert (record["ray_address"], record["state"]) == (cluster.address, "finished")
    (roles,) = (json.loads(line)["roles"] for line in done.stdout.splitlines() if line.startswith('{"driver"'))
    nodes = {member["who"]: member["node"] for member in record["members"]}
    assert roles[nodes["optimizer 0"]] == "optimizer"
