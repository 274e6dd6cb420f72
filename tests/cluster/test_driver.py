"""How a driver ends a run: what it tells its user, and what it does where Ray is gone; on actors that are none."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rayzero.checkpoint.reader import Catalog
from rayzero.cluster import driver as driver_module
from rayzero.cluster import supervision
from rayzero.cluster.driver import ZeroTrainer, _again, _follow
from rayzero.cluster.files.key_files import FollowerKey
from rayzero.cluster.files.metrics_log import MetricsLog, read_log
from rayzero.cluster.files.run_dir import RunCheckpoints, StartPoint
from rayzero.cluster.files.run_record import read_record
from rayzero.cluster.nodes import session
from rayzero.cluster.nodes.session import answered, ray_answers
from rayzero.cluster.processes.coordinator import News
from rayzero.cluster.roster import LocalProcesses
from rayzero.cluster.run import Member, Report, RunState
from rayzero.cluster.status import RunStatus
from rayzero.cluster.supervision import Failure, Verdict, Watch, death_of, interruptible, postponed
from rayzero.cluster.upkeep.follower import Follower
from rayzero.config import RunConfig, ZeroConfig
from rayzero.errors import ConfigError, DataError, RunFailedError
from rayzero.telemetry.metric import Role
from rayzero.telemetry.scrape import Target


class Call(News):
    """Its own answer."""

    __hash__ = object.__hash__


class EndedRun:
    """A run whose loops have all returned, with reports that nobody has had; a call is its own answer."""

    def __init__(self, reports: list[Report]) -> None:
        self.unread = reports
        self.coordinator = SimpleNamespace(
            next_reports=SimpleNamespace(remote=self._take_unread), end_news=SimpleNamespace(remote=lambda: None)
        )
        self.coordinator_life, self.driver_node = "life", "node"
        self.ownership = None
        self.spares = SimpleNamespace(calls=[])
        self.everybody: list[str] = []
        self.remains = None
        self.owners: dict[str, Any] = {}
        self.certificates = SimpleNamespace(token="t", warnings=[], of_follower=lambda: FollowerKey(token="secret"))
        self.local = LocalProcesses()
        self.moves: list[RunState] = []

    def _take_unread(self, life: str) -> News:
        unread, self.unread = self.unread, []
        return Call(unread, "life")

    def ask(self, calls: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return calls

    def move(self, state: RunState, reason: str | None = None) -> None:
        self.moves.append(state)

    def stop_ranks(self, loops: dict[Any, str], reason: str) -> list[Any]:
        return []

    def stop_owners(self, timeout_s: float = 0.0) -> dict[str, Any]:
        return {}


def record_that(write: Callable[[], object]) -> Any:
    """A record whose writing is ``write``."""
    return SimpleNamespace(write=write, write_now_and_then=write)


def asked(**told: Any) -> Any:
    """What a follower takes of a run's request; ``told``: what it is to do."""
    directory = SimpleNamespace(
        path=Path("nowhere"), checkpoints=RunCheckpoints(Path("nowhere")), start=StartPoint(checkpoint=None, step=0)
    )
    nothing = {"on_report": None, "on_phase": lambda _: None, "fewest_optimizers": 0, "access": None}
    nothing["record"] = record_that(lambda: None)
    nobody = SimpleNamespace(
        num_workers=0,
        num_optimizers=0,
        max_optimizers=None,
        rescale_on_failure=False,
        placement_timeout=0.0,
    )
    nobody.replace = lambda **others: SimpleNamespace(**vars(nobody) | others)
    some = {"directory": directory, "scaling": nobody, "run": RunConfig(), "zero": ZeroConfig(), "packed_loop": None}
    return SimpleNamespace(**some | nothing | told)


@pytest.mark.parametrize("at", ["a report", "the change"])
@pytest.mark.parametrize("ended", [False, True], ids=["in the run", "after its end"])
def test_a_signal_while_reports_are_handed_on_loses_and_doubles_none(
    ended: bool, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls[-1:], []))  # of reports
    monkeypatch.setattr(ray, "get", lambda call: call)
    monkeypatch.setattr(Watch, "verdict", lambda watch, now: Verdict.RUNNING)
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
    request = asked(on_report=take, record=record_that(lambda: stop("the change")))
    follower = Follower(actors, RunStatus(), request)  # type: ignore[arg-type]
    with interruptible():
        with pytest.raises(SystemExit):
            follower.finish() if ended else follower.follow()
        follower.take_down(RunState.STOPPED, "interrupted")
    assert steps == list(range(5))
    assert actors.moves == [RunState.STOPPED]


