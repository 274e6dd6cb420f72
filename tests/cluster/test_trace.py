"""``rayzero trace``: two ranks and two owners as one file on one clock, in which causes come before what they cause."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from telemetry.exposed import rank_settings
from telemetry.strange_servers import drip, served_by
from typer.testing import CliRunner

from rayzero.cli import app
from rayzero.cluster.files import tracing
from rayzero.cluster.files.tracing import trace_run
from rayzero.cluster.processes.process_exporter import ProcessExporter
from rayzero.cluster.run import Report
from rayzero.cluster.trainer import ZeroTrainer
from rayzero.config import RunConfig, ScalingConfig, TelemetryConfig, ZeroConfig
from rayzero.engine.context import get_context, report
from rayzero.errors import ConfigError, RunFailedError
from rayzero.telemetry.exporter import Exporter
from rayzero.telemetry.http import Page
from rayzero.telemetry.metric import Role
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.telemetry.scrape import Target, service_discovery

from .test_telemetry import get
from .tiny import tiny_steps

RANKS, OWNERS = ("rank 0", "rank 1"), ("optimizer 0", "optimizer 1")
UNITS = ("blocks.0", "blocks.1", "blocks.2", "root")  # the head is the root's: its forward is the whole one
KEPT = 6  # steps
REACHED = 5  # steps before the run is looked at


def train(config: Mapping[str, Any]) -> None:
    """Until it has been looked at, and then as many steps more as ranks may be apart."""
    looked, last = Path(config["looked"]), Path(config["looked"] + ".last")
    for step, _ in enumerate(tiny_steps(), start=1):
        report({"step": step})
        if looked.exists() and not last.exists() and get_context().rank == 0:
            Path(f"{last}.new").write_text(str(step + 3))
            os.replace(f"{last}.new", last)
        if last.exists() and step >= int(last.read_text()):
            return


@dataclass(frozen=True)
class Slice:
    """One span of the file; times in microseconds."""

    who: str
    lane: str
    name: str
    step: int
    start: float
    end: float


@dataclass
class Seen:
    """A run that was traced while it ran, and kept a trace too."""

    events: list[dict[str, Any]]  # of the file that it left
    said: str  # by the command, while it ran
    live: dict[str, Any]  # the file that the command wrote
    folder: Path


@pytest.fixture(scope="module")
def seen(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    storage = tmp_path_factory.mktemp("runs")
    said: list[str] = []

    def watch(one: Report) -> None:
        if one.metrics["step"] == REACHED and not said:
            options = ["trace", str(storage / "demo"), "--seconds", "1", "-o", str(storage / "live.json")]
            done = CliRunner().invoke(app, options, catch_exceptions=False)
            said.append(done.stdout)
            (storage / "looked").touch()

    result = ZeroTrainer(
        train,
        train_loop_config={"looked": str(storage / "looked")},
        zero_config=ZeroConfig(stall_timeout=60.0),
        scaling_config=ScalingConfig(
            threads_per_worker=1, threads_per_optimizer=1, cpus_per_worker=1, cpus_per_optimizer=1
        ),
        run_config=RunConfig(name="demo", storage_path=str(storage), telemetry=TelemetryConfig(trace_steps=KEPT)),
        on_report=watch,
    ).fit()
    trace = json.loads((result.path / "trace.json").read_text())
    return Seen(trace["traceEvents"], said[0], json.loads((storage / "live.json").read_text()), result.path)


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
    return slices_of(seen.events)


pytestmark = pytest.mark.timeout(300)


@pytest.mark.thorough
@pytest.mark.ray
def test_every_event_is_what_the_trace_event_format_asks_for(seen) -> None:
    for event in seen.events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
        else:
            assert event["ph"] == "M"
            known = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}
            assert event["name"] in known
            assert event["args"]


@pytest.mark.thorough
@pytest.mark.ray
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


@pytest.mark.thorough
@pytest.mark.ray
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


@pytest.mark.thorough
@pytest.mark.ray
def test_a_rank_is_in_one_phase_at_a_time(slices) -> None:
    for who in RANKS:
        phases = sorted((one for one in slices if (one.who, one.lane) == (who, "step")), key=lambda one: one.start)
        assert {"forward", "backward", "optimizer", "data"} <= {one.name for one in phases}
        for one, after in pairwise(phases):
            assert one.end == pytest.approx(after.start, abs=0.01), "one follows the other"


@pytest.mark.thorough
@pytest.mark.ray
def test_the_command_traces_a_run_that_is_going_on(seen) -> None:
    live = slices_of(seen.live["traceEvents"])
    assert {one.who for one in live} == {*RANKS, *OWNERS}
    assert {one.step for one in live if one.lane == "update"} >= set(range(1, REACHED))
    assert re.search(r"live.json: [\d,]+ spans of 4 processes, steps 0 to \d+; open it at", seen.said)
    assert seen.live["otherData"]["run"] == "demo"


@pytest.mark.thorough
@pytest.mark.ray
def test_a_run_that_is_over_is_refused_and_its_own_trace_named(seen) -> None:
    with pytest.raises(
        ConfigError, match=r"run 'demo' is not running any more \(finished\); its trace is in .*trace\.json"
    ):
        trace_run(seen.folder, 1.0)


# ---- without Ray ------------------------------------------------------------------------------------------------


def record_of(folder: Path, **other: Any) -> Path:
    record = {"run": "demo", "state": "finished", "started_at": 0.0, "driver": {"pid": os.getpid(), "host": "far"}}
    (folder / "run.json").write_text(json.dumps(record | other))
    return folder


def test_a_run_that_kept_no_trace_says_how_to_have_one(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"\(finished\) and kept no trace; trace a run while .* run.telemetry.trace_steps=10"
    ):
        trace_run(record_of(tmp_path), 1.0)


def test_a_run_without_telemetry_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"run 'demo' cannot be traced, because .*enabled=false"):
        trace_run(record_of(tmp_path, state="running", telemetry=None), 1.0)
    with pytest.raises(ConfigError, match="trace_steps needs enabled: true"):
        TelemetryConfig(enabled=False, trace_steps=1)


def test_a_run_that_does_not_answer_is_one_line(tmp_path) -> None:
    gone = {"http_sd": "http://127.0.0.1:9/sd", "targets": []}
    with pytest.raises(RunFailedError, match=r"run 'demo' does not answer at http://127.0.0.1:9/sd: .*refused"):
        trace_run(record_of(tmp_path, state="running", telemetry=gone), 1.0)


@pytest.mark.parametrize(
    ("said", "why"),
    [(b"[]", "lists no rank or owner at .* yet"), (b"[1]", "this is not service")],
)
def test_discovery_that_names_nobody_or_is_none_is_one_line(said, why, tmp_path) -> None:
    page = Page("application/json", lambda: said)
    with closing(Exporter(MemoryRecorder(), Role.COORDINATOR, host="127.0.0.1", pages={"/sd": page})) as exporter:
        told = {"http_sd": f"http://{exporter.address}/sd", "targets": []}
        with pytest.raises(RunFailedError, match=f"^run 'demo' .*{why}"):
            trace_run(record_of(tmp_path, state="running", telemetry=told), 1.0)


@pytest.mark.parametrize("dripping", ["the coordinator", "rank 0"])
def test_one_that_drips_bytes_is_left_behind_and_named(dripping, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tracing, "_ANSWER_S", 0.5)
    with served_by(drip) as slow:
        rank = Target(address=slow, run="demo", role=Role.RANK, node="n", index=0)
        page = Page("application/json", lambda: service_discovery([rank]))
        with closing(Exporter(MemoryRecorder(), Role.COORDINATOR, host="127.0.0.1", pages={"/sd": page})) as exporter:
            asked = slow if dripping == "the coordinator" else exporter.address
            record = record_of(tmp_path, state="running", telemetry={"http_sd": f"http://{asked}/sd", "targets": []})
            with pytest.raises(
                RunFailedError, match=f"^{dripping} of run 'demo' does not answer at http://{slow}/.*within 0.5 s"
            ):
                trace_run(record, 1.0)


def test_one_that_answers_something_else_is_named(tmp_path) -> None:
    pages = {"/trace": Page("application/json", lambda: b"[]")}
    with closing(Exporter(MemoryRecorder(), Role.RANK, host="127.0.0.1", pages=pages)) as rank:
        target = Target(address=rank.address, run="demo", role=Role.RANK, node="n", index=0)
        pages = {"/sd": Page("application/json", lambda: service_discovery([target]))}
        with closing(Exporter(MemoryRecorder(), Role.COORDINATOR, host="127.0.0.1", pages=pages)) as coordinator:
            told = {"http_sd": f"http://{coordinator.address}/sd", "targets": []}
            with pytest.raises(
                RunFailedError, match=r"^rank 0 of run 'demo' answers with no spans: it is \[\] but must be an "
            ):
                trace_run(record_of(tmp_path, state="running", telemetry=told), 1.0)


def test_spans_are_kept_from_the_first_time_that_somebody_asks(tmp_path) -> None:
    recorder = MemoryRecorder()
    with closing(ProcessExporter(rank_settings(tmp_path), recorder)) as exporter:
        recorder.spans.add("forward", "before", 0.0, 1.0, 0)
        assert json.loads(get(f"http://{exporter.target.address}/trace"))["spans"] == []
        assert recorder.spans.wanted
        recorder.spans.add("forward", "after", 0.0, 1.0, 0)
        assert [span.name for span in recorder.spans.recorded().spans] == ["after"]
