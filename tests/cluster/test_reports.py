"""Reports leave in order, never block a loop that is not far ahead, and end with the run."""

from __future__ import annotations

import threading

import pytest

from rayzero.cluster.processes.coordinator import Received
from rayzero.cluster.processes.report_channel import ReportChannel, ReportGauges, ReportSender, RunGoneError
from rayzero.cluster.run import Report
from rayzero.engine.loop.reports import RecentReports
from rayzero.errors import StoreClosedError
from rayzero.telemetry.names import MAX_REPORTED, REPORTED, TRAIN_LOSS
from rayzero.telemetry.recorder import MemoryRecorder


def report(step: int) -> Report:
    return Report(rank=0, metrics={"step": step})


def test_reports_arrive_in_order_and_close_sends_the_rest():
    arrived: list[Report] = []
    channel = ReportChannel(arrived.extend)
    for step in range(100):
        channel.put(report(step))
    channel.close(timeout_s=10)
    assert [r.metrics["step"] for r in arrived] == list(range(100))


def test_put_returns_while_an_earlier_batch_is_still_being_sent():
    sending, let_go = threading.Event(), threading.Event()

    def slow(batch: list[Report]) -> None:
        sending.set()
        assert let_go.wait(10)

    channel = ReportChannel(slow)
    channel.put(report(0))
    assert sending.wait(10)
    channel.put(report(1))  # would hang here if it waited for the batch
    let_go.set()
    channel.close(timeout_s=10)


def test_a_loop_far_ahead_of_the_receiver_waits():
    sending, let_go = threading.Event(), threading.Event()
    arrived: list[Report] = []

    def slow(batch: list[Report]) -> None:
        sending.set()
        assert let_go.wait(10)
        arrived.extend(batch)

    channel = ReportChannel(slow, limit=2)
    channel.put(report(0))
    assert sending.wait(10)
    channel.put(report(1))
    channel.put(report(2))
    third = threading.Thread(target=channel.put, args=(report(3),))
    third.start()
    third.join(0.05)
    assert third.is_alive()
    let_go.set()
    third.join(10)
    channel.close(timeout_s=10)
    assert [r.metrics["step"] for r in arrived] == [0, 1, 2, 3]


def test_what_sending_raised_is_raised_to_the_loop():
    failed = threading.Event()

    def broken(batch: list[Report]) -> None:
        failed.set()
        raise ConnectionError("the coordinator is gone")

    channel = ReportChannel(broken)
    channel.put(report(0))
    assert failed.wait(10)
    channel.close(timeout_s=10)
    with pytest.raises(ConnectionError, match="the coordinator is gone"):
        channel.put(report(1))


def test_a_loop_does_not_end_because_its_run_is_gone(caplog):
    """It would close its store, and remove what a resume of the run needs."""

    def send(batch):
        raise RunGoneError("The actor died because its owner has died")

    channel = ReportChannel(send)
    channel.put(report(1))
    channel._thread.join(5)
    channel.put(report(2))
    assert "no longer sent, and Ray will end this process: The actor died because its owner has died" in caplog.text
    channel.close(5)


def test_after_refuse_a_report_is_an_error():
    channel = ReportChannel(lambda batch: None)
    channel.refuse()
    with pytest.raises(StoreClosedError, match="being stopped"):
        channel.put(report(0))
    channel.close(timeout_s=10)


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
