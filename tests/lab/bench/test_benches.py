"""Each benchmark at a tiny size: its JSON has what RESULTS.md is written from, and the figures fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.bench import adam, overlap, step, store
from lab.bench.figures import Spread
from lab.bench.step import PLAIN, Result, Score, check_losses, main, result_of
from lab.bench.work import Work
from lab.calibration import simulation
from rayzero.errors import RunFailedError

pytestmark = pytest.mark.thorough

TINY = ["--dim", "64", "--layers", "1", "--vocab", "128", "--seq", "16", "--batch", "1"]
ONCE = ["--rounds", "1", "--steps", "1"]
ROOT = Path(__file__).parents[3]


def test_step_compares_with_plain_pytorch(capsys):
    main([*TINY, *ONCE, "--patience", "0", "--worlds", "2", "--precisions", "bf16", "--json"])
    found = json.loads(capsys.readouterr().out)
    (cell,) = found["cells"]
    assert (cell["world_size"], cell["precision"], cell["absent"]) == (2, "bf16", {})
    assert cell["params"] == sum(p.numel() for p in Work(dim=64, layers=1, vocab=128, seq=16).model().parameters())
    assert cell["results"][PLAIN]["ratio"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    ours, theirs = cell["results"]["rayzero"], cell["results"][PLAIN]
    assert ours["ratio"]["median"] == pytest.approx(ours["step_s"]["median"] / theirs["step_s"]["median"])
    assert ours["loss_apart"] < 3e-2
    assert ours["owner_bytes_per_param"] > 0 == theirs["owner_bytes_per_param"]


def test_losses_that_differ_fail_the_cell():
    score = Score(step_s=[1.0], losses=[2.0], waits_s=[dict.fromkeys(("fetch", "push", "norm", "optimizer"), 0.0)])
    result: Result = result_of(score, replace(score, losses=[1.0], step_s=[0.5]), (300, 100), 100, 10)
    assert (result.loss_apart, result.ratio) == (1.0, Spread(2.0, 2.0, 2.0))
    assert (result.rank_bytes_per_param, result.owner_bytes_per_param) == (20.0, 10.0)
    check_losses({"a": result}, 1.0)
    with pytest.raises(RunFailedError, match=r"a 1\.0e\+00"):
        check_losses({"a": result}, 0.5)
    with pytest.raises(RunFailedError):
        check_losses({"a": replace(result, loss_apart=float("nan"))}, 0.5)


def test_digests_tell_one_bit():
    state = {"a": torch.zeros(4)}
    changed = {"a": torch.tensor([0.0, 0.0, 0.0, -0.0])}
    assert overlap.digest(state) == overlap.digest({"a": torch.zeros(4)}) != overlap.digest(changed)


def test_adam_measures_kernels_against_the_limit(capsys):
    adam.main(["--mparams", "2", "--rounds", "1", "--patience", "0", "--json"])
    found = json.loads(capsys.readouterr().out)
    limit, *others = found["rows"]
    assert limit["of_limit"] == pytest.approx({"median": 1.0, "least": 1.0, "most": 1.0})
    for row in others:
        assert row["gb_per_s"] / limit["gb_per_s"] == pytest.approx(row["of_limit"]["median"])


@pytest.mark.parametrize("bench", [adam, overlap, simulation, step, store])
def test_counts_start_at_one(bench, capsys):
    for text in ("0", "-1", "many"):
        with pytest.raises(SystemExit, match="2"):
            bench.main(["--rounds", text])
        assert f"--rounds: is {text!r} but must be a whole number from 1 on" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_gpu_step_refuses_without_a_gpu():
    command = [sys.executable, "-m", "lab", "gpu_step"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1
    assert done.stderr.startswith("no CUDA device here")
