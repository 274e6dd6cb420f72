"""A Ray cluster on this machine, made as an operator makes it, and jobs that are submitted to it."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.leftovers import still_there

RAY = Path(sys.executable).with_name("ray")


@dataclass(frozen=True)
class Cluster:
    """Nodes of two CPUs on this machine, made with ``ray start``; all but the first are for optimizer actors."""

    address: str
    dashboard: str
    files: str
    processes: list[psutil.Process]

    def add_node(self) -> None:
        """One more, for optimizer actors."""
        ray_start(f"--address={self.address}", "--labels=rayzero.io/role=optimizer")
        new = [process for process in psutil.process_iter() if belongs_to(process, self.files)]
        self.processes.extend(process for process in new if process not in self.processes)


@contextmanager
def two_nodes() -> Iterator[Cluster]:
    """See ``one_node``."""
    with one_node() as cluster:
        cluster.add_node()
        yield cluster


@contextmanager
def one_node() -> Iterator[Cluster]:
    """Started on free ports, one of which Ray would take from other clusters; ended by process id, not ``ray stop``."""
    with tempfile.TemporaryDirectory(prefix="rz", dir="/tmp") as files:  # short: sockets have their path there
        dashboard = free_port()
        processes: list[psutil.Process] = []
        try:
            ray_start("--head", f"--port={free_port()}", f"--dashboard-port={dashboard}", f"--temp-dir={files}")
            address = (Path(files) / "ray_current_cluster").read_text().strip()
            processes += [process for process in psutil.process_iter() if belongs_to(process, files)]
            yield Cluster(address, f"http://127.0.0.1:{dashboard}", files, processes)
        finally:
            end(processes or [process for process in psutil.process_iter() if belongs_to(process, files)])


_PORTS = iter(random.SystemRandom().sample(range(20_000, 32_768), 100))
"""Above those that Ray gives its workers and below those that the kernel gives to who asks for any: nobody takes one
while Ray starts. Each once, and others for who tests on this machine too."""


def free_port() -> int:
    """One that nobody listens on."""
    for port in _PORTS:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("a hundred ports are taken")


def ray_start(*options: str) -> None:
    common = ["--num-cpus=2", "--object-store-memory=200000000", f"--dashboard-agent-listen-port={free_port()}"]
    done = run_ray("start", "--disable-usage-stats", *common, *options)
    assert done.returncode == 0, done.stdout + done.stderr


def run_ray(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"RAY_ADDRESS": "", "RAY_JOB_STOP_WAIT_TIME_S": "60"}  # a run may take 5 s to end, Ray 3
    return subprocess.run([str(RAY), *arguments], capture_output=True, text=True, timeout=280, env=environment)


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


def submit(
    cluster: Cluster, working_dir: Path, *entrypoint: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """``ray job submit``, to the job's end. A cluster that has just started refuses jobs until its agent is there."""
    where = ("--address", cluster.dashboard, "--working-dir", str(working_dir))
    for _ in range(15):
        done = run_ray("job", "submit", *where, *options, "--", *entrypoint)
        if "No available agent" not in done.stderr:
            break
        time.sleep(1)
    return done
