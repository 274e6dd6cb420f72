"""metrics.jsonl: what a report becomes, that it is on disk at once and whole, and what is read of it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayzero.cluster.files import metrics_log
from rayzero.cluster.files.metrics_log import (
    METRICS,
    MetricsLog,
    latest_metrics,
    read_log,
    row_of_report,
    trim_log,
    written_rows,
)
from rayzero.cluster.run import Report
from rayzero.errors import DataError


def report(step: int, rank: int = 0, /, **metrics: object) -> Report:
    return Report(rank=rank, step=step, time=100.0 + step, metrics=metrics)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[MetricsLog]:
    made = MetricsLog(tmp_path)
    yield made
    made.close()


def test_every_report_of_every_rank_is_a_row_that_is_in_the_file_at_once(log, tmp_path):
    log.add([report(1, 0, loss=2.5, phase="warm-up"), report(1, 1, loss=3.5)])
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert list(map(json.loads, lines)) == [
        {"step": 1, "rank": 0, "time": 101.0, "loss": 2.5, "phase": "warm-up"},
        {"step": 1, "rank": 1, "time": 101.0, "loss": 3.5},
    ]
    log.add([report(1, 0, validation=2.0)])
    assert read_log(tmp_path)[2] == {"step": 1, "rank": 0, "time": 101.0, "validation": 2.0}


def test_reports_that_are_made_again_after_the_whole_run_was_killed_are_rows_once(log, tmp_path):
    def made(*at: tuple[int, int]) -> list[Report]:
        return [Report(rank=0, step=step, number=number, metrics={"n": number}) for step, number in at]

    log.add(made((1, 0), (2, 0), (2, 1), (3, 0)))
    again = MetricsLog(tmp_path, row_of_report, written_rows(tmp_path))
    again.add(made((2, 0), (2, 1), (3, 0), (3, 1), (4, 0)))
    again.close()
    assert [(row["step"], row["n"]) for row in read_log(tmp_path)] == [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)]


def test_so_are_those_for_which_another_process_writes_the_log(log, tmp_path):
    log.add([report(1), report(2)])
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 3, "ra')  # the first one was killed here
    another = MetricsLog(tmp_path)
    another.go_on()
    another.add([report(2), report(3)])
    another.close()
    assert [row["step"] for row in read_log(tmp_path)] == [1, 2, 3]


def test_so_are_rows_of_all_ranks_together(tmp_path):
    def row(one: Report) -> dict[str, object]:
        return {"step": one.step}

    log = MetricsLog(tmp_path, row)
    log.add([report(step) for step in (1, 2)])
    log.close()
    again = MetricsLog(tmp_path, row, written_rows(tmp_path))
    again.add([report(step) for step in (1, 2, 3)])
    again.close()
    assert [row["step"] for row in read_log(tmp_path)] == [1, 2, 3]


def test_what_the_loop_calls_step_is_kept_beside_the_engines():
    row = row_of_report(report(3, step=700, rank="a", time=0.5, loss=1.0))
    assert row == {
        "step": 3, "rank": 0, "time": 103.0, "reported_step": 700, "reported_rank": "a", "reported_time": 0.5,
        "loss": 1.0,
    }  # fmt: skip


class Disk:
    """Takes so many bytes more, then it is full; as the kernel does, it takes what fits first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self._write = room, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._write(file, data[: self.room])
        self.room -= taken
        return taken


def test_rows_for_which_there_is_no_room_are_left_out_whole_and_said_once(log, tmp_path, monkeypatch, caplog):
    log.add([report(1, loss=1.0)])
    disk = Disk(monkeypatch, room=10)
    log.add([report(2, loss=2.0), report(2, 1, loss=2.0)])
    log.add([report(3, loss=3.0)])
    disk.room = 1000
    log.add([report(4, loss=4.0)])
    assert [row["step"] for row in read_log(tmp_path)] == [1, 4]
    assert log.lost == 3
    [warning] = caplog.messages
    assert (
        warning
        == f"{tmp_path / METRICS} cannot be written (No space left on device); training goes on without its rows"
    )


def test_a_file_that_cannot_be_made_ends_nothing(tmp_path, caplog):
    log = MetricsLog(tmp_path / "gone")
    log.add([report(1)])
    assert log.lost == 1
    assert "No such file" in caplog.text


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(log, tmp_path):
    log.add([report(step, rank, loss=float(step)) for step in range(1, 6) for rank in (0, 1)])
    trim_log(tmp_path, 3)
    log = MetricsLog(tmp_path)
    log.add([report(4, loss=40.0)])
    log.close()
    assert [(row["step"], row["loss"]) for row in read_log(tmp_path)] == [
        (1, 1), (1, 1), (2, 2), (2, 2), (3, 3), (3, 3), (4, 40),
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_rows_are_dropped_on_a_full_disk_too(log, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics_log, "replace_file", full)
    log.add([report(step) for step in range(4)])
    trim_log(tmp_path, 1)
    assert [row["step"] for row in read_log(tmp_path)] == [0, 1]
    trim_log(tmp_path, -1)
    assert (tmp_path / METRICS).read_bytes() == b""
    log.add([report(3), report(2)])
    with pytest.raises(DataError, match=r"cannot write .*: No space left"):
        trim_log(tmp_path, 2)
    assert [row["step"] for row in read_log(tmp_path)] == [3, 2], "a row in between is not cut off"


def test_a_log_that_is_no_file_is_an_error(tmp_path):
    (tmp_path / METRICS).mkdir()
    for use in (read_log, written_rows, lambda folder: trim_log(folder, 1)):
        with pytest.raises(DataError, match=r"cannot read .*it is a folder"):
            use(tmp_path)


def test_the_latest_metrics_are_the_last_of_each_name_and_the_mean_loss():
    rows = list(map(row_of_report, [
        report(1, 0, loss=9.0, accuracy=0.5), report(2, 1, loss=3.0, accuracy=0.1, one="x"), report(2, 0, loss=2.0),
    ]))  # fmt: skip
    assert latest_metrics(rows) == {"step": 2, "loss": 2.5, "accuracy": 0.5, "one": "x"}
    assert latest_metrics([]) is None
    assert latest_metrics([{"step": 7, "loss": None, "lr": 1.0}]) == {"step": 7, "loss": None, "lr": 1.0}
