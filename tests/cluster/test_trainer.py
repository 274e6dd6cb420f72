"""``ZeroTrainer`` on a real local Ray: what reaches the driver, what is refused before anything starts."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from rayzero.cluster.driver import Result, ZeroTrainer
from rayzero.cluster.files.metrics_log import Row, read_log
from rayzero.cluster.files.run_record import read_record, run_status
from rayzero.cluster.run import Report
from rayzero.config import RunConfig, ScalingConfig
from rayzero.engine.context import get_context, report
from rayzero.errors import ConfigError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def count_to(config):
    ctx = get_context()
    for step in range(config["steps"]):
        report({"step": step, "rank": ctx.rank, "world_size": ctx.world_size, "pid": os.getpid()})


@dataclass(frozen=True)
class Watched:
    """One run that went well, and what was seen of it while it ran."""

    result: Result
    reports: list[Report]
    status: dict[str, Any]  # at the first report
    second: ConfigError  # what a second run of the same name met then
    rows: list[Row]  # of metrics.jsonl, while the driver had taken no more than the first report
    left: list[str]  # actors after it


def rows_of(run_dir: Path, enough: int) -> list[Row]:
    """The rows of metrics.jsonl once there are so many; this process, the driver, does nothing meanwhile."""
    deadline = time.monotonic() + 100
    while len(rows := read_log(run_dir)) < enough and time.monotonic() < deadline:
        time.sleep(0.1)
    return rows


@pytest.fixture(scope="module")
def watched(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A run of two ranks and two optimizers, of which several tests ask something."""
    storage = tmp_path_factory.mktemp("runs")
    reports: list[Report] = []
    looks: list[tuple[dict[str, Any], ConfigError, list[Row]]] = []

    def look(one: Report) -> None:
        reports.append(one)
        if not looks:
            with pytest.raises(ConfigError) as refused:
                ZeroTrainer(count_to, run_config=elsewhere, scaling_config=scaling).fit()
            looks.append((run_status(storage / "demo"), refused.value, rows_of(storage / "demo", 100)))

    run = RunConfig(name="demo", storage_path=str(storage))
    elsewhere = RunConfig(name="demo", storage_path=str(tmp_path_factory.mktemp("elsewhere")))
    scaling = ScalingConfig(threads_per_worker=1, threads_per_optimizer=1, cpus_per_worker=1, cpus_per_optimizer=1)
    trainer = ZeroTrainer(
        count_to, train_loop_config={"steps": 50}, run_config=run, scaling_config=scaling, on_report=look
    )
    result = trainer.fit()
    left = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return Watched(result, reports, *looks[0], left)


def test_every_report_of_every_rank_reaches_the_driver_in_order(watched):
    for rank in (0, 1):
        assert [r.metrics["step"] for r in watched.reports if r.rank == rank] == list(range(50))
    assert len({r.metrics["pid"] for r in watched.reports} | {os.getpid()}) == 3


def test_reports_are_rows_of_the_file_while_the_driver_is_busy(watched):
    """In each rank's order; what the loop calls step is kept, and the engine, which has no model here, did none."""
    for rank in (0, 1):
        rows = [row for row in watched.rows if row["rank"] == rank]
        assert [row["reported_step"] for row in rows] == list(range(50))
        assert [row["step"] for row in rows] == [0] * 50
        assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    assert read_log(watched.result.path) == watched.rows


def test_the_result_has_each_ranks_last_report(watched):
    assert watched.result.metrics["step"] == 49
    assert [metrics["rank"] for metrics in watched.result.metrics_per_rank] == [0, 1]
    assert watched.result.error is None
    assert watched.result.checkpoint is None


def test_a_ray_that_was_there_before_is_left_running_without_the_runs_actors(watched):
    assert ray.is_initialized()
    assert watched.left == []


@pytest.mark.promise("safe", "jobs")
def test_the_record_tells_what_became_of_the_run_and_no_token(watched):
    record = read_record(watched.result.path)
    assert record["state"] == "finished"
    assert [member["who"] for member in record["members"]] == ["optimizer 0", "optimizer 1", "rank 0", "rank 1"]
    assert record["config"]["scaling"]["num_workers"] == 2
    assert all(address.startswith("127.0.0.1:") for address in record["addresses"])
    assert "token" not in json.dumps(record)
    assert run_status(watched.result.path) == record


def test_the_status_of_a_run_that_goes_on_has_its_owners(watched):
    assert watched.status["state"] == "running"
    assert len(watched.status["addresses"]) == 2


def test_a_run_name_in_use_is_refused_and_the_first_run_goes_on(watched):
    assert "a run named 'demo' is already on this cluster" in str(watched.second)


@pytest.mark.promise("refused", "jobs")
@pytest.mark.parametrize(
    ("scaling", "missing"),
    [
        ({"use_gpu": True}, "the run needs 2 GPUs .* the cluster has 0; lower num_workers or set use_gpu=False"),
        ({"cpus_per_worker": 100.0}, r"the run needs .* CPUs \(2 ranks x 100 \+ .* the cluster has 8 CPUs; lower"),
    ],
)
def test_resources_that_are_not_there_are_named_at_once(trainer, nothing_left, scaling, missing, tmp_path):
    start = time.monotonic()
    with pytest.raises(ConfigError, match=missing):
        trainer(count_to, {"steps": 1}, scaling=scaling).fit()
    assert time.monotonic() - start < 30
    assert read_record(tmp_path / "demo") is None, "a run that never ran leaves no record"


@pytest.mark.thorough
def test_resources_that_others_use_are_named_after_the_placement_timeout(trainer, nothing_left):
    holder = ray.util.placement_group([{"CPU": 7}])
    assert holder.wait(30)
    try:
        scaling = {"cpus_per_worker": 1.0, "cpus_per_optimizer": 1.0, "placement_timeout": 1.0}
        with pytest.raises(ConfigError, match="found a place within 1 s: the run needs 4 CPUs and 0 GPUs in all"):
            trainer(count_to, {"steps": 1}, scaling=scaling).fit()
    finally:
        ray.util.remove_placement_group(holder)
