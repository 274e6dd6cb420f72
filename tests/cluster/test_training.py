"""Training on Ray, over gRPC, with the real store: the same weights as plain PyTorch, and every byte counted. A run
that fails ends at once, says who and why, and leaves nothing."""

from __future__ import annotations

import os
import signal
import threading
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayzero.cli.status import describe_run
from rayzero.cluster.files.metrics_log import read_log
from rayzero.cluster.files.run_record import read_record
from rayzero.engine import full_state_dict, get_context, report, save_checkpoint
from rayzero.errors import ConfigError, RunFailedError

from .tiny import make, tiny_steps, unsharded

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STEPS = 6


def train(config):
    """Train to STEPS from wherever the run resumes; a checkpoint after ``save_at``; rank 0 keeps the weights."""
    ctx = get_context()
    done = 0
    steps = enumerate(tiny_steps(config["first"]), config["first"] + 1)
    for done, (loss, model, optimizer) in steps:  # noqa: B007
        info = None
        if done == config.get("save_at"):
            info = save_checkpoint(optimizer, Path(ctx.run_dir) / "checkpoints" / "final", {"step": done})
        report({"step": 100 * done, "loss": loss}, checkpoint=info)
        if done == config["steps"]:
            break
    if ctx.rank == 0:
        save_file(full_state_dict(model), Path(ctx.run_dir) / "weights.safetensors")


def train_for_ever(config):
    for loss, _, _ in tiny_steps():
        report({"loss": loss})


def padded_bytes() -> int:
    """Bytes of the flat vectors, as the layout pads them: every parameter to a multiple of 64 elements."""
    return sum(-(-p.numel() // 64) * 64 * 4 for p in make()[0].parameters())


@pytest.mark.thorough  # resuming on Ray: the recipe that runs as a job, and local runs, are in the first tier
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(trainer, nothing_left, tmp_path):
    first = trainer(train, {"first": 0, "steps": 3, "save_at": 3}).fit()
    assert first.checkpoint == tmp_path / "demo" / "checkpoints" / "final"
    assert (first.transfers["push"], first.transfers["load"]) == (2 * 3 * padded_bytes(), padded_bytes())
    assert describe_run(tmp_path / "demo")["checkpoint"] == str(first.checkpoint)
    with pytest.raises(ConfigError, match=r"already holds checkpoints of a run \(newest: final\)"):
        trainer(train, {"first": 0, "steps": 3}).fit()
    assert read_record(tmp_path / "demo")["checkpoint"] == str(first.checkpoint), "the record is the first run's"
    again = trainer(train, {"first": 3, "steps": STEPS}, run={"resume": True}, scaling={"num_optimizers": 1}).fit()
    learnt = load_file(again.path / "weights.safetensors")
    for name, expected in unsharded(STEPS).items():
        torch.testing.assert_close(learnt[name], expected, rtol=1e-6, atol=1e-7)
    assert read_record(tmp_path / "demo")["resumed_from"] == str(first.checkpoint)
    rows = sorted((row["rank"], row["step"], row["reported_step"]) for row in read_log(tmp_path / "demo"))
    assert rows == [(rank, step, 100 * step) for rank in (0, 1) for step in range(1, STEPS + 1)], "of both parts"
    assert describe_run(tmp_path / "demo")["last"]["step"] == STEPS


@pytest.mark.thorough
@pytest.mark.parametrize("who", ["optimizer 1", "rank 1"])
def test_a_killed_process_is_named_though_the_others_only_see_a_broken_link(trainer, nothing_left, tmp_path, who):
    def kill(one):
        members = read_record(tmp_path / "demo")["members"]
        os.kill(next(m["pid"] for m in members if m["who"] == who), signal.SIGKILL)
        rows.append(len(read_log(tmp_path / "demo")))

    rows: list[int] = []
    with pytest.raises(
        RunFailedError, match=rf"run 'demo' failed: {who} died: its process \(pid \d+\) ended unexpectedly"
    ):
        trainer(train_for_ever, on_report=once(kill), run={"max_failures": 0}).fit()
    assert len(read_log(tmp_path / "demo")) >= rows[0] > 0, "what was reported stays"


def once(act):
    """``act`` on the first report only."""
    left = iter([act])
    return lambda one: [f(one) for f in islice(left, 1)]


# ---- runs that fail -------------------------------------------------------------------------------------------------


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
