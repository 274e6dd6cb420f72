"""Ray on hosts, and ``rayzero train`` over it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rayzero.cli.train import choose_recipe
from rayzero.cluster.files.metrics_log import read_log
from rayzero.cluster.files.run_record import read_record
from rayzero.engine.context import RankContext
from rayzero.recipes.lm import train_loop
from rayzero.testing import run_ranks
from tests.support.waiting import until

from .hosts import Host, hosts

PYTHON, RAY = sys.executable, str(Path(sys.executable).with_name("ray"))
RAY_ENV = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": ""}
VERSE = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs.\n"
STEPS = 60
ENDLESS = 1_000_000  # steps of a run that the test ends, on a machine of any speed
MODEL = ["dim=64", "num_layers=2", "num_heads=2", "seq_len=32", "batch_size=4", "eval_every=1000"]
MODEL_BYTES = 4 * 132_352  # fp32, as it travels
THREADS = ["scaling.threads_per_worker=1", "scaling.threads_per_optimizer=1"]
GIB = 1 << 30
LONG_S = 240.0  # only so that a test says what it waits for, before its own timeout ends it


QUICKLY = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000"}
QUICKLY |= {"RAY_health_check_failure_threshold": "3"}
"""An environment in which Ray gives up a host within seconds."""


def start_ray(head: Host, *, cpus: int = 2, **env: str) -> str:
    """Start a cluster whose first node is on this host, with an environment of its own; returns its address."""
    options = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={head.own}/ray"]
    _ray_start(head, *options, cpus=cpus, gib=8, env=env)
    return f"{head.address}:6379"


def join_ray(host: Host, address: str) -> None:
    """Add a node, which has too little memory for the ranks of ``RANKS_ON_HEAD``."""
    _ray_start(host, f"--address={address}", cpus=2, gib=2, env={})


@contextmanager
def two_hosts_with_ray(**env: str) -> Iterator[TwoHosts]:
    """Two hosts of a test's own, with a cluster."""
    with hosts(2) as (a, b):
        address = start_ray(a, **env)
        join_ray(b, address)
        yield TwoHosts(a, b, address)


def _ray_start(host: Host, *options: str, cpus: int, gib: int, env: Mapping[str, str]) -> None:
    room = [f"--num-cpus={cpus}", f"--memory={gib * GIB}", "--object-store-memory=100000000"]
    labels = f"--labels=rayzero.io/role=optimizer,host={host.name}"
    command = [RAY, "start", f"--node-ip-address={host.address}", labels, *room, *options]
    done = host.run(command, timeout=LONG_S, env=RAY_ENV | dict(env))
    assert done.returncode == 0, done.stdout + done.stderr


RANKS_ON_HEAD = [f"scaling.memory_per_worker={3 * GIB}", "zero.placement=cpu_nodes"]
"""Settings of a run whose ranks are on the head's host, while its owners are spread over all hosts."""

OWNERS_ELSEWHERE = [*RANKS_ON_HEAD, "scaling.optimizer_labels={host: host-2}"]
"""The same with all owners on the second host. Without either, each of two hosts has a rank and an owner."""


@dataclass(frozen=True)
class TwoHosts:
    """A cluster of two hosts, the first of which has its head."""

    a: Host
    b: Host
    address: str


@dataclass(frozen=True)
class Training:
    """A run of two ranks and two owners."""

    driver: subprocess.Popen[str]
    folder: Path

    def done(self) -> int:
        """How many steps it has reported."""
        return max((int(row["step"]) for row in read_log(self.folder)), default=0) if self.folder.exists() else 0

    def until(self, steps: int) -> None:
        """Wait until it has reported so many steps."""
        until(lambda: self.done() >= steps or self.driver.poll() is not None, LONG_S, f"step {steps}")
        assert self.driver.poll() is None, self.driver.communicate()[0]

    def until_it_says(self, what: str) -> str:
        """Wait for a line that has this in it; returns what it said until then."""
        said = ""
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            said += line
            if what in line:
                return said
        raise AssertionError(f"it has ended without a word of {what!r}:\n{said}")

    def end(self, said: str = "") -> str:
        """Wait for its good end; returns what it said, which began with ``said``."""
        assert self.driver.stdout is not None
        said += self.driver.stdout.read()
        assert self.driver.wait(LONG_S) == 0, said
        return said

    def record(self) -> dict[str, Any]:
        record = read_record(self.folder)
        assert record is not None
        return record

    def members(self, host: Host) -> dict[str, int]:
        """The pids of its members on this host, as the host knows them."""
        return {one["who"]: one["pid"] for one in self.record()["members"] if one["host"] == host.address}

    def digest(self) -> str:
        """Of its last checkpoint's content."""
        return digest_of(self.folder)


def digest_of(run_dir: Path) -> str:
    """Of the content of a training's last checkpoint."""
    manifest = run_dir / "checkpoints" / f"step-{STEPS:06d}" / "manifest.json"
    return str(json.loads(manifest.read_text())["digest"])


def settings_of(folder: Path) -> list[str]:
    """A recipe's settings, whose text is in ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(VERSE * 300)
    return [f"data={folder}/text.txt", *MODEL, *THREADS]


def train_without_ray(folder: Path) -> Path:
    """The same training on this host, in processes that are forked; returns the folder of the run."""
    recipe = choose_recipe(settings_of(folder), {"steps": STEPS}, folder / "run")
    loop = partial(_train_in_process, recipe.model_dump(mode="json"))
    run_ranks(loop, 2, 2, "shm", True, run_dir=folder / "run")
    return folder / "run"


def _train_in_process(recipe: dict[str, Any], context: RankContext) -> None:
    torch.set_num_threads(1)
    train_loop(recipe)


def train(host: Host, folder: Path, address: str, *settings: str, steps: int = STEPS) -> Training:
    """Start ``rayzero train`` on a host, with files in ``folder``."""
    counts = ["--steps", str(steps), "--workers", "2", "--optimizers", "2", "--run-dir", str(folder / "run")]
    command = [PYTHON, "-m", "rayzero", "train", *counts, *settings_of(folder), *settings]
    training = Training(host.start(command, env=RAY_ENV | {"RAY_ADDRESS": address}), folder / "run")
    _STARTED.append((host, training))
    return training


_STARTED: list[tuple[Host, Training]] = []


def end_trainings() -> None:
    """End what a failed test has left running: the next run on the cluster has the same name."""
    while _STARTED:
        host, training = _STARTED.pop()
        if training.driver.poll() is None:
            host.kill(training.record()["driver"]["pid"], signal.SIGTERM)
            training.driver.communicate(timeout=LONG_S)


def shut(a: Host, b: Host) -> None:
    """Put a firewall before ``b``, which lets Ray's connections through: Ray has its ports already. Who connects from
    ``a`` to a process of a run gets no answer. Other hosts have other ports, and notice nothing."""
    ports_of_a, ports_of_b = range(20_000, 21_000), range(21_000, 22_000)
    a.give_ports(ports_of_a)
    b.give_ports(ports_of_b)
    b.drop_answers(ports_of_b, ports_of_a)
