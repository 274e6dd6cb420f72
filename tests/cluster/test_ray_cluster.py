"""On a cluster that others started: a script that joins it, and ``ray job submit``. It is left running."""

from __future__ import annotations

import json
import signal
import sys

import psutil
import pytest

from rayzero.cluster.files.run_record import read_record

from .processes import SCRIPT, listens, start_script, still_there, until_it_trains
from .ray_cluster import submit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.thorough]


def test_a_script_joins_the_cluster_of_ray_address_and_sigterm_ends_the_run_and_not_the_cluster(cluster, tmp_path):
    script = start_script(tmp_path, 0, RAY_ADDRESS=cluster.address)
    said = until_it_trains(script)
    record = read_record(tmp_path / "script")
    assert record["ray_address"] == cluster.address
    places = {member["who"]: member["node"] for member in record["members"]}
    assert places["rank 0"] == places["optimizer 0"] != places["rank 1"], "the optimizer is beside its rank"
    hosts = {member["host"] for member in record["members"]}
    assert {address.rpartition(":")[0] for address in record["routing"]["addresses"]} <= hosts, "not on loopback"
    members = [psutil.Process(member["pid"]) for member in record["members"]]
    (nodes,) = (json.loads(line) for line in said.splitlines() if line.startswith('{"driver"'))
    assert nodes["coordinator"] == nodes["driver"], "who looks for http_sd looks beside the driver"
    script.terminate()
    said += script.communicate(timeout=200)[0]
    assert script.returncode == 128 + signal.SIGTERM, said
    assert still_there(members, timeout_s=20) == []
    assert not any(listens(address) for address in record["routing"]["addresses"])
    assert read_record(tmp_path / "script")["state"] == "stopped"
    ended = sorted(path.name for path in (tmp_path / "script").glob("ended-*"))
    assert ended == ["ended-0", "ended-1"], "the loops' finally ran"
    raylets = [process for process in cluster.processes if process.name() in ("raylet", "gcs_server")]
    assert len(raylets) == 3
    assert all(process.is_running() for process in raylets)


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
