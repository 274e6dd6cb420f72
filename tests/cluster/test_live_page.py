"""The live page: its bytes, its JSON beside what exporters serve, and who may see it."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.cluster.files.metrics_log import METRICS, MetricsLog
from rayzero.cluster.processes import live_page
from rayzero.cluster.processes.coordinator import Coordinator
from rayzero.cluster.processes.live_page import (
    DATA_PATH,
    MOST_POINTS,
    PAGE_PATH,
    Curve,
    Curves,
    Known,
    LivePage,
    RunEvent,
)
from rayzero.cluster.processes.process_exporter import Exporter
from rayzero.cluster.run import Member, Report, RunState
from rayzero.security.metrics_access import MetricsAccess
from rayzero.telemetry import names
from rayzero.telemetry.metric import Role
from rayzero.telemetry.pages import Protection
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.telemetry.scrape import Target, Viewer
from tests.support.waiting import until

HOST = "127.0.0.1"
EVIL = "<img src=x onerror=alert(1)>"


@dataclass
class Process:
    """A rank or an owner that has an exporter and no training."""

    recorder: MemoryRecorder
    exporter: Exporter
    target: Target

    @classmethod
    def made(cls, role: Role, index: int) -> Process:
        recorder = MemoryRecorder()
        exporter = Exporter(recorder, role, host=HOST)
        return cls(recorder, exporter, Target(address=exporter.address, run="demo", role=role, node=HOST, index=index))

    def step(self, number: int) -> None:
        """Record what a rank or an owner records of a step."""
        told, index = self.recorder, self.target.index or 0
        if self.target.role is Role.RANK:
            told.set(names.STEP, number)
            told.set(names.TRAIN_LOSS, 2.0 + index)
            told.add(names.TOKENS, 512)
            told.observe(names.STEP_SECONDS, 0.5)
            told.add(names.EXPOSED_WAIT_SECONDS, 0.05 * (index + 1), cause="fetch")
            told.set(names.ETA_SECONDS, 95.0)
            for phase, took in (("forward", 0.15), ("backward", 0.25), ("fetch_wait", 0.05), ("optimizer", 0.05)):
                told.observe(names.STEP_PHASE_SECONDS, took, phase=phase)
            told.set(names.MEMORY_BYTES, 96 << 20, kind="param", tier="ram")
        else:
            told.observe(names.OPTIMIZER_UPDATE_SECONDS, 0.02)
            told.set(names.PARAM_VERSION, number)
            told.set(names.SHARDS, 4 - index)
            told.set(names.OPTIMIZER_QUEUE_DEPTH, 0)
            told.set(names.MEMORY_BYTES, 300 << 20, kind="master", tier="shm")
            told.set(names.MEMORY_BYTES, 600 << 20, kind="exp_avg", tier="shm")
            told.set(names.HOST_MEMORY_HEADROOM_BYTES, 15 << 30)
            told.set(names.HOST_MEMORY_LIMIT_BYTES, 24 << 30, source="ram")


def loss_at(step: int) -> float:
    return 1.4 + 4.2 * math.exp(-step / 60) + 0.1 * math.sin(step * 1.7) * math.exp(-step / 200)


def write_rows(run_dir: Path, steps: range) -> None:
    with (run_dir / METRICS).open("a") as file:
        for step in steps:
            row = {"step": step, "loss": loss_at(step), "grad_norm": 0.5 + math.cos(step) / 9, "lr": 1e-3 / (1 + step)}
            row |= {"tokens_per_second": 2048 + 90 * math.sin(step), "tokens": 1024 * step, EVIL: float(step % 7)}
            row["memory_bytes"] = float(588 << 20)
            row["validation_loss"] = loss_at(step) + 0.08 if step % 40 == 0 else None
            file.write(json.dumps(row) + "\n")


@dataclass
class Served:
    """A live page beside two ranks and two owners."""

    page: LivePage
    exporter: Exporter
    processes: list[Process]
    run_dir: Path
    events: list[RunEvent]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.exporter.address}{path}", timeout=20) as answer:
            body = answer.read()
        return json.loads(body) if path == DATA_PATH else (answer.headers, body)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(live_page, "_LEAST_S", 0.1)
    monkeypatch.setattr(live_page, "_ANSWER_S", 60.0)  # a busy machine answers late
    monkeypatch.setattr("rayzero.telemetry.http.REFRESH_S", 0.0)
    processes = [Process.made(role, index) for role in (Role.RANK, Role.OPTIMIZER) for index in (0, 1)]
    now = time.time()
    events = [
        RunEvent(now - 90, "the run is running"),
        RunEvent(now - 5, "rank 1 died and was replaced within 3.5 s", True),
    ]
    hosts = {f"{role} {index}": "192.0.2.7" for role in ("rank", "optimizer") for index in (0, 1)}
    targets = [process.target for process in processes]
    known = Known(
        run=f"demo {EVIL}", state=RunState.RUNNING, started_at=now - 95, hosts=hosts, targets=targets, events=events
    )
    page = LivePage(tmp_path, lambda: known, Viewer())
    exporter = Exporter(MemoryRecorder(), Role.COORDINATOR, host=HOST, pages=page.pages)
    yield Served(page, exporter, processes, tmp_path, events)
    page.close()
    exporter.close()
    for process in processes:
        process.exporter.close()


def advance(served: Served, steps: range) -> None:
    for step in steps:
        for process in served.processes:
            process.step(step)
    write_rows(served.run_dir, steps)


def test_what_opens_the_exporters_is_renewed_with_the_runs_certificates(tmp_path: Path) -> None:
    run, former = MetricsAccess("demo", None), MetricsAccess("demo", None)
    exporter = Exporter(MemoryRecorder(), Role.OPTIMIZER, host=HOST, protection=run.own)
    owner = Target(address=exporter.address, run="demo", role=Role.OPTIMIZER, node=HOST, index=0, scheme="https")
    known = Known(run="demo", state=RunState.RUNNING, started_at=0.0, hosts={}, targets=[owner])
    page = LivePage(tmp_path, lambda: known, former.viewer)

    def trouble() -> list[str]:
        page.refresh()
        told: list[str] = json.loads(page.pages[DATA_PATH].make())["trouble"]
        return told

    try:
        assert [line.partition(":")[0] for line in trouble()] == ["optimizer 0 does not answer"]
        page.renew(run.viewer)
        assert trouble() == []
    finally:
        page.close()
        exporter.close()


# ---- curves ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000))
def test_a_curve_has_few_points_the_first_and_the_newest(many: int) -> None:
    curve = Curve()
    for step in range(many):
        curve.add(step, 2.0 * step)
    points = curve.points
    assert len(points) <= MOST_POINTS + 1
    assert (points[0], points[-1]) == ((0, 0.0), (many - 1, 2.0 * (many - 1)))
    gaps = {b[0] - a[0] for a, b in itertools.pairwise(points)}
    assert len(gaps) <= 2, "at even distances, but for the newest"
    assert len(points) == many or len(points) >= MOST_POINTS / 2


def test_steps_that_come_again_replace_what_followed_and_text_has_no_curve() -> None:
    curves = Curves()
    for step in (1, 2, 3, 4, 2, 3):
        curves.add(step, {"loss": step, "note": "text"})
    assert curves.points() == {"loss": [(1, 1.0), (2, 2.0), (3, 3.0)]}


def test_there_is_room_for_the_loss_however_many_names_come_first() -> None:
    curves = Curves()
    curves.add(1, {f"name {number}": 1.0 for number in range(100)} | {"loss": 2.0})
    assert len(curves.points()) == 25
    assert curves.points()["loss"] == [(1, 2.0)]


# ---- what is served -------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_needs_nothing_else(served: Served) -> None:
    headers, html = served.get(PAGE_PATH)
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    text = html.decode()
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert re.findall(r"(?:src|href)=\"([^\"]+)\"", text) == ["data:,"]
    assert "innerHTML" not in text
    assert len(html) < 32_000


def test_the_json_has_what_exporters_and_rows_say(served: Served) -> None:
    advance(served, range(1, 4))
    served.page.refresh()
    advance(served, range(4, 9))
    served.page.refresh()
    told = served.get(DATA_PATH)
    assert (told["run"], told["state"]) == (f"demo {EVIL}", "running")
    now = told["now"]
    assert (now["step"], now["loss"], now["step_seconds"], now["eta_seconds"]) == (8, 2.5, 0.5, 95.0)
    assert now["tokens_per_second"] == pytest.approx(2 * 512 / 0.5)
    assert now["waiting"] == pytest.approx(0.2), "rank 1: 0.1 s of 0.5"
    assert [[step, pytest.approx(loss_at(step))] for step in range(1, 9)] == told["curves"]["loss"]
    assert {one["phase"]: one["share"] for one in told["phases"]} == {
        "forward": pytest.approx(0.3), "fetch_wait": pytest.approx(0.1), "backward": pytest.approx(0.5),
        "optimizer": pytest.approx(0.1),
    }  # fmt: skip
    mib = 1 << 20
    assert told["memory"] == {"shm": {"master": 600 * mib, "exp_avg": 1200 * mib}, "ram": {"param": 192 * mib}}
    assert told["bars"] == [{"what": f"{HOST} memory", "used": 9 << 30, "limit": 24 << 30}]
    assert [(rank["who"], rank["step"], rank["host"]) for rank in told["ranks"]] == [
        ("rank 0", 8, "192.0.2.7"),
        ("rank 1", 8, "192.0.2.7"),
    ]
    assert [(owner["who"], owner["version"], owner["shards"]) for owner in told["owners"]] == [
        ("optimizer 0", 8, 4),
        ("optimizer 1", 8, 3),
    ]
    assert told["followers"] is None
    assert [event["text"] for event in told["events"]] == [event.text for event in reversed(served.events)]
    assert told["trouble"] == []
    follow(served)
    served.page.refresh()
    assert served.get(DATA_PATH)["followers"] == {
        "count": 3, "version": 6, "newest": 8, "change_bytes": 3072, "whole_bytes": 0,
    }  # fmt: skip


def follow(served: Served) -> None:
    """What an owner records of followers."""
    told = served.processes[-1].recorder
    told.set(names.FOLLOWERS, 3)
    told.set(names.FOLLOWER_LAG, 2)
    told.add(names.FOLLOW_BYTES, 3072, form="changes")


def test_a_process_that_does_not_answer_is_named_and_inf_is_no_number(served: Served) -> None:
    advance(served, range(1, 2))
    served.processes[0].recorder.set(names.TRAIN_LOSS, math.inf)
    served.processes[1].exporter.close()
    served.page.refresh()
    told = served.get(DATA_PATH)
    assert told["now"]["loss"] is None
    assert len(told["trouble"]) == 1
    assert told["trouble"][0].startswith("rank 1 does not answer: ")


def test_nothing_is_scraped_unless_somebody_looks(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    monkeypatch.setattr(served.page, "refresh", lambda: made.append(time.monotonic()))
    served.get(PAGE_PATH)
    time.sleep(0.3)
    assert made == []
    monkeypatch.setattr(live_page, "_LOOKED_S", 0.3)
    assert served.get(DATA_PATH)["now"] is None, "the first answer does not wait for a scrape"
    until(lambda: served.get(DATA_PATH) and len(made) >= 2)

    def rests() -> bool:
        looks = len(made)
        time.sleep(0.5)
        return len(made) == looks

    until(rests, what="it goes on after the last look")


def test_who_may_not_read_metrics_sees_no_page(served: Served) -> None:
    pages = served.page.pages
    with closing(
        Exporter(MemoryRecorder(), Role.COORDINATOR, host=HOST, pages=pages, protection=Protection(token="secret"))
    ) as guarded:
        for path in (PAGE_PATH, DATA_PATH):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://{guarded.address}{path}", timeout=20)
            assert refused.value.code == 401
            refused.value.close()
            asked = urllib.request.Request(
                f"http://{guarded.address}{path}", headers={"Authorization": "Bearer secret"}
            )
            with urllib.request.urlopen(asked, timeout=20) as answer:
                assert answer.status == 200


def test_the_coordinator_tells_what_happened(tmp_path: Path) -> None:
    coordinator = Coordinator("demo", MetricsLog(tmp_path), 100.0)

    async def live() -> None:
        await coordinator.enlist([Member(who="rank 0", pid=1, node="n", host="192.0.2.1")], [])
        await coordinator.move(RunState.RUNNING)
        for rank in (0, 1):
            await coordinator.report([Report(rank=rank, checkpoint="/runs/demo/checkpoints/step-000004")], None)
        await coordinator.recovered("rank", "rank 1", {"start": 2.0, "re-form": 0.5})
        await coordinator.rescaled("done", {}, 0.25, 10)
        await coordinator.logged("wandb", 3, 0)
        await coordinator.logged("mlflow", 0, 1)
        await coordinator.move(RunState.FAILED)

    asyncio.run(live())
    known = coordinator._known
    assert (known.state, known.hosts) == ("failed", {"rank 0": "192.0.2.1"})
    assert [(event.text, event.bad) for event in known.events] == [
        ("the run is running", False),
        ("checkpoint step-000004", False),
        ("rank 1 died and was replaced within 2.5 s", True),
        ("the optimizer actors have changed; no step was decided for 0.25 s", False),
        ("mlflow refused 1 row", True),
        ("the run is failed", True),
    ]
    value = coordinator._recorder.total
    assert value(names.LOGGER_ROWS, logger="wandb", result="sent") == 3
    assert value(names.LOGGER_ROWS, logger="mlflow", result="lost") == 1
