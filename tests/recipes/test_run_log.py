"""metrics.jsonl: one row a step, made of every rank's report; and what is drawn of it."""

from __future__ import annotations

import json
import math
import pickle
from functools import partial
from pathlib import Path

import pytest

from rayzero.cluster.files.metrics_log import MetricsLog
from rayzero.cluster.run import Report
from rayzero.errors import DataError
from rayzero.recipes.run_log import StepRows, read_rows, trained_since
from rayzero.recipes.training import draw_losses

KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "fetch_wait_seconds",
    "optimizer_exposed_seconds", "memory_bytes", "validation_loss",
}  # fmt: skip


def rank_report(step: int, **changes):
    fields = {
        "step": step, "loss": 2.0, "grad_norm": 0.5, "lr": 1e-3, "tokens": 100, "total_tokens": 200 * step,
        "step_seconds": 0.5, "fetch_wait_seconds": 0.1, "optimizer_exposed_seconds": 0.2, "memory_bytes": 10,
        "validation_loss": None, "validation_batches": 0,
    }  # fmt: skip
    return fields | changes


def write(run_dir: Path, *reports: dict, world_size: int = 1) -> None:
    """As the coordinator does with what ranks report, each in turn."""
    log = MetricsLog(run_dir, StepRows())
    for number, report in enumerate(reports):
        log.add([Report(rank=number % world_size, world_size=world_size, metrics=report)])
    log.close()


def test_a_row_is_complete_once_every_rank_has_reported_the_step():
    rows = StepRows()
    first, second = partial(Report, rank=0, world_size=2), partial(Report, rank=1, world_size=2)
    assert rows.add(first(metrics=rank_report(1, validation_loss=3.0, validation_batches=1))) is None
    assert rows.add(first(metrics=rank_report(2))) is None
    last = rank_report(
        1, loss=4.0, tokens=300, step_seconds=0.8, fetch_wait_seconds=0.3, memory_bytes=7, validation_loss=6.0,
        validation_batches=2,
    )  # fmt: skip
    row = rows.add(second(metrics=last))
    assert row is not None
    assert (row.loss, row.tokens, row.tokens_per_second) == (3.5, 200, 500)
    assert (row.step_seconds, row.fetch_wait_seconds, row.memory_bytes, row.validation_loss) == (0.8, 0.3, 10, 5.0)


def test_the_file_has_a_row_a_step(tmp_path):
    write(tmp_path, *(rank_report(step) for step in (1, 1, 2, 2, 3)), world_size=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert json.loads(lines[0]).keys() == KEYS
    assert [(row.step, row.loss, row.tokens) for row in read_rows(tmp_path)] == [(1, 2, 200), (2, 2, 400)]


def test_what_rows_are_joined_by_travels_to_another_process():
    assert pickle.loads(pickle.dumps(StepRows()))(Report(rank=0, metrics=rank_report(1))).keys() == KEYS


def test_numbers_that_are_not_finite_are_read_as_nan(tmp_path):
    write(tmp_path, rank_report(1, loss=math.nan, grad_norm=math.inf))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"] is None
    assert line["grad_norm"] is None
    assert math.isnan(read_rows(tmp_path)[0].loss)
    assert read_rows(tmp_path)[0].validation_loss is None


def test_rows_of_another_loop_are_named(tmp_path):
    log = MetricsLog(tmp_path)
    log.add([Report(rank=0, step=1, metrics={"loss": 1.0})])
    log.close()
    with pytest.raises(DataError, match=r"metrics\.jsonl line 1 is not a row of this recipe"):
        read_rows(tmp_path)


def test_what_a_part_of_a_run_trained_is_told_from_the_whole():
    joined = StepRows()
    reports = [rank_report(step, tokens=90 + step, total_tokens=1000 * step, step_seconds=0.7) for step in range(1, 5)]
    rows = [joined.add(Report(rank=0, metrics=report)) for report in reports]
    assert trained_since(rows, 2) == (2, 93 + 94)
    assert trained_since(rows, 0) == (4, 91 + 92 + 93 + 94)
    assert trained_since([], 7) == (0, 0)


def test_the_picture_is_a_png(tmp_path):
    joined = StepRows()
    reports = (rank_report(step, validation_loss=2.5, validation_batches=int(step == 2)) for step in range(1, 4))
    draw_losses([joined.add(Report(rank=0, metrics=report)) for report in reports], 3.1, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