def test_two_signals_at_once_are_one_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``timeout`` and service managers send them: to a process, and to its group."""
    monkeypatch.setattr(supervision, "_SAME_S", 60.0)  # a loaded machine may stand still between two lines
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
    monkeypatch.setattr(supervision, "_SAME_S", 0.0)
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
    def stop(request: Any, status: RunStatus) -> None:
        exit_as_ray_does(signal.SIGTERM)

    monkeypatch.setattr(driver_module, "drive", stop)
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
    follower = Follower(actors, RunStatus(), request)  # type: ignore[arg-type]
    actors.unread += [Report(rank=0, metrics={"step": step}) for step in (1, 2)]
    follower.finish()
    assert steps == [0, 1, 2]


def test_ray_is_gone_where_nobody_listens_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        context = SimpleNamespace(gcs_address=f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        assert ray_answers()
    assert not ray_answers()


@pytest.mark.parametrize(("there", "waits"), [(True, 4), (False, 1)])
def test_nobody_waits_for_the_answer_of_a_process_of_a_ray_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, there: bool, waits: int
) -> None:
    """A run that is stopped asks its processes for a minute, after which Ray would end the driver with its own code."""
    now, waited = 0.0, 0

    def wait(calls: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        nonlocal now, waited
        now, waited = now + timeout, waited + 1
        return ["quick"], ["never"]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(session.time, "monotonic", lambda: now)
    monkeypatch.setattr(session, "ray_answers", lambda: there)
    assert answered(["quick", "never"], 3.5) == (["quick"], ["never"])
    assert waited == waits
    assert now == (3.5 if there else 1.0)


DEAD = death_of("rank 1", 7, "")


def failing_with(failure: Failure) -> type[Follower]:
    """A follower of a run that ends by this failure."""

    class Failing(Follower):
        def follow(self) -> Watch:
            self._watch.failed(failure, 0.0)
            return self._watch

    return Failing


@pytest.mark.parametrize("again", [True, False])
def test_a_signal_while_a_run_is_taken_down_is_its_end_even_if_it_would_start_again(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    class Stopped(EndedRun):
        def stop_ranks(self, loops: dict[Any, str], reason: str) -> list[Any]:
            os.kill(os.getpid(), signal.SIGTERM)
            return []

    monkeypatch.setattr(driver_module, "Follower", failing_with(DEAD))
    request = asked(run=RunConfig(max_failures=3 if again else 0))
    actors, status = Stopped([]), RunStatus(state=RunState.RUNNING)
    with pytest.raises(SystemExit if again else RunFailedError), interruptible():
        _follow(request, actors, status)  # type: ignore[arg-type]
    assert actors.moves == [RunState.FAILED]


@pytest.mark.parametrize(("again", "raised"), [(True, ValueError), (False, RunFailedError)])
def test_the_user_may_end_a_run_with_its_last_reports_before_it_starts_again(
    monkeypatch: pytest.MonkeyPatch, again: bool, raised: type[Exception]
) -> None:
    def enough(report: Report) -> None:
        raise ValueError("enough")

    monkeypatch.setattr(driver_module, "Follower", failing_with(DEAD))
    request = asked(run=RunConfig(max_failures=3 if again else 0), on_report=enough)
    with pytest.raises(raised, match="enough" if again else "rank 1 died"):
        _follow(request, EndedRun([Report(rank=0)]), RunStatus())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "counted", "outlived"),
    [
        (DEAD, 0, 1),
        (DEAD, 1, 1),
        (death_of("coordinator", 9, ""), 0, 1),
        (death_of("coordinator", 9, ""), 1, 2),  # an optimizer's death before was another failure
        (death_of("coordinator", 9, ""), 2, None),
    ],
)
def test_a_restart_costs_one_failure(failure: Failure, counted: int, outlived: int | None) -> None:
    """``counted``: failures of this attempt before the restart. ``outlived``: in all; None: it was one too many."""
    status = RunStatus()
    request = asked(run=RunConfig(max_failures=2))
    follower = failing_with(failure)(EndedRun([]), status, request)  # type: ignore[arg-type]
    follower.follow()
    for _ in range(counted):
        assert follower._controller.spend() is None
    assert follower.starts_again() == (outlived is not None)
    assert status.outlived == (2 if outlived is None else outlived)
    assert (status.lost_at is not None) == (outlived is not None)


FIRST = RunFailedError("run 'demo' failed: rank 1 died")


def again_after(
    monkeypatch: pytest.MonkeyPatch,
    status: RunStatus,
    failures: int,
    attempt: Callable[[Any, RunStatus], Any] = lambda request, status: None,
    *,
    refuses: Callable[[str, float], None] = lambda run, patience_s: None,
    directory: Any = None,
) -> Any:
    """What comes of a run that starts again after ``FIRST``."""
    monkeypatch.setattr(driver_module, "refuse_name_in_use", refuses)
    monkeypatch.setattr(driver_module, "_run_once", attempt)
    monkeypatch.setattr(driver_module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(driver_module, "replace", lambda request, scaling: request)
    unchanged = SimpleNamespace(path=Path("nowhere"), rows_until=-1, start="starting anew", restart=lambda: None)
    request = asked(directory=directory or unchanged, run=RunConfig(max_failures=failures))
    return _again(request, status, FIRST)


@pytest.mark.parametrize("refused", [ConfigError("a run named 'demo' is on this cluster"), DataError("cannot write")])
def test_a_run_that_cannot_start_again_says_what_ended_it_and_why_not(
    monkeypatch: pytest.MonkeyPatch, refused: Exception
) -> None:
    def refuse(run: str, patience_s: float) -> None:
        raise refused

    status = RunStatus(state=RunState.RUNNING, outlived=1)
    with pytest.raises(RunFailedError) as failed:
        again_after(monkeypatch, status, 3, refuses=refuse)
    assert str(failed.value) == f"{FIRST}\nThe run cannot start again: {refused}"
    assert status.state is RunState.STARTING


@pytest.mark.parametrize("left", [0, 1])
def test_a_start_that_fails_is_one_more_failure(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    second = RunFailedError("run 'demo' failed: rank 0 gave no answer")

    def attempt(request: Any, status: RunStatus) -> None:
        raise second

    status = RunStatus(outlived=1)
    if left:
        assert again_after(monkeypatch, status, 2, attempt) is second
        assert status.outlived == 2
        return
    with pytest.raises(RunFailedError, match=r"rank 1 died\nThe run cannot start again: .* rank 0 gave no answer"):
        again_after(monkeypatch, status, 1, attempt)


def test_a_run_that_starts_again_has_no_rows_of_the_steps_that_it_makes_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = MetricsLog(tmp_path)
    log.add([Report(rank=0, step=step, time=0.0, metrics={}) for step in range(1, 6)])
    log.close()
    begun: list[list[int]] = []

    def attempt(request: Any, status: RunStatus) -> None:
        begun.append([row["step"] for row in read_log(tmp_path)])

    directory = SimpleNamespace(path=tmp_path, rows_until=3, start="starting anew", restart=lambda: None)
    assert again_after(monkeypatch, RunStatus(outlived=1), 2, attempt, directory=directory) is None
    assert begun == [[1, 2, 3]]


def test_the_record_of_a_run_that_starts_again_names_no_dead_process_and_outlasts_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[Any] = []

    def restart(request: Any, status: RunStatus) -> None:
        status.members = [Member(who="rank 0", pid=7, node="n", host="h")]
        status.targets = (Target(address="h:1", run="demo", role=Role.RANK, node="h", index=0),)
        status.state, status.restarts = RunState.STARTING, 1
        request.record.write()
        records.append(read_record(tmp_path / "demo"))
        raise ValueError("on_phase")

    monkeypatch.setattr(driver_module, "drive", restart)
    with pytest.raises(ValueError, match="on_phase"):
        ZeroTrainer(print, run_config=RunConfig(name="demo", storage_path=tmp_path)).fit()
    [record] = records
    assert (record["state"], record["members"], record["telemetry"]) == ("starting", [], None)
    after = read_record(tmp_path / "demo")
    assert after is not None
    assert after["state"] == "failed"
