"""Who asks a run for other optimizers waits for its driver, and not for one that is gone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from clock import Clock

from rayzero.cluster.run import Rescaled
from rayzero.cluster.upkeep import rescaling as scale_module
from rayzero.cluster.upkeep.rescaling import scale
from rayzero.config import RunConfig, ZeroConfig
from rayzero.elastic.scaling import ScaleRequest, take
from rayzero.errors import RunFailedError

ELSEWHERE = {"pid": 4711, "host": "another-host"}  # whose processes nobody here sees


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that passes while ``scale`` sleeps."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(scale_module.time, "monotonic", clock)
    monkeypatch.setattr(scale_module.time, "sleep", sleep)
    return clock


def record(folder: Path, **entries: Any) -> None:
    config = {"zero": ZeroConfig().model_dump(mode="json"), "run": RunConfig(max_failures=1).model_dump(mode="json")}
    content = {"run": "demo", "state": "running", "started_at": 1.0, "driver": ELSEWHERE, "config": config} | entries
    (folder / "run.json").write_text(json.dumps(content))


def test_a_driver_that_takes_no_request_is_named_and_finds_none_later(tmp_path: Path, clock: Clock) -> None:
    record(tmp_path)
    with pytest.raises(RunFailedError, match=r"'demo', pid 4711 on another-host, has not taken .* within 120 s: see"):
        scale(tmp_path, 3)
    assert take(tmp_path) == []
    assert clock.now == pytest.approx(100.0 + 120.0, abs=1.0)


def test_a_run_that_starts_is_waited_for(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, state="starting")
    looks = iter(range(10_000))

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if next(looks) == 5_000:
            record(tmp_path)

    monkeypatch.setattr(scale_module.time, "sleep", sleep)
    with pytest.raises(RunFailedError, match="has not taken"):
        scale(tmp_path, 3)
    assert clock.now == pytest.approx(100.0 + 1_000.0 + 120.0, abs=1.0)


def test_a_request_that_was_taken_is_waited_for_as_long_as_it_takes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path)
    taken: list[ScaleRequest] = []

    def sleep(seconds: float) -> None:
        clock.now += seconds
        taken.extend(take(tmp_path))
        if clock.now > 1_000.0:
            record(tmp_path, rescales=[asdict(Rescaled(id=taken[0].id, why="asked", before=2, after=3, failed=None))])

    monkeypatch.setattr(scale_module.time, "sleep", sleep)
    found = scale(tmp_path, 3)
    assert found is not None
    assert (found.before, found.after) == (2, 3)
