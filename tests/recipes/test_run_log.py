"""metrics.jsonl: one row a step, made of every rank's report; and what is drawn of it."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from rayzero.errors import DataError
from rayzero.recipes.plot import draw_losses
from rayzero.recipes.progress import progress_line
from rayzero.recipes.run_log import RunLog, read_rows

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


def test_a_row_is_written_once_every_rank_has_reported_the_step(tmp_path):
    with RunLog(tmp_path, world_size=2) as log:
        assert log.add(0, rank_report(1, validation_loss=3.0, validation_batches=1)) is None
        assert log.add(0, rank_report(2)) is None
        row = log.add(
            1,
            rank_report(
                1,
                loss=4.0,
                tokens=300,
                step_seconds=0.8,
                fetch_wait_seconds=0.3,
                memory_bytes=7,
                validation_loss=6.0,
                validation_batches=2,
            ),
        )
        assert row is not None
    assert (row.loss, row.tokens, row.tokens_per_second) == (3.5, 200, 500)
    assert (row.step_seconds, row.fetch_wait_seconds, row.memory_bytes, row.validation_loss) == (0.8, 0.3, 10, 5.0)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0]).keys() == KEYS


def test_a_resumed_run_keeps_the_rows_up_to_its_checkpoint(tmp_path):
    with RunLog(tmp_path, world_size=1) as log:
        for step in range(1, 6):
            log.add(0, rank_report(step, loss=float(step)))
    with RunLog(tmp_path, world_size=1, resume_step=3) as log:
        log.add(0, rank_report(4, loss=40.0))
    rows = read_rows(tmp_path)
    assert [(row.step, row.loss, row.tokens) for row in rows] == [(1, 1, 200), (2, 2, 400), (3, 3, 600), (4, 40, 800)]


def test_numbers_that_are_not_finite_are_null_in_the_file(tmp_path):
    with RunLog(tmp_path, world_size=1) as log:
        log.add(0, rank_report(1, loss=math.nan, grad_norm=math.inf))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"] is None
    assert line["grad_norm"] is None
    assert math.isnan(read_rows(tmp_path)[0].loss)
    assert read_rows(tmp_path)[0].validation_loss is None


def test_a_last_line_cut_short_is_left_out_and_any_other_damage_is_named(tmp_path):
    with RunLog(tmp_path, world_size=1) as log:
        log.add(0, rank_report(1))
        log.add(0, rank_report(2))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert [row.step for row in read_rows(tmp_path)] == [1]
    path.write_text("nonsense\n" + whole)
    with pytest.raises(DataError, match=r"metrics\.jsonl line 1 is not a row"):
        read_rows(tmp_path)


def test_the_picture_is_a_png(tmp_path):
    with RunLog(tmp_path, world_size=1) as log:
        for step in range(1, 4):
            log.add(0, rank_report(step, validation_loss=2.5, validation_batches=int(step == 2)))
        draw_losses(log.rows, 3.1, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_off_a_terminal_progress_is_one_line_for_each_validated_step(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with RunLog(tmp_path, world_size=1) as log, progress_line(console, total=3, done=0) as line:
        for step in range(1, 4):
            line.show(log.add(0, rank_report(step, validation_loss=2.5, validation_batches=int(step == 2))))
    assert console.file.getvalue() == "step 2/3  loss 2.000  val 2.500  200 tok/s  0.00 GiB/rank\n"
