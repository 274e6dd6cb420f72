"""Ray Train's workers have a door on their host, and on the next one if theirs is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rayzero.testing import run_ranks

from . import ray_train_fit
from .hosts import hosts, why_no_hosts
from .ray_train_fit import WORKERS
from .trainings import LONG_S, PYTHON, QUICKLY, RAY_ENV, join_ray, start_ray, until

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]


def test_workers_of_ray_train_have_a_door_that_is_replaced_and_another_one_where_they_are_started_again(
    tmp_path: Path,
) -> None:
    with hosts(3) as (a, b, c):
        address = start_ray(a, cpus=4, **QUICKLY)
        for host in (b, c):
            join_ray(host, address)
        driver = a.start([PYTHON, ray_train_fit.__file__, str(tmp_path)], env=RAY_ENV | {"RAY_ADDRESS": address})
        until(lambda: driver.poll() is not None or list(tmp_path.glob("host-*.json")), LONG_S, "no worker has a host")
        assert driver.poll() is None, driver.communicate()[0]
        [first] = tmp_path.glob("host-*.json")
        assert json.loads(first.read_text()) == [1]
        lost, left = (b, c) if first.stem == b.name else (c, b)
        lost.power_off()
        (tmp_path / "go").touch()
        said = driver.communicate(timeout=LONG_S)[0]
        assert driver.returncode == 0, said
        assert json.loads((tmp_path / f"{left.name}.json").read_text()) == [1]
        assert "optimizer 1 died" in said
        assert "the optimizer actors start with 1 more optimizer actor, without shards" in said
        for host in (a, left):
            assert "rayzero-" not in host.run(["ls", "/dev/shm"]).stdout
    ours, theirs = torch.load(tmp_path / "weights.pt"), run_ranks(ray_train_fit.train, WORKERS, 1, "shm", True)[0]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
