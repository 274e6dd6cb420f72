"""A run that fails ends at once, says who and why, and leaves nothing. (Killed processes: test_training.py.)"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from rayzero.cluster import interrupts
from rayzero.cluster.files.run_record import read_record
from rayzero.engine.context import get_context, report

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


class OutOfDataError(Exception):
    pass


def rank_one_raises(config):
    report({"step": 0})
    if get_context().rank == 1:
        raise OutOfDataError("no more batches")
    stopped = threading.Event()
    get_context().on_close(lambda reason: stopped.set())
    stopped.wait()


def wait_for_ever(config):
    report({"step": 0})
    threading.Event().wait()


def test_an_exception_in_one_rank_ends_the_run_with_its_class_message_and_traceback(trainer, nothing_left, tmp_path):
    result = trainer(rank_one_raises, scaling={"num_optimizers": 1}).fit(raise_on_error=False)
    text = str(result.error)
    assert text.startswith("run 'demo' failed: rank 1 raised OutOfDataError: no more batches\n")
    assert 'raise OutOfDataError("no more batches")' in text
    assert type(result.error.__cause__).__name__ == "OutOfDataError"
    assert result.metrics_per_rank[1] == {"step": 0}, "what was reported before is kept"
    record = read_record(tmp_path / "demo")
    assert record["state"] == "failed"
    assert record["error"] == text


@pytest.mark.thorough
def test_an_error_of_the_users_callback_ends_even_ranks_that_do_not_listen(trainer, nothing_left, tmp_path):
    def broken(one):
        raise ZeroDivisionError("in the progress bar")

    with pytest.raises(ZeroDivisionError, match="in the progress bar"):
        trainer(wait_for_ever, on_report=broken, scaling={"num_workers": 1, "num_optimizers": 1}).fit()
    assert read_record(tmp_path / "demo")["state"] == "failed"


def ten_reports(all_made):
    for step in range(10):
        report({"step": step})
    all_made.touch()
    stopped = threading.Event()
    get_context().on_close(lambda reason: stopped.set())
    stopped.wait()


@pytest.mark.thorough
def test_a_signal_while_a_report_is_taken_loses_none(trainer, nothing_left, tmp_path):
    steps, all_made = [], tmp_path / "all_made"

    def interrupted(one):
        if one.metrics["step"] == 3:
            while not all_made.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        steps.append(one.metrics["step"])

    with pytest.raises(SystemExit):
        trainer(ten_reports, all_made, on_report=interrupted, scaling={"num_workers": 1, "num_optimizers": 1}).fit()
    assert steps == list(range(10))
    record = read_record(tmp_path / "demo")
    assert (record["state"], record["metrics"]["0"]) == ("stopped", {"step": 9})


@pytest.mark.thorough
def test_a_callback_that_hangs_ends_with_the_second_signal(trainer, nothing_left, tmp_path, monkeypatch):
    monkeypatch.setattr(interrupts, "_SAME_S", 0.0)
    never = threading.Event()

    def hangs(one):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        never.wait(100)

    with pytest.raises(KeyboardInterrupt):
        trainer(wait_for_ever, on_report=hangs, scaling={"num_workers": 1, "num_optimizers": 1}).fit()
    assert read_record(tmp_path / "demo")["state"] == "stopped"
