"""How a driver ends a run: what it tells its user, and what it does where Ray is gone; on actors that are none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from rayzero.checkpoint.catalog import Catalog
from rayzero.cluster import actors as actors_module
from rayzero.cluster import interrupts
from rayzero.cluster import trainer as trainer_module
from rayzero.cluster.actors import RunActors
from rayzero.cluster.driver import Journal, _Follower
from rayzero.cluster.files.run_dir import RunCheckpoints, StartPoint
from rayzero.cluster.interrupts import interruptible, postponed
from rayzero.cluster.nodes.session import ray_answers
from rayzero.cluster.processes.coordinator import News
from rayzero.cluster.run import Report, RunState
from rayzero.cluster.trainer import ZeroTrainer
from rayzero.config import RunConfig, ZeroConfig


class EndedRun:
    """A run whose loops have all returned, with reports that nobody has had; a call is its own answer."""

    def __init__(self, reports: list[Report]) -> None:
        self.unread = reports
        self.coordinator = SimpleNamespace(
            next_reports=SimpleNamespace(remote=self._take_unread), end_news=SimpleNamespace(remote=lambda: None)
        )
        self.moves: list[RunState] = []

    def _take_unread(self) -> News:
        unread, self.unread = self.unread, []
        return News(unread, "life", replaced=False)

    def ask(self, calls: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return calls

    def move(self, state: RunState, reason: str | None = None) -> None:
        self.moves.append(state)

    def run_loops(self, settings: list[Any], packed_loop: None) -> dict[Any, str]:
        return {}

    def watch_owners(self) -> dict[Any, str]:
        return {}

    def stop_ranks(self, loops: dict[Any, str], reason: str) -> list[Any]:
        return []

    def kill_stopped(self) -> None: ...

    def stop_owners(self, timeout_s: float = 0.0) -> dict[str, Any]:
        return {}


def asked(**told: Any) -> Any:
    """What a follower takes of a run's request; ``told``: what it is to do."""
    directory = SimpleNamespace(checkpoints=RunCheckpoints(Path("nowhere")), start=StartPoint(checkpoint=None, step=0))
    nothing = {"on_report": None, "on_change": lambda: None, "on_stop": lambda: None, "on_phase": lambda _: None}
    nobody = SimpleNamespace(num_workers=0, num_optimizers=0)
    return SimpleNamespace(
        directory=directory, scaling=nobody, run=RunConfig(), zero=ZeroConfig(), packed_loop=None, **nothing | told
    )


@pytest.mark.parametrize("at", ["a report", "the change"])
def test_a_signal_while_the_last_reports_are_handed_on_loses_and_doubles_none(at: str) -> None:
    steps: list[int] = []

    def stop(where: str) -> None:
        if where == at and actors.moves == [] and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    def take(report: Report) -> None:
        if report.metrics["step"] == 2:
            stop("a report")
        steps.append(report.metrics["step"])

    stopped: list[bool] = []
    actors = EndedRun([Report(rank=0, metrics={"step": step}) for step in range(5)])
    request = asked(on_report=take, on_change=lambda: stop("the change"))
    follower = _Follower(actors, Journal(), request)  # type: ignore[arg-type]
    with interruptible():
        with pytest.raises(SystemExit):
            follower.finish()
        follower.take_down(RunState.STOPPED, "interrupted")
    assert steps == list(range(5))
    assert actors.moves == [RunState.STOPPED]


