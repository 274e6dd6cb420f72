"""A real run of two ranks and two owners as Prometheus sees it: found by discovery, scraped while it trains; and its
trace, in which causes come before what they cause."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from telemetry.exposed import Series, get, series_of
from typer.testing import CliRunner

from rayzero.cli import app
from rayzero.cluster.driver import Result, ZeroTrainer
from rayzero.cluster.files.run_record import run_status
from rayzero.cluster.files.tracing import trace_run
from rayzero.cluster.run import Report
from rayzero.config import RunConfig, ScalingConfig, TelemetryConfig, ZeroConfig
from rayzero.engine.context import get_context, report
from rayzero.errors import ConfigError
from rayzero.telemetry import names
from rayzero.telemetry.metric import Kind, Metric, Role

from .tiny import tiny_steps

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STEPS = 30
KEPT = 6  # of which a trace is left
RANKS, OWNERS = ("rank 0", "rank 1"), ("optimizer 0", "optimizer 1")
UNITS = ("blocks.0", "blocks.1", "blocks.2", "root")  # the head is the root's: its forward is the whole one
ONE_EACH = {"threads_per_worker": 1, "threads_per_optimizer": 1, "cpus_per_worker": 1, "cpus_per_optimizer": 1}


def train(config: Mapping[str, Any]) -> None:
    """Tell what only the loop knows; wait for a look at the last step, so that what is looked at is known."""
    recorder = get_context().recorder
    for step, (loss, _, _) in enumerate(tiny_steps(), start=1):
        recorder.set(names.TRAIN_LOSS, loss)
        recorder.set(names.ETA_SECONDS, 0.0)
        recorder.add(names.TOKENS, 8)
        recorder.add(names.SAMPLES, 8)
        report({"step": step, "loss": loss})
        if step == config["steps"]:
            for _ in iter(lambda: Path(config["looked"]).exists(), True):
                pass
            return


@dataclass
class Seen:
    """What was seen of a run from outside."""

    discovered: list[dict[str, Any]]
    announced: list[Path]
    series: dict[str, Series]  # by process
    status: dict[str, Any]
    live: dict[str, Any]  # what the live page shows
    said: str  # by ``rayzero trace``
    traced: dict[str, Any]  # the file that it wrote
    storage: Path
    result: Result = field(init=False)


def look(storage: Path) -> Seen:
    record = run_status(storage / "demo")
    discovered = json.loads(get(record["telemetry"]["http_sd"]))
    coordinator = f"http://{discovered[0]['targets'][0]}/metrics"
    deadline = time.monotonic() + 60
    while names.SHARD_IMBALANCE.name not in get(coordinator) and time.monotonic() < deadline:
        time.sleep(0.1)  # owners tell of their work every two seconds
    series = {}
    for group in discovered:
        labels = group["labels"]
        who = " ".join(labels[name] for name in ("role", "rank", "actor") if name in labels)
        series[who] = series_of(get(f"http://{group['targets'][0]}/metrics"))
    live = live_page(record["telemetry"]["page"])
    announced = list((storage / ".targets").glob("*.json"))
    options = ["trace", str(storage / "demo"), "--seconds", "1", "-o", str(storage / "live.json")]
    done = CliRunner().invoke(app, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    traced = json.loads((storage / "live.json").read_text())
    return Seen(discovered, announced, series, record, live, done.stdout, traced, storage)


def live_page(url: str) -> dict[str, Any]:
    """What the page at ``url`` shows once the run's processes have been scraped."""
    assert "<!doctype html>" in get(url)
    deadline = time.monotonic() + 60
    while (told := json.loads(get(f"{url}live.json")))["now"] is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return told


