"""A run that has lost what only a checkpoint brings back starts again from the newest one, inside one fit()."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rayzero.cluster.files.metrics_log import read_log
from rayzero.cluster.files.run_record import read_record
from rayzero.config import ZeroConfig
from tests.support import needs

from .compared_run import train_from_checkpoints
from .processes import Kills
from .tiny import unsharded

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    needs.shared_memory,
]

STEPS = 30


def is_right(run_dir: Path) -> bool:
    ours = load_file(run_dir / f"weights-{STEPS}.safetensors")
    return all(torch.allclose(ours[name], value, atol=1e-6) for name, value in unsharded(STEPS).items())


def rows(run_dir: Path) -> list[tuple[int, int]]:
    return sorted((row["rank"], row["done"]) for row in read_log(run_dir))


EACH_ONCE = sorted((rank, done) for rank in range(2) for done in range(1, STEPS + 1))


def test_anew_before_the_first_checkpoint_and_later_from_the_newest(trainer, nothing_left, tmp_path):
    """An optimizer's memory is its own over gRPC, and a rank's loop tracks nothing."""
    said: list[str] = []
    kills = Kills(tmp_path / "demo", {5: "optimizer 0", 15: "rank 1"})
    grpc = ZeroConfig(transport="grpc", stall_timeout=60.0)
    config = {"steps": STEPS, "saves": (10, 20, 30), "kills": kills.steps, "pause": 0.0}
    result = trainer(train_from_checkpoints, config, on_report=kills, on_phase=said.append, zero_config=grpc).fit()
    assert is_right(result.path)
    assert rows(result.path) == EACH_ONCE
    record = read_record(result.path)
    assert [one["who"] for one in record["recoveries"]] == ["the run", "rank 1", "the run"]
    assert record["resumed_from"] == str(result.path / "checkpoints" / "step-10")
    (anew,) = [line for line in said if "optimizer 0 died" in line]
    assert "starting anew, in 1 s (2 more failures would be outlived)" in anew
    (again,) = [line for line in said if "tracks nothing" in line]
    assert "starting from step 10, with " in again
    assert again.endswith("(1 more failure would be outlived)"), "a death and its restart are one failure"
