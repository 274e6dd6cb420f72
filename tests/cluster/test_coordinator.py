"""The run's status: legal moves, epochs, each rank's last report, what the driver has not read yet."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from rayzero.cluster.processes import coordinator
from rayzero.cluster.processes.coordinator import HeardReports, RunStatus
from rayzero.cluster.processes.process_exporter import LOOPBACK, ExporterSettings
from rayzero.cluster.run import Member, Report, Routing, RunState
from rayzero.telemetry.metric import Role
from rayzero.telemetry.scrape import Viewer


@pytest.fixture
def status() -> RunStatus:
    return RunStatus("demo", started_at=100.0)


def test_a_run_goes_from_starting_to_running_to_an_end(status):
    status.move(RunState.RUNNING)
    status.move(RunState.FAILED, "rank 1 raised ValueError: boom")
    assert status.describe()["state"] == "failed"
    assert status.describe()["error"] == "rank 1 raised ValueError: boom"


@pytest.mark.parametrize("end", [RunState.FINISHED, RunState.FAILED, RunState.STOPPED])
@pytest.mark.parametrize("after", list(RunState))
def test_no_move_leaves_an_end(status, end, after):
    status.move(RunState.RUNNING)
    status.move(end)
    with pytest.raises(ValueError, match=f"cannot go from {end} to {after}"):
        status.move(after)


def test_a_run_cannot_finish_before_it_ran(status):
    with pytest.raises(ValueError, match="cannot go from starting to finished"):
        status.move(RunState.FINISHED)


def test_a_new_address_is_a_new_epoch_and_the_same_is_not(status):
    assert status.route(["a:1", "b:2"]).epoch == 1
    assert status.route(["a:1", "b:2"]).epoch == 1
    assert status.route(["a:1", "c:3"]).epoch == 2


def test_reports_are_read_once_and_the_last_of_each_rank_is_kept(status):
    status.add([Report(rank=0, metrics={"step": 0}), Report(rank=0, metrics={"step": 1})])
    status.add([Report(rank=1, metrics={"step": 0}, checkpoint="runs/demo/checkpoints/step-000001")])
    assert [report.metrics["step"] for report in status.take_unread()] == [0, 1, 0]
    assert status.take_unread() == []
    assert status.describe()["metrics"] == {"0": {"step": 1}, "1": {"step": 0}}
    assert status.describe()["checkpoints"] == ["runs/demo/checkpoints/step-000001"]


def test_what_a_rank_reports_again_in_its_next_life_is_taken_once(status):
    def made(life, *at):
        return [Report(rank=0, life=life, step=step, number=number) for step, number in at]

    def new(reports):
        return [(report.step, report.number) for report in status.add(reports)]

    assert new(made(0, (0, 0), (1, 0), (1, 1))) == [(0, 0), (1, 0), (1, 1)]
    assert new(made(1, (0, 0), (1, 0), (1, 1), (1, 2), (2, 0))) == [(1, 2), (2, 0)]
    assert new(made(2, (1, 2))) == []
    assert new(made(3, (2, 0), (2, 1))) == [(2, 1)]
    assert [(report.step, report.number) for report in status.take_unread()] == [
        (0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)
    ]  # fmt: skip
    assert [len(status.add([Report(rank=1, step=step)])) for step in (4, 3)] == [1, 1], "another rank's, in one life"


def made_at(rank: int, *steps: int) -> list[Report]:
    return [Report(rank=rank, step=step, time=0.0) for step in steps]


def test_the_last_reports_come_again_from_everybody_after_the_coordinators_death():
    heard = HeardReports()
    assert list(filter(heard.is_new, made_at(0, 3, 4))) == made_at(0, 3, 4)
    assert list(filter(heard.is_new, made_at(0, 4))) == made_at(0, 4), "a loop may go back to an earlier step"
    heard.come_again()
    assert list(filter(heard.is_new, made_at(0, 3, 4, 5))) == made_at(0, 5)
    assert list(filter(heard.is_new, made_at(1, 4))) == made_at(1, 4), "another rank's"


def test_unread_reports_are_bounded_and_what_is_dropped_is_counted(status, monkeypatch):
    monkeypatch.setattr(coordinator, "REPORTS_KEPT", 3)
    status.add([Report(rank=0, metrics={"step": step}) for step in range(5)])
    assert [report.metrics["step"] for report in status.take_unread()] == [2, 3, 4]
    assert status.describe()["reports_dropped"] == 2


def test_the_description_is_json(status):
    status.enlist([Member(who="rank 0", pid=1, node="n", host="192.0.2.1", open_files=1024)])
    described = json.loads(json.dumps(status.describe()))
    member = {"who": "rank 0", "pid": 1, "node": "n", "host": "192.0.2.1", "open_files": 1024, "has_shards": True}
    assert described["members"] == [member]


def test_another_coordinator_may_be_told_twice_of_the_run(monkeypatch, tmp_path):
    """Once for a life that died before it answered, and Ray asks the next one; once more when the driver sees that."""
    member = Member(who="coordinator", pid=1, node="n", host=LOOPBACK)
    monkeypatch.setattr(coordinator, "this_process", lambda who: member)
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    settings = ExporterSettings(
        run="demo", role=Role.COORDINATOR, who="coordinator", index=None, node=LOOPBACK, host=LOOPBACK, port=port,
        slab_dir=Path(tmp_path), trace=False,
    )  # fmt: skip
    routing = Routing(epoch=3, addresses=("a:1", "b:2"))
    made = coordinator.Coordinator("demo", None, 100.0)

    async def twice():
        return [await made.resume([member], routing, (), settings, Viewer()) for _ in range(2)], await made.describe()

    try:
        answers, described = asyncio.run(twice())
    finally:
        if made._exporter is not None:
            made._exporter.close()
    assert answers == [member, member]
    assert described["routing"] == {"epoch": 3, "addresses": ["a:1", "b:2"]}
