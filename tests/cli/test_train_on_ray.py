"""``rayzero train`` for real: its own Ray, two ranks, two optimizer actors, gRPC; stopped and resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rayzero.checkpoint import CheckpointReader
from rayzero.engine.units.partition import build_layout
from rayzero.recipes.model import build_model
from rayzero.recipes.plan_check import read_plan
from rayzero.recipes.recipe import RecipeConfig, load_recipe
from rayzero.recipes.run_log import read_rows
from tests.moved import bytes_moved

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.thorough]

VERSE = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs.\n"
STEPS = 40
TRAIN = [
    "train", "--steps", str(STEPS), "--workers", "2", "--optimizers", "2", "--checkpoint-every", "15",
    "data=text.txt", "dim=32", "num_layers=2", "num_heads=2", "seq_len=32", "batch_size=4", "eval_every=1",
    "eval_batches=1",
]  # fmt: skip


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "rayzero", *arguments],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def finish(*arguments: str, cwd: Path) -> str:
    """Run a command to its good end; what it said."""
    process = start(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped; returns the folder the command was typed in."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text(VERSE * 300)
    (folder / "said.txt").write_text(finish(*TRAIN, "--run-dir", "runs/a", cwd=folder))
    return folder


def test_a_run_leaves_everything_it_promises(whole):
    run = whole / "runs" / "a"
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "metrics.jsonl", "loss.png", "run.json", "plan.json", "checkpoints", ".lock",
        "samples.txt",
    }  # fmt: skip
    rows = read_rows(run)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    assert [row.tokens for row in rows] == [2 * 4 * 32 * step for step in range(1, STEPS + 1)]
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-000015",
        "step-000030",
        "step-000040",
    ]
    for checkpoint in (run / "checkpoints").iterdir():
        CheckpointReader(checkpoint).verify()
    said = (whole / "said.txt").read_text()
    assert "unigram baseline" in said
    assert str(run / "loss.png") in said


def test_its_plan_was_held_against_what_it_measured(whole):
    plan = read_plan(whole / "runs" / "a")
    assert plan is not None
    assert 20 <= plan["steps"] <= STEPS
    rows = {row["what"].partition(" (")[0]: row for row in plan["compared"]}
    assert set(rows) == {
        "rank 0 gathered parameters", "rank 1 gathered parameters", "rank 0 computing", "rank 1 computing",
        "optimizer 0 memory", "optimizer 1 memory", "host memory beyond the programs",
        "host memory", "freed memory that malloc keeps", "step time",
    }  # fmt: skip
    assert all(row["measured"] is not None for row in rows.values()), rows
    for rank in ("rank 0", "rank 1"):  # everything fits: all units are up
        assert rows[f"{rank} gathered parameters"]["measured"] <= rows[f"{rank} gathered parameters"]["planned"]
    owners = [rows[f"optimizer {index} memory"] for index in range(2)]
    recipe = load_recipe(whole / "runs" / "a" / "config.yaml")
    assert sum(owner["planned"] for owner in owners) >= 5 * layout_bytes(recipe), "masters, moments, two ranks' pushes"
    # nearly all of it the programs, which share most of what the plan counts for each: 0.5 GiB of 1.2
    assert 0.3 < rows["host memory"]["ratio"] < 0.7, rows
    assert rows["step time"]["measured"] > rows["step time"]["planned"] > 0
    said = (whole / "said.txt").read_text()
    assert f"plan against measured, after {plan['steps']} steps" in said


def test_the_bytes_that_moved_are_those_of_the_arithmetic(whole):
    """On one host every rank pushes each unit once a step, into memory that owners read, and fetches none: it reads
    parameters where the owners write them. Nothing goes over gRPC."""
    model_bytes = layout_bytes(load_recipe(whole / "runs" / "a" / "config.yaml"))
    assert bytes_moved(whole / "runs" / "a") == {
        ("shm", "push"): 2 * STEPS * model_bytes,
        ("shm", "load"): model_bytes,
    }


def layout_bytes(recipe: RecipeConfig) -> int:
    """Bytes of the flat vectors of all units, padding included."""
    zero = recipe.zero
    plan = build_layout(
        build_model(recipe, 256), units=zero.units, min_unit_bytes=zero.min_unit_bytes, shard_bytes=zero.shard_bytes,
        compute_dtype=torch.float32, keep_fp32=zero.keep_fp32,
    )  # fmt: skip
    return sum(unit.size_bytes for unit in plan.layout.units)


class Resumed(NamedTuple):
    run: Path
    said: str  # by the command that resumed it


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """A run over gRPC and TLS that was stopped by Ctrl-C, and resumed with one owner more."""
    folder = tmp_path_factory.mktemp("resumed")
    (folder / "text.txt").write_text(VERSE * 300)
    process = start(*TRAIN, "--run-dir", "runs/b", "zero.transport=grpc", "run.security.tls=always", cwd=folder)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 16/"):
            break
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert f"continue with: rayzero train --resume --run-dir {folder}/runs/b" in err
    run = folder / "runs" / "b"
    said = finish("train", "--resume", "--run-dir", "runs/b", "--optimizers", "3", cwd=folder)
    return Resumed(run, said)


def test_stopped_by_ctrl_c_and_resumed_with_other_owners_over_grpc_the_hash_is_the_same(whole, resumed):
    assert re.search(r"40 steps from step (15|30), 2 ranks, 3 optimizer actors", resumed.said)
    assert outcome(resumed.run) == outcome(whole / "runs" / "a")


def test_the_summary_of_a_resumed_run_sets_what_was_trained_since_beside_its_seconds(resumed):
    """A step of all ranks has 2 x 4 x 32 tokens."""
    steps = STEPS - int(re.search(r"40 steps from step (\d+)", resumed.said)[1])
    said = (
        rf"trained    {steps} steps, {256 * steps:,} tokens, \d+ s \(in all 40 steps, 10,240 tokens\); validation loss"
    )
    assert re.search(said, resumed.said), resumed.said


def outcome(run: Path) -> tuple[str, list[tuple[int, float, int]]]:
    """What must not depend on how often a run was stopped: its last checkpoint, and its rows but for the times."""
    digest = CheckpointReader(run / "checkpoints" / f"step-{STEPS:06d}").digest
    return digest, [(row.step, row.loss, row.tokens) for row in read_rows(run)]
