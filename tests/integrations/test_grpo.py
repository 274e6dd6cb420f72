"""examples/grpo.py with a real vLLM behind HTTP: what generates has the very weights that are trained, and the run goes
on when its processes are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayzero.cluster.files.run_record import read_record
from tests.support import needs
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
WARM_UP, STEPS = 60, 96
LONG_S = 400.0  # the server's start takes 40 s of two cores

pytestmark = [pytest.mark.thorough, pytest.mark.ray, pytest.mark.timeout(1500), needs.shared_memory]


def rows(folder: Path) -> list[dict[str, Any]]:
    """What has been logged of steps of reinforcement."""
    path = folder / "grpo/metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in found if "reward" in row]


def member(who: str) -> Callable[[Path], int]:
    return lambda folder: next(m["pid"] for m in read_record(folder / "grpo")["members"] if m["who"] == who)


def server(folder: Path) -> int:
    return int(re.findall(r"vLLM starts as process (\d+)", (folder / "said").read_text())[-1])


KILLS = [member("rank 1"), server, member("rank 0"), member("optimizer 0")]  # the last one is the lead


@pytest.mark.parametrize("lag", [0, 1], ids=["on-policy", "ahead"])
def test_it_learns_and_goes_on_after_each_death(lag: int, vllms_python: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples/grpo.py", "--vllm", vllms_python, "--storage", tmp_path, "--release"]
    sizes = ["--workers", "2", "--optimizers", "2", "--warm-up", str(WARM_UP), "--steps", str(STEPS)]
    with (tmp_path / "said").open("w") as said:
        script = subprocess.Popen(
            [*command, *sizes, *["--ahead"] * lag], stdout=said, stderr=said, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )

    def reached(step: int) -> bool:
        return any(row["step"] >= step for row in rows(tmp_path))

    try:
        for number, whom in enumerate(KILLS):
            at = WARM_UP + 4 + 6 * number
            until(lambda at=at: script.poll() is not None or reached(at), LONG_S, f"no step {at}")
            assert script.poll() is None, (tmp_path / "said").read_text()[-4000:]
            os.kill(whom(tmp_path), signal.SIGKILL)
        assert script.wait(LONG_S) == 0, (tmp_path / "said").read_text()[-4000:]
    finally:
        script.send_signal(signal.SIGINT)
        script.wait(60)
    found = rows(tmp_path)
    steps = [row["step"] for row in found]
    assert steps[-1] == STEPS
    assert len(set(steps)) == len(steps) >= STEPS - WARM_UP - 2  # the end of an iteration that is repeated has no row
    assert all(row["step"] - 1 - lag <= row["version"] < row["step"] for row in found)
    current = [row["log_ratio"] for row in found if row["version"] == row["step"] - 1]
    assert current
    assert max(current) < 1e-3, "vLLM's probabilities are those of the weights in training"
    if lag:
        assert max(row["log_ratio"] for row in found) > 0.1, "an older version's are not"
    assert sum(row["reward"] for row in found[-8:]) > sum(row["reward"] for row in found[:8])
    said = (tmp_path / "said").read_text()
    assert said.count("vLLM starts as process") == 2, re.findall(
        r"^vLLM's process .* has ended: .*(?:\n.*){20}", said, re.M
    )
