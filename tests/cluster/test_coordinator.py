"""The run's ledger: legal moves, epochs, each rank's last report, what the driver has not read yet."""

from __future__ import annotations

import json

import pytest

from rayzero.cluster.processes import coordinator
from rayzero.cluster.processes.coordinator import RunLedger
from rayzero.cluster.run import Member, Report, RunState


@pytest.fixture
def ledger() -> RunLedger:
    return RunLedger("demo", started_at=100.0)


def test_a_run_goes_from_starting_to_running_to_an_end(ledger):
    ledger.move(RunState.RUNNING)
    ledger.move(RunState.FAILED, "rank 1 raised ValueError: boom")
    assert ledger.describe()["state"] == "failed"
    assert ledger.describe()["error"] == "rank 1 raised ValueError: boom"


@pytest.mark.parametrize("end", [RunState.FINISHED, RunState.FAILED, RunState.STOPPED])
@pytest.mark.parametrize("after", list(RunState))
def test_no_move_leaves_an_end(ledger, end, after):
    ledger.move(RunState.RUNNING)
    ledger.move(end)
    with pytest.raises(ValueError, match=f"cannot go from {end} to {after}"):
        ledger.move(after)


def test_a_run_cannot_finish_before_it_ran(ledger):
    with pytest.raises(ValueError, match="cannot go from starting to finished"):
        ledger.move(RunState.FINISHED)


def test_a_new_address_is_a_new_epoch_and_the_same_is_not(ledger):
    assert ledger.route(["a:1", "b:2"]).epoch == 1
    assert ledger.route(["a:1", "b:2"]).epoch == 1
    assert ledger.route(["a:1", "c:3"]).epoch == 2


def test_reports_are_read_once_and_the_last_of_each_rank_is_kept(ledger):
    ledger.add([Report(rank=0, metrics={"step": 0}), Report(rank=0, metrics={"step": 1})])
    ledger.add([Report(rank=1, metrics={"step": 0}, checkpoint="runs/demo/checkpoints/step-000001")])
    assert [report.metrics["step"] for report in ledger.take_unread()] == [0, 1, 0]
    assert ledger.take_unread() == []
    assert ledger.describe()["metrics"] == {"0": {"step": 1}, "1": {"step": 0}}
    assert ledger.describe()["checkpoints"] == ["runs/demo/checkpoints/step-000001"]


def test_unread_reports_are_bounded_and_what_is_dropped_is_counted(ledger, monkeypatch):
    monkeypatch.setattr(coordinator, "REPORTS_KEPT", 3)
    ledger.add([Report(rank=0, metrics={"step": step}) for step in range(5)])
    assert [report.metrics["step"] for report in ledger.take_unread()] == [2, 3, 4]
    assert ledger.describe()["reports_dropped"] == 2


def test_the_description_is_json(ledger):
    ledger.enlist([Member(who="rank 0", pid=1, node="n", host="192.0.2.1")])
    described = json.loads(json.dumps(ledger.describe()))
    assert described["members"] == [{"who": "rank 0", "pid": 1, "node": "n", "host": "192.0.2.1"}]
