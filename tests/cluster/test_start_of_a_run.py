"""What a run leaves and says while it starts, and when that ends early; without Ray."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from rayzero.cluster import driver as driver_module
from rayzero.cluster.driver import ZeroTrainer, phase_lines
from rayzero.cluster.files.run_record import RECORD, read_record, run_status
from rayzero.cluster.files.tracing import trace_run
from rayzero.cluster.processes.rank_worker import PackedLoop, pack_loop, unpack_loop
from rayzero.cluster.status import RunRequest, RunStatus
from rayzero.config import RunConfig, ZeroConfig
from rayzero.errors import CheckpointError, ConfigError, RunFailedError, UnsupportedError

Drive = Callable[[RunRequest, RunStatus], None]


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Drive], None]:
    """``fit(drive)``: a run in ``tmp_path/r`` whose driver does what the test says."""

    def run(drive: Drive) -> None:
        monkeypatch.setattr(driver_module, "drive", drive)
        ZeroTrainer(lambda: None, run_config=RunConfig(name="r", storage_path=str(tmp_path))).fit()

    return run


def test_a_run_that_starts_has_a_record_that_says_so(fit, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def look(request: RunRequest, status: RunStatus) -> None:
        seen.append(run_status(tmp_path / "r"))
        with pytest.raises(ConfigError, match="run 'r' is still starting"):
            trace_run(tmp_path / "r", 1.0)

    fit(look)
    assert [(record["state"], record["ended_at"], record["members"]) for record in seen] == [("starting", None, [])]
    assert read_record(tmp_path / "r")["state"] == "finished"


@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_stop_while_a_run_starts_leaves_a_record_of_a_stopped_run(fit, tmp_path: Path, number, raised) -> None:
    with pytest.raises(raised):
        fit(lambda request, status: os.kill(os.getpid(), number))
    record = run_status(tmp_path / "r")
    assert record["state"] == "stopped"
    assert record["ended_at"] >= record["started_at"]


def test_a_run_that_could_not_start_leaves_a_record_of_a_failed_run(fit, tmp_path: Path) -> None:
    def fail(request: RunRequest, status: RunStatus) -> None:
        raise RunFailedError("cannot join Ray")

    with pytest.raises(RunFailedError):
        fit(fail)
    record = run_status(tmp_path / "r")
    assert (record["state"], record["error"]) == ("failed", "cannot join Ray")


def test_a_run_that_is_refused_leaves_the_record_that_was_there(fit, tmp_path: Path) -> None:
    def refuse(request: RunRequest, status: RunStatus) -> None:
        raise ConfigError("no place")

    with pytest.raises(ConfigError):
        fit(refuse)
    assert read_record(tmp_path / "r") is None
    fit(lambda request, status: None)
    before = (tmp_path / "r" / RECORD).read_bytes()
    with pytest.raises(ConfigError):
        fit(refuse)
    assert (tmp_path / "r" / RECORD).read_bytes() == before


def test_phases_are_lines_on_stderr_with_the_seconds_since_the_start(fit, capsys, monkeypatch) -> None:
    now = iter((100.0, 100.0, 112.34))
    monkeypatch.setattr("rayzero.cluster.driver.monotonic", lambda: next(now))
    phases = phase_lines()
    phases("starting Ray on this machine")
    phases("starting 2 ranks")
    assert capsys.readouterr().err == "  0.0 s  starting Ray on this machine\n 12.3 s  starting 2 ranks\n"
    monkeypatch.undo()
    fit(lambda request, status: request.on_phase("something"))
    assert capsys.readouterr().err.endswith(" s  something\n")


# ---- the training loop as bytes


def test_a_loop_gets_its_config_if_it_takes_one():
    assert unpack_loop(pack_loop(lambda config: config["x"] + 1, {"x": 1}))() == 2
    assert unpack_loop(pack_loop(lambda: "no config", {"x": 1}))() == "no config"
    assert unpack_loop(pack_loop(lambda config=None: config, 5))() == 5


@pytest.mark.parametrize(
    ("loop", "config", "said"),
    [
        (lambda model, data: None, None, "it takes model, data"),
        ("train", None, "train_loop must be a function, got str"),
        (lambda config: None, threading.Lock(), "cannot be sent to other processes"),
    ],
)
def test_what_is_no_loop_or_cannot_be_sent_is_refused(loop: Any, config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pack_loop(loop, config)


def test_a_loop_whose_module_is_not_there_says_what_to_do():
    packed = PackedLoop(code=pickle.dumps((len, None)).replace(b"builtins", b"nowhere_"), paths=())
    with pytest.raises(ConfigError, match="a rank worker cannot load train_loop"):
        unpack_loop(packed)


# ---- settings that cannot work are refused before there is a Ray


def nothing() -> None:
    """A loop."""


def test_wrong_settings_are_raised_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", None)
    run = RunConfig(name="demo", storage_path=str(tmp_path))
    with pytest.raises(UnsupportedError, match="transport='inproc'"):
        ZeroTrainer(nothing, zero_config=ZeroConfig(transport="inproc"))
    with pytest.raises(CheckpointError, match="nothing to resume"):
        ZeroTrainer(nothing, run_config=run.replace(resume=True)).fit()


def test_without_shared_memory_there_are_no_successors_and_so_no_spares() -> None:
    with pytest.raises(ConfigError, match=r"warm_spares is 1, but with transport='grpc'"):
        ZeroTrainer(nothing, zero_config=ZeroConfig(transport="grpc"), run_config=RunConfig(warm_spares=1))
