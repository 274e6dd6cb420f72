"""A run on Ray gets other optimizer actors while it trains, and ends with the bits of one that kept its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from rayzero.cluster.files.metrics_log import read_log
from rayzero.cluster.files.run_record import read_record
from rayzero.config import ZeroConfig
from rayzero.elastic.scaling import ScaleRequest, ask
from rayzero.engine import get_context
from tests.support import needs

from .compared_run import STEPS, losses, same, train

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),
    needs.shared_memory,
]


def await_outcomes(run_dir: Path, number: int) -> None:
    """Wait until the run's record says what came of so many requests."""
    deadline = time.monotonic() + 60
    while len(read_record(run_dir)["rescales"]) < number:
        assert time.monotonic() < deadline, "nothing came of a request"
        time.sleep(0.05)


def scaled(config: dict[int, int]) -> None:
    """Train, and ask for other optimizers on the way. ``config``: before a step, how many. The steps before that go on
    meanwhile; the loop is only kept from ending before they are there."""
    context = get_context()
    run_dir = Path(context.run_dir or "")
    wanted = sorted(config)

    def before(step: int) -> None:
        if context.rank == 0 and step in config:
            ask(run_dir, ScaleRequest(num_optimizers=config[step]))
        await_outcomes(run_dir, sum(step >= at + 3 for at in wanted))

    train(None, before)


@pytest.mark.promise("scalable", "jobs")
def test_optimizers_come_and_go_while_it_trains(trainer, nothing_left, tmp_path, undisturbed):
    """While half of the states stay on the ranks' devices. Those below have all of them on the host."""
    said: list[str] = []
    config = ZeroConfig(stall_timeout=60.0, shard_bytes="1KiB", offload_fraction=0.5)
    result = trainer(scaled, {2: 3, 12: 1}, on_phase=said.append, zero_config=config).fit()
    assert same(result.path, undisturbed)
    assert losses(result.path) == undisturbed.losses
    assert len(read_log(result.path)) == 2 * STEPS, "each row once"
    record = read_record(tmp_path / "demo")
    changes = [(one["before"], one["after"], one["failed"]) for one in record["rescales"]]
    assert changes == [(2, 3, None), (3, 1, None)]
    assert {member["who"] for member in record["members"]} == {"rank 0", "rank 1", "optimizer 0"}
    assert sum(line.startswith("the run has ") for line in said) == 2


class KillsInChange:
    """Kills a process when a change of the optimizers comes to a line that begins so."""

    def __init__(self, run_dir: Path, who: str, said: str) -> None:
        self._run_dir, self._who, self._said = run_dir, who, said

    def __call__(self, line: str) -> None:
        if self._said and line.startswith(self._said):
            self._said = ""
            members = read_record(self._run_dir)["members"]
            os.kill(next(member["pid"] for member in members if member["who"] == self._who), signal.SIGKILL)


@pytest.mark.thorough
def test_a_death_while_they_change_costs_nothing(trainer, nothing_left, tmp_path, undisturbed):
    kills = KillsInChange(tmp_path / "demo", "optimizer 0", "changing from")
    result = trainer(scaled, {2: 3, 20: 1}, on_phase=kills).fit()
    assert same(result.path, undisturbed)
    assert losses(result.path) == undisturbed.losses
    record = read_record(tmp_path / "demo")
    assert [(one["after"], one["failed"]) for one in record["rescales"]] == [(3, None), (1, None)]
    assert [one["who"] for one in record["recoveries"]] == ["optimizer 0"]