def test_two_signals_at_once_are_one_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``timeout`` and service managers send them: to a process, and to its group."""
    monkeypatch.setattr(interrupts, "_SAME_S", 60.0)  # a loaded machine may stand still between two lines
    ended: list[str] = []
    with interruptible():
        with pytest.raises(SystemExit):
            hand_on_and_be_stopped_twice(ended)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append("take_down")
    assert ended == ["news", "take_down"]


def hand_on_and_be_stopped_twice(ended: list[str]) -> None:
    with postponed():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        ended.append("news")


def exit_as_ray_does(number: int) -> None:
    """What ``ray.get`` and ``ray.wait`` make of an exception that a signal raises within them."""
    with suppress(KeyboardInterrupt, SystemExit):
        os.kill(os.getpid(), number)
    raise SystemExit(1)


def exit_at_the_second(number: int) -> None:
    with postponed():
        os.kill(os.getpid(), number)
        exit_as_ray_does(number)


@pytest.mark.parametrize(
    ("number", "kind", "codes"),
    [(signal.SIGTERM, SystemExit, (143,)), (signal.SIGINT, KeyboardInterrupt, ())],
)
@pytest.mark.parametrize("ends", [exit_as_ray_does, exit_at_the_second])
def test_a_signal_ends_the_block_with_its_own_exception_whatever_ray_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, number: int, kind: Any, codes: Any, ends: Any
) -> None:
    monkeypatch.setattr(interrupts, "_SAME_S", 0.0)
    with pytest.raises(kind) as ended, interruptible():
        ends(number)
    assert ended.value.args == codes


@pytest.mark.parametrize("block", [interruptible, postponed])
def test_an_exit_without_a_signal_keeps_its_code(block: Any) -> None:
    with pytest.raises(SystemExit) as ended, block():
        raise SystemExit(3)
    assert ended.value.code == 3


@pytest.mark.parametrize("saved", [True, False])
def test_a_stopped_run_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, saved: bool
) -> None:
    def stop(request: Any, journal: Journal) -> None:
        exit_as_ray_does(signal.SIGTERM)

    monkeypatch.setattr(trainer_module, "drive", stop)
    monkeypatch.setattr(Catalog, "newest", lambda self: tmp_path / "demo" / "step-000003" if saved else None)
    trainer = ZeroTrainer(print, run_config=RunConfig(name="demo", storage_path=tmp_path))
    with pytest.raises(SystemExit) as ended:
        trainer.fit()
    assert ended.value.code == 143
    [said] = caplog.messages
    go_on = f"RunConfig(name='demo', storage_path='{tmp_path}', resume=True)"
    assert (go_on in said, "stopped before its first checkpoint" in said) == (saved, not saved)


def test_reports_that_came_after_the_open_call_was_answered_are_told() -> None:
    steps: list[int] = []
    actors = EndedRun([Report(rank=0, metrics={"step": 0})])
    request = asked(on_report=lambda one: steps.append(one.metrics["step"]))
    follower = _Follower(actors, Journal(), request)  # type: ignore[arg-type]
    actors.unread += [Report(rank=0, metrics={"step": step}) for step in (1, 2)]
    follower.finish()
    assert steps == [0, 1, 2]


def test_the_record_says_stopped_before_any_actor_is_asked_for_anything() -> None:
    told: list[tuple[RunState, list[RunState]]] = []
    actors, journal = EndedRun([]), Journal(state=RunState.RUNNING)

    def on_stop() -> None:
        told.append((journal.state, list(actors.moves)))
        raise OSError("the disk is full")

    _Follower(actors, journal, asked(on_stop=on_stop)).take_down(RunState.STOPPED, "interrupted")  # type: ignore[arg-type]
    assert told == [(RunState.STOPPED, [])]
    assert actors.moves == [RunState.STOPPED]


def test_processes_that_a_ray_that_is_gone_cannot_end_are_ended_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors_module, "ray_answers", lambda: False)
    with subprocess.Popen(["sleep", "600"]) as process:
        actors = RunActors("demo", placement=None)  # type: ignore[arg-type]
        actors._processes = {"rank 0": psutil.Process(process.pid)}
        try:
            actors.end(politely=False)
            assert not psutil.pid_exists(process.pid)
        finally:
            process.kill()


def test_ray_is_gone_where_nobody_listens_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = SimpleNamespace(gcs_address=f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        assert ray_answers()
    assert not ray_answers()
