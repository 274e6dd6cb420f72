"""On a cluster that others started: a script that joins it, and ``ray job submit``. It is left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rayzero.cluster.run_dir import read_record

from .processes import SCRIPT, listens, start_script, still_there, until_it_trains

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

RAY = Path(sys.executable).with_name("ray")


@dataclass(frozen=True)
class Cluster:
    """Two nodes of two CPUs on this machine, made with ``ray start``."""

    address: str
    dashboard: str
    processes: list[psutil.Process]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Started on free ports, one of which Ray would take from other clusters; ended by process id, not ``ray stop``."""
    with tempfile.TemporaryDirectory(prefix="rz", dir="/tmp") as files:  # short: sockets have their path there
        dashboard = free_port()
        processes: list[psutil.Process] = []
        try:
            ray_start("--head", f"--port={free_port()}", f"--dashboard-port={dashboard}", f"--temp-dir={files}")
            address = (Path(files) / "ray_current_cluster").read_text().strip()
            ray_start(f"--address={address}")
            processes += [process for process in psutil.process_iter() if belongs_to(process, files)]
            yield Cluster(address, f"http://127.0.0.1:{dashboard}", processes)
        finally:
            end(processes or [process for process in psutil.process_iter() if belongs_to(process, files)])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ray_start(*options: str) -> None:
    common = ["--num-cpus=2", "--object-store-memory=200000000", f"--dashboard-agent-listen-port={free_port()}"]
    done = run_ray("start", "--disable-usage-stats", *common, *options)
    assert done.returncode == 0, done.stdout + done.stderr


def run_ray(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"RAY_ADDRESS": ""}
    return subprocess.run([str(RAY), *arguments], capture_output=True, text=True, timeout=150, env=environment)


def belongs_to(process: psutil.Process, files: str) -> bool:
    try:
        return process.pid != os.getpid() and any(files in word for word in process.cmdline())
    except psutil.Error:
        return False


def end(processes: list[psutil.Process]) -> None:
    """By force: a raylet that is asked drains for ten seconds first."""
    for process in processes:
        if process.is_running():
            process.kill()
    assert still_there(processes, timeout_s=20) == []


def test_a_script_joins_the_cluster_of_ray_address_and_trains_across_its_nodes(cluster, tmp_path):
    script = start_script(tmp_path, 2, RAY_ADDRESS=cluster.address)
    said = script.communicate(timeout=200)[0]
    assert script.returncode == 0, said
    record = read_record(tmp_path / "script")
    assert (record["ray_address"], record["state"]) == (cluster.address, "finished")
    nodes = {member["who"]: member["node"] for member in record["members"]}
    assert nodes["rank 0"] == nodes["optimizer 0"] != nodes["rank 1"], "the optimizer is beside its rank"
    hosts = {member["host"] for member in record["members"]}
    assert {address.rpartition(":")[0] for address in record["routing"]["addresses"]} <= hosts, "not on loopback"


def test_sigterm_ends_the_run_and_not_the_cluster(cluster, tmp_path):
    script = start_script(tmp_path, 0, RAY_ADDRESS=cluster.address)
    said = until_it_trains(script)
    record = read_record(tmp_path / "script")
    members = [psutil.Process(member["pid"]) for member in record["members"]]
    script.terminate()
    said += script.communicate(timeout=200)[0]
    assert script.returncode == 128 + signal.SIGTERM, said
    assert still_there(members, timeout_s=20) == []
    assert not any(listens(address) for address in record["routing"]["addresses"])
    assert read_record(tmp_path / "script")["state"] == "stopped"
    raylets = [process for process in cluster.processes if process.name() in ("raylet", "gcs_server")]
    assert len(raylets) == 3
    assert all(process.is_running() for process in raylets)


def test_a_script_finds_its_cluster_under_ray_job_submit(cluster, tmp_path):
    said = submit(cluster, sys.executable, SCRIPT.name, str(tmp_path), "2")
    results = [json.loads(line) for line in said.splitlines() if line.startswith('{"result"')]
    assert results[0]["result"]["step"] == 1
    assert results[0]["transfers"]["push"] > 0
    assert read_record(tmp_path / "script")["ray_address"] == cluster.address


def submit(cluster: Cluster, *entrypoint: str) -> str:
    """What a job says that ran to a good end. A cluster that has just started refuses jobs until its agent is there."""
    options = ["--address", cluster.dashboard, "--working-dir", str(SCRIPT.parent)]
    for _ in range(15):
        done = run_ray("job", "submit", *options, "--", *entrypoint)
        if "No available agent" not in done.stderr:
            break
        time.sleep(1)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
