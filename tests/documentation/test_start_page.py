"""The start page, typed: a model is trained on a real Ray, looked at while it trains, exported, and made to write."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .blocks import Block, blocks

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.thorough]

PAGE = blocks("docs/start.md")
TRAIN = "rayzero train --steps 300"
SMALL = " dim=64 num_layers=2 num_heads=2 seq_len=128 batch_size=8 eval_every=100 eval_batches=1 max_data_bytes=2MB"
"""Added to the page's training: it takes a minute, in which one can look at it."""


def block(words: str) -> Block:
    """The one block that has these words."""
    (found,) = (one for one in PAGE if one.language in ("bash", "python") and words in one.text)
    return found


def typed(shell: Block, folder: Path) -> subprocess.Popen[str]:
    """A shell block as one types it, without entering the environment, which is there."""
    lines = [line for line in shell.text.splitlines() if not line.startswith("source ")]
    text = "\n".join(line + SMALL if line.startswith(TRAIN) else line for line in lines)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, text=True, start_new_session=True,
        env={**os.environ, "PATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace",  # a model this small writes odd bytes
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    return out


def until_it_trains(run: Path, process: subprocess.Popen[str]) -> None:
    rows = run / "metrics.jsonl"
    end = time.monotonic() + 300
    while not (rows.exists() and len(rows.read_text().splitlines()) > 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no step was made"
        time.sleep(0.1)


def test_what_the_page_says_happens(tmp_path: Path) -> None:
    training = typed(block(TRAIN), tmp_path)
    run = tmp_path / "runs" / "first"
    until_it_trains(run, training)
    looked = said(typed(block("rayzero top runs/first"), tmp_path))
    assert "first  running  step" in looked
    assert "checkpoint" in looked, "of rayzero status"
    trained = said(training)
    text = (Path(__file__).parents[2] / "docs/start.md").read_text()
    shown = re.findall(r"^(memory|bound|metrics|live page|trained|files|next)  ", text, re.M)
    assert len(shown) == 7
    assert set(shown) == set(re.findall(r"^(memory|bound|metrics|live page|trained|files|next)  ", trained, re.M))
    for named in ("config.yaml", "metrics.jsonl", "loss.png", "samples.txt", "checkpoints/step-000300", "plan.json"):
        assert f"`{named}`" in text
        assert (run / named).exists()
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 300
    assert losses[-1] < losses[0] - 1

    assert "model.safetensors" in said(typed(block("rayzero export"), tmp_path))
    sample = next(one for one in PAGE if one.title == "sample.py")
    (tmp_path / "sample.py").write_text(sample.text)
    written = said(typed(block("python sample.py"), tmp_path))
    assert written.startswith("def ")
    assert len(written) > 300
