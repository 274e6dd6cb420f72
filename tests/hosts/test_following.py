"""A process on a host without Ray follows a run on another one, whose folder both see."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from followers.watcher import digest, noted
from safetensors.torch import load_file

from rayzero.convert.conversion import export_full
from tests.support.waiting import until

from .hosts import hosts, why_no_hosts
from .trainings import LONG_S, MODEL_BYTES, PYTHON, start_ray, train

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]


def test_a_host_outside_of_the_cluster_follows_a_run_on_one_node(tmp_path: Path) -> None:
    with hosts(2) as (a, b):
        address = start_ray(a, cpus=4)
        training = train(a, tmp_path, address, "run.network=10.77.0.0/24", "run.checkpoint_every=1")
        training.until(5)
        rank_0 = training.members(a)["rank 0"]
        a.kill(rank_0, signal.SIGSTOP)  # so that the run does not end before a process has imported torch
        watcher = [PYTHON, "-m", "followers.watcher", str(training.folder), str(tmp_path / "read"), "0"]
        path = {"PYTHONPATH": str(Path(__file__).parents[1]) + os.pathsep + os.environ.get("PYTHONPATH", "")}
        follower = b.start(watcher, env={"OMP_NUM_THREADS": "1"} | path)
        until(lambda: noted(tmp_path / "read"), LONG_S, "a version")
        a.kill(rank_0, signal.SIGCONT)
        training.end()
        said = follower.communicate(timeout=60)[0]
        assert follower.returncode == 0, said
        assert a.sent_to(b) > MODEL_BYTES
    read = noted(tmp_path / "read")
    compared = 0
    for step in read:  # a busy machine's follower skips versions, and training waits for none of them
        checkpoint = training.folder / "checkpoints" / f"step-{step:06d}"
        if checkpoint.exists():
            weights = load_file(export_full(checkpoint, tmp_path / f"export-{step}", dtype=torch.float32))
            assert read[step] == {digest(weights.items())}, step
            compared += 1
    assert compared > 1, said
