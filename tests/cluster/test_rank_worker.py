"""What a rank worker knows of its owners when its loop begins."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rayzero
from rayzero.cluster.processes import rank_worker
from rayzero.cluster.processes.coordinator import Received
from rayzero.cluster.processes.owner_process import MemberProcess, OptimizerActor
from rayzero.cluster.processes.rank_worker import (
    RankSettings,
    RankStart,
    RankWorker,
    ReportChannel,
    ReportGauges,
    ReportSender,
    RunGoneError,
    pack_loop,
)
from rayzero.cluster.run import Report
from rayzero.config import ZeroConfig
from rayzero.engine.loop.tracked import RecentReports
from rayzero.errors import StoreClosedError
from rayzero.protocol.ownership import Ownership
from rayzero.telemetry.names import MAX_REPORTED, REPORTED, TRAIN_LOSS
from rayzero.telemetry.recorder import MemoryRecorder


def connect() -> None:
    rayzero.get_context().connect(0)


def test_a_loop_that_is_late_finds_the_owners_that_have_moved_meanwhile(monkeypatch, tmp_path: Path) -> None:
    """Its config may take long to come, and an owner may die in the meantime."""
    seen: list[list[str]] = []

    def connected(rank: int, table: Any, model: int, **settings: Any) -> None:
        seen.append(list(table._addresses))

    monkeypatch.setattr(rank_worker, "connect_store", connected)
    worker = RankWorker(0, 1, None)
    worker.succeed(1, "c:3")
    start = RankStart(addresses=("a:1", "b:2"), ownership=Ownership(2), lineage="line", resume=None, token="secret")
    settings = RankSettings(
        ranks_here=(0,), rank=0, world_size=1, run="demo", run_dir=tmp_path, on_checkpoint_error="warn", use_gpu=False,
        bind_numa=False, config=ZeroConfig(), start=start,
    )  # fmt: skip
    outcome = worker.run(settings, pack_loop(connect, None), coordinator=None)
    assert outcome.failure is None
    assert seen == [["a:1", "c:3"]]


def test_a_successor_that_is_told_of_while_owners_change_is_one_of_the_new_owners() -> None:
    """Its rank may need it to get there, so the change does not hold it up."""
    told: list[str] = []
    over: Future[None] = Future()

    class Table:
        def go_over(self, addresses: list[str], ownership: Ownership) -> Future[None]:
            told.append(f"epoch {ownership.epoch}")
            threading.Thread(target=worker.succeed, args=(1, "c:3")).start()
            time.sleep(0.05)
            told.append("gone over")
            return over

        def succeed(self, owner: int, address: str) -> None:
            told.append(f"{owner} is at {address}")
            over.set_result(None)

    worker = RankWorker(0, 1, None)
    worker._table = Table()  # type: ignore[assignment]
    worker.change(["a:1", "b:2"], Ownership(2))
    assert told == ["epoch 0", "gone over", "1 is at c:3"]


class Told:
    def __init__(self) -> None:
        self.successors: list[tuple[int, str]] = []

    def succeed(self, owner: int, address: str) -> None:
        self.successors.append((owner, address))


def test_the_owner_beside_a_rank_hears_of_a_successor_by_itself() -> None:
    """While owners change, it is in the next epoch already, and the rank is not: the same number is another owner."""
    worker: Any = RankWorker(0, 1, None)
    owner, table = Told(), Told()
    worker._owner, worker._table = SimpleNamespace(server=owner), table
    worker.call_owner("succeed", (4, "a4"))
    assert (owner.successors, table.successors) == ([(4, "a4")], [])
    worker.succeed(1, "a1")
    assert (owner.successors, table.successors) == ([(4, "a4")], [(1, "a1")])


# ---- Reports leave in order, never block a loop that is not far ahead, and end with the run.


def report(step: int) -> Report:
    return Report(rank=0, metrics={"step": step})


def test_reports_arrive_in_order_and_close_sends_the_rest():
    arrived: list[Report] = []
    channel = ReportChannel(arrived.extend)
    for step in range(100):
        channel.put(report(step))
    channel.close(timeout_s=60)
    assert [r.metrics["step"] for r in arrived] == list(range(100))


def test_a_loop_far_ahead_of_the_receiver_waits():
    sending, let_go = threading.Event(), threading.Event()
    arrived: list[Report] = []

    def slow(batch: list[Report]) -> None:
        sending.set()
        assert let_go.wait(60)
        arrived.extend(batch)

    channel = ReportChannel(slow, limit=2)
    channel.put(report(0))
    assert sending.wait(60)
    channel.put(report(1))
    channel.put(report(2))
    third = threading.Thread(target=channel.put, args=(report(3),))
    third.start()
    third.join(0.05)
    assert third.is_alive()
    let_go.set()
    third.join(60)
    channel.close(timeout_s=60)
    assert [r.metrics["step"] for r in arrived] == [0, 1, 2, 3]


def test_what_sending_raised_is_raised_to_the_loop():
    failed = threading.Event()

    def broken(batch: list[Report]) -> None:
        failed.set()
        raise ConnectionError("the coordinator is gone")

    channel = ReportChannel(broken)
    channel.put(report(0))
    assert failed.wait(60)
    channel.close(timeout_s=60)
    with pytest.raises(ConnectionError, match="the coordinator is gone"):
        channel.put(report(1))


def test_a_loop_does_not_end_because_its_run_is_gone(caplog):
    """It would close its store, and remove what a resume of the run needs."""

    def send(batch):
        raise RunGoneError("The actor died because its owner has died")

    channel = ReportChannel(send)
    channel.put(report(1))
    channel._thread.join(60)
    channel.put(report(2))
    assert "no longer sent, and Ray will end this process: The actor died because its owner has died" in caplog.text
    channel.close(5)


def test_after_refuse_a_report_is_an_error():
    channel = ReportChannel(lambda batch: None)
    channel.refuse()
    with pytest.raises(StoreClosedError, match="being stopped"):
        channel.put(report(0))
    channel.close(timeout_s=60)


class Receiver:
    """What a coordinator of some life takes."""

    def __init__(self) -> None:
        self.life, self.taken = "a", list[int]()
        self.driver_has: int | None = None  # the step of the last report that it has had

    def ask(self, batch: list[Report], life: str | None) -> Received:
        if life in (None, self.life):
            self.taken += [one.step for one in batch]
        return Received(self.life, None if self.driver_has is None else (self.driver_has, 0))


@pytest.mark.parametrize(
    ("driver_has", "again"), [(3, [3, 4]), (1, [2, 3, 4]), (None, [1, 2, 3, 4])], ids=["all", "one", "none"]
)
def test_another_coordinator_gets_the_reports_again_that_the_driver_may_lack_and_first(driver_has, again):
    """It always gets those of the last two steps, which may be on their way to the driver."""
    recent, receiver = RecentReports(), Receiver()
    receiver.driver_has = driver_has
    sender = ReportSender(receiver.ask, recent, lambda made: Report(rank=0, step=made.step, number=made.number))

    def send(*steps: int) -> None:
        for step in steps:
            recent.add(step, {}, None)
        sender.send([Report(rank=0, step=step, number=0) for step in steps])

    send(1)
    send(2, 3)
    assert receiver.taken == [1, 2, 3]
    receiver.life, receiver.taken = "b", []
    send(4)
    assert receiver.taken == again
    send(5)
    assert receiver.taken == [*again, 5]


def test_a_loop_that_reports_no_more_sends_another_coordinator_what_was_sent_and_not_what_is_queued():
    recent, receiver = RecentReports(), Receiver()
    sender = ReportSender(receiver.ask, recent, lambda made: Report(rank=0, step=made.step, number=made.number))
    sender.send([])  # before its first report
    for step in (1, 2, 3):
        recent.add(step, {}, None)
    sender.send([Report(rank=0, step=1), Report(rank=0, step=2)])
    receiver.life, receiver.taken = "b", []
    sender.send([])
    sender.send([])
    sender.send([Report(rank=0, step=3)])
    assert receiver.taken == [1, 2, 3]


def test_numbers_that_are_reported_are_gauges_and_the_loss_is_the_training_loss():
    recorder = MemoryRecorder()
    gauges = ReportGauges(recorder)
    gauges.show({"loss": 3.0, "accuracy": 0.5, "phase": "warm-up", "none": None})
    gauges.show({"loss": 2.0, "done": True})
    assert recorder.gauges()[TRAIN_LOSS] == {(): 2.0}
    found = {dict(labels)["name"]: value for labels, value in recorder.gauges()[REPORTED].items()}
    assert found == {"loss": 2.0, "accuracy": 0.5, "done": 1.0}


def test_a_loop_that_makes_up_names_does_not_fill_prometheus(caplog):
    recorder = MemoryRecorder()
    gauges = ReportGauges(recorder)
    for step in range(MAX_REPORTED + 10):
        gauges.show({f"loss of step {step}": 1.0, "loss of step 0": float(step)})
    series = recorder.gauges()[REPORTED]
    assert len(series) == MAX_REPORTED
    assert series[("name", "loss of step 0"),] == MAX_REPORTED + 9
    [warning] = caplog.messages
    assert f"'loss of step {MAX_REPORTED}' and later names are not shown" in warning


# ---- what every process of a run can say about its host


NOBODY = 65534


@contextmanager
def without_roots_rights() -> Iterator[None]:
    """Root may look into every folder."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("kind", [OptimizerActor, RankWorker])
def test_a_process_sees_what_it_may_look_at(kind: type[MemberProcess], tmp_path: Path) -> None:
    process = kind.__new__(kind)  # it may be no owner yet
    file, shut = tmp_path / "run.json", tmp_path / "shut"
    shut.mkdir()
    (shut / "run.json").touch()
    file.touch()
    assert process.sees(str(file))
    assert not process.sees(str(tmp_path / "other.json"))
    shut.chmod(0)
    with without_roots_rights():
        assert not process.sees(str(shut / "run.json"))
