"""What ``rayzero trace`` says of runs that it cannot trace. One that it can: test_telemetry.py."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from telemetry.exposed import get, rank_settings
from telemetry.strange_servers import drip, served_by

from rayzero.cluster.files import tracing
from rayzero.cluster.files.tracing import trace_run
from rayzero.cluster.processes.process_exporter import Exporter, ProcessExporter
from rayzero.config import TelemetryConfig
from rayzero.errors import ConfigError, RunFailedError
from rayzero.telemetry.metric import Role
from rayzero.telemetry.pages import Page
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.telemetry.scrape import Target, service_discovery


def record_of(folder: Path, **other: Any) -> Path:
    record = {"run": "demo", "state": "finished", "started_at": 0.0, "driver": {"pid": os.getpid(), "host": "far"}}
    (folder / "run.json").write_text(json.dumps(record | other))
    return folder


@pytest.mark.parametrize(
    ("record", "error", "said"),
    [
        ({}, ConfigError, r"\(finished\) and kept no trace; trace a run while .* run.telemetry.trace_steps=10"),
        ({"state": "running"}, ConfigError, r"run 'demo' cannot be traced, because .*enabled=false"),
        (
            {"state": "running", "telemetry": {"http_sd": "http://127.0.0.1:9/sd", "targets": []}},
            RunFailedError,
            r"run 'demo' does not answer at http://127.0.0.1:9/sd: .*refused",
        ),
    ],
    ids=["ended", "without telemetry", "gone"],
)
def test_a_run_that_cannot_be_traced_says_why(record, error, said, tmp_path) -> None:
    with pytest.raises(error, match=said):
        trace_run(record_of(tmp_path, **{"telemetry": None} | record), 1.0)


def test_a_trace_needs_telemetry() -> None:
    with pytest.raises(ConfigError, match="trace_steps needs enabled: true"):
        TelemetryConfig(enabled=False, trace_steps=1)


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
    monkeypatch.setattr(tracing, "_ANSWER_S", 3.0)  # a busy machine answers late, too
    with served_by(drip) as slow:
        rank = Target(address=slow, run="demo", role=Role.RANK, node="n", index=0)
        page = Page("application/json", lambda: service_discovery([rank]))
        with closing(Exporter(MemoryRecorder(), Role.COORDINATOR, host="127.0.0.1", pages={"/sd": page})) as exporter:
            asked = slow if dripping == "the coordinator" else exporter.address
            record = record_of(tmp_path, state="running", telemetry={"http_sd": f"http://{asked}/sd", "targets": []})
            with pytest.raises(
                RunFailedError, match=f"^{dripping} of run 'demo' does not answer at http://{slow}/.*within 3 s"
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