@pytest.fixture(scope="module")
def seen(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Looked at when every rank has done its last step."""
    storage = tmp_path_factory.mktemp("runs")
    looks: list[Seen] = []
    done: set[int] = set()

    def watch(one: Report) -> None:
        done.update({one.rank} if one.metrics["step"] == STEPS else ())
        if len(done) == 2 and not looks:
            looks.append(look(storage))
            (storage / "looked").touch()

    trainer = ZeroTrainer(
        train,
        train_loop_config={"steps": STEPS, "looked": str(storage / "looked")},
        zero_config=ZeroConfig(stall_timeout=60.0, max_grad_norm=0.05),
        scaling_config=ScalingConfig(**ONE_EACH),
        run_config=RunConfig(
            name="demo", storage_path=str(storage), telemetry=TelemetryConfig(norms_every=10, trace_steps=KEPT)
        ),
        on_report=watch,
    )
    result = trainer.fit()
    looks[0].result = result
    return looks[0]


def test_discovery_tells_of_every_process_with_its_labels(seen) -> None:
    labels = [group["labels"] for group in seen.discovered]
    node = labels[0]["node"]
    assert labels == [
        {"run": "demo", "role": "coordinator", "node": node},
        {"run": "demo", "role": "optimizer", "node": node, "actor": "0"},
        {"run": "demo", "role": "optimizer", "node": node, "actor": "1"},
        {"run": "demo", "role": "rank", "node": node, "rank": "0"},
        {"run": "demo", "role": "rank", "node": node, "rank": "1"},
    ]
    assert {name for each in labels for name in each} == set(names.TARGET_LABELS)
    assert all(group["targets"][0].startswith("127.0.0.1:") for group in seen.discovered)


def test_the_live_page_shows_the_run(seen) -> None:
    live = seen.live
    assert (live["run"], live["state"], live["now"]["step"], live["trouble"]) == ("demo", "running", STEPS, [])
    assert [step for step, _ in live["curves"]["loss"]] == list(range(1, STEPS + 1))
    assert [rank["who"] for rank in live["ranks"]] == ["rank 0", "rank 1"]
    assert [owner["version"] for owner in live["owners"]] == [STEPS, STEPS]
    assert live["memory"]["shm"]["master"] > 0
    assert live["events"][-1]["text"] == "the run is running"
    hosts = {member["who"]: member["host"] for member in seen.status["members"]}
    assert {row["who"]: row["host"] for row in live["ranks"] + live["owners"]} == hosts


def test_a_prometheus_that_was_configured_once_finds_the_run_while_it_lasts(seen) -> None:
    assert [path.name.startswith("demo.") for path in seen.announced] == [True]
    assert list((seen.storage / ".targets").iterdir()) == []


def test_every_exporter_is_gone_after_the_run(seen) -> None:
    for group in seen.discovered:
        with pytest.raises(OSError, match="refused"):
            get(f"http://{group['targets'][0]}/metrics")


def test_the_coordinator_has_heard_of_everyone(seen) -> None:
    series = seen.series["coordinator"]
    for kind in ("rank", "optimizer"):
        assert series["rayzero_actors", (("kind", kind), ("state", "ready"))] == 2
        assert series["rayzero_actors", (("kind", kind), ("state", "late"))] == 0
    ages = {labels for name, labels in series if name == "rayzero_heartbeat_age_seconds"}
    assert len(ages) == 4


# What optimizers count of other hosts (tests/store/test_mirrors.py, tests/plan/test_host_settings.py): here are lines.
BETWEEN_HOSTS = (names.TRANSFER_BYTES, names.TRANSFER_RAW_BYTES, names.GRPC_REQUESTS, names.GRPC_REQUEST_SECONDS)


@pytest.mark.promise("observable", "jobs")
@pytest.mark.parametrize("metric", [m for m in names.METRICS if not m.only], ids=lambda metric: metric.name)
def test_every_metric_is_fed_by_the_processes_it_names_and_by_no_other(seen, metric) -> None:
    suffix = "_count" if metric.kind is Kind.HISTOGRAM else ""
    found: dict[str, list[set[str]]] = {}
    for who, series in seen.series.items():
        role = who.partition(" ")[0]
        found.setdefault(role, []).extend({k for k, _ in key[1]} for key in series if key[0] == metric.name + suffix)
    expected = set(metric.roles) - ({Role.OPTIMIZER} if metric in BETWEEN_HOSTS else set())
    assert {Role(role) for role, labels in found.items() if labels} == expected
    assert all(labels == set(metric.labels) for of_role in found.values() for labels in of_role)


def value(seen: Seen, who: str, metric: Metric, **labels: str) -> float:
    return seen.series[who][metric.name, tuple(sorted(labels.items()))]


def test_every_rank_has_counted_its_steps_and_phases_add_up_to_them(seen) -> None:
    for who in ("rank 0", "rank 1"):
        series = seen.series[who]
        assert value(seen, who, names.STEP) == STEPS
        assert series["rayzero_step_seconds_count", ()] == STEPS
        phases = [v for (name, _), v in series.items() if name == "rayzero_step_phase_seconds_sum"]
        assert len(phases) == 8
        assert sum(phases) == pytest.approx(series["rayzero_step_seconds_sum", ()], rel=1e-3)
        assert value(seen, who, names.LEARNING_RATE, param_group="0") == 1e-2


def test_the_lead_alone_tells_of_decisions_and_each_owner_of_its_part(seen) -> None:
    assert 0 < value(seen, "optimizer 0", names.CLIPPED_STEPS) <= STEPS
    assert value(seen, "optimizer 0", names.SKIPPED_STEPS, reason="nonfinite") == 0
    assert (names.GRAD_NORM.name, ()) not in seen.series["optimizer 1"]
    assert 0 < value(seen, "optimizer 0", names.CLIP_FACTOR) <= 1
    owners = ("optimizer 0", "optimizer 1")
    trained = sum(numel for numel in (3 * (1600 + 40), 120 + 3))
    assert sum(value(seen, who, names.OPTIMIZER_PARAMS) for who in owners) == STEPS * trained
    assert {value(seen, who, names.PARAM_VERSION) for who in owners} == {STEPS}


def test_group_norms_of_the_owners_add_up_to_the_models(seen) -> None:
    """Measured in the last decided step that is a multiple of norms_every."""
    squares: dict[str, float] = {}
    for who in ("optimizer 0", "optimizer 1"):
        for (name, labels), norm in seen.series[who].items():
            if name.startswith("rayzero_group_"):
                squares[f"{name} {dict(labels)['group']}"] = (
                    squares.get(f"{name} {dict(labels)['group']}", 0.0) + norm**2
                )
    groups = {key.split()[1] for key in squares}
    assert len(groups) == 4
    assert len(squares) == 12
    assert all(square > 0 for square in squares.values())


# ---- its trace: two ranks and two owners on one clock


@dataclass(frozen=True)
class Slice:
    """One span of the file; times in microseconds."""

    who: str
    lane: str
    name: str
    step: int
    start: float
    end: float


def slices_of(events: list[dict[str, Any]]) -> list[Slice]:
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    return [
        Slice(
            who=names["process_name", e["pid"], 0],
            lane=re.sub(r" \d+$", "", names["thread_name", e["pid"], e["tid"]]),
            name=e["name"],
            step=e["args"]["step"],
            start=e["ts"],
            end=e["ts"] + e["dur"],
        )
        for e in events
        if e["ph"] == "X"
    ]


@pytest.fixture(scope="module")
def slices(seen: Seen) -> list[Slice]:
    return slices_of(json.loads((seen.result.path / "trace.json").read_text())["traceEvents"])


def test_every_process_has_its_lanes_and_every_kept_step_is_in_them(slices) -> None:
    steps = {one.step for one in slices if one.lane == "forward"}
    assert len(steps) == KEPT
    assert max(steps) - min(steps) == KEPT - 1
    lanes = dict.fromkeys(RANKS, ("step", "forward", "backward", "fetch", "push"))
    lanes |= dict.fromkeys(OWNERS, ("decide", "norm", "update", "publish"))
    for who, its in lanes.items():
        for lane in its:
            found = {one.step for one in slices if (one.who, one.lane) == (who, lane)}
            assert steps <= found, (who, lane)
    for who in RANKS:
        for lane in ("forward", "backward", "fetch", "push"):
            found = sorted(one.name for one in slices if (one.who, one.lane, one.step) == (who, lane, max(steps)))
            assert found == sorted(UNITS), (who, lane)
    assert {one.who for one in slices} == {*RANKS, *OWNERS}


def found(slices: list[Slice], lane: str, step: int, *, who: str | None = None, unit: str | None = None) -> list[Slice]:
    return [
        one
        for one in slices
        if (one.lane, one.step) == (lane, step)
        and who in (None, one.who)
        and (unit is None or one.name.split()[0] == unit)
    ]


def test_causes_come_before_what_they_cause_across_processes(slices) -> None:
    """Both directions between ranks and owners: clocks that were apart would break one of them."""
    steps = sorted({one.step for one in slices if one.lane == "forward"})
    for step in steps:
        last_push = max(one.end for one in found(slices, "push", step))
        for unit in UNITS:
            updates = found(slices, "update", step, unit=unit)
            assert updates
            for who in RANKS:
                (fetch,) = found(slices, "fetch", step, who=who, unit=unit)
                (forward,) = found(slices, "forward", step, who=who, unit=unit)
                (backward,) = found(slices, "backward", step, who=who, unit=unit)
                (push,) = found(slices, "push", step, who=who, unit=unit)
                assert fetch.start <= fetch.end <= forward.start <= forward.end
                assert forward.end <= backward.end <= push.start <= push.end
                for update in updates:
                    assert last_push <= update.start <= update.end
                for following in found(slices, "forward", step + 1, who=who, unit=unit):
                    assert max(update.end for update in updates) <= following.start
                    assert min(p.start for p in found(slices, "publish", step)) <= following.start
        for who in OWNERS:
            (decide,) = found(slices, "decide", step, who=who)
            assert last_push <= decide.end <= min(one.start for one in found(slices, "update", step, who=who))


def test_a_rank_is_in_one_phase_at_a_time(slices) -> None:
    for who in RANKS:
        phases = sorted((one for one in slices if (one.who, one.lane) == (who, "step")), key=lambda one: one.start)
        assert {"forward", "backward", "optimizer", "data"} <= {one.name for one in phases}
        for one, after in pairwise(phases):
            assert one.end == pytest.approx(after.start, abs=0.01), "one follows the other"


def test_the_command_traces_a_run_that_is_going_on(seen) -> None:
    live = slices_of(seen.traced["traceEvents"])
    assert {one.who for one in live} == {*RANKS, *OWNERS}
    assert {one.step for one in live if one.lane == "update"} >= set(range(1, STEPS - 1))
    assert re.search(r"live.json: [\d,]+ spans of 4 processes, steps 0 to \d+; open it at", seen.said)
    assert seen.traced["otherData"]["run"] == "demo"


def test_a_run_that_is_over_is_refused_and_its_own_trace_named(seen) -> None:
    with pytest.raises(
        ConfigError, match=r"run 'demo' is not running any more \(finished\); its trace is in .*trace\.json"
    ):
        trace_run(seen.result.path, 1.0)


# ---- other runs


@pytest.mark.thorough
def test_without_telemetry_no_port_is_opened_and_nothing_written(trainer, nothing_left, tmp_path) -> None:
    (tmp_path / "looked").touch()
    off = {"telemetry": TelemetryConfig(enabled=False)}
    result = trainer(train, {"steps": 2, "looked": str(tmp_path / "looked")}, run=off).fit()
    assert json.loads((result.path / "run.json").read_text())["telemetry"] is None
    assert not (tmp_path / ".targets").exists()
