"""A run that fails ends at once, says who and why, and leaves nothing. (Killed processes: test_training.py.)"""

from __future__ import annotations

import threading

import pytest

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
