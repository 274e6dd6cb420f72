"""A run on Ray is followed by its folder, from a process that is no part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rayzero
from rayzero import ZeroTrainer
from rayzero.errors import ConfigError, StoreClosedError

from .compared_run import train_from_checkpoints
from .processes import Kills

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STEPS = 20


def followed(folder: Path) -> list[tuple[int, dict[str, Tensor]]]:
    """Each version that is read of a run until it has ended."""
    found: list[tuple[int, dict[str, Tensor]]] = []
    with rayzero.follow(folder) as follower:
        while True:
            try:
                follower.wait()
            except StoreClosedError:
                return found
            reading = follower.read()
            found.append((reading.version, {name: tensor.clone() for name, tensor in reading}))


@pytest.mark.thorough
def test_a_run_is_followed_by_its_folder_also_when_it_begins_again(
    trainer: Callable[..., ZeroTrainer], nothing_left: None, tmp_path: Path
) -> None:
    found: list[tuple[int, dict[str, Tensor]]] = []
    kills = Kills(tmp_path / "demo", {10: "rank 1"})
    config = {"steps": STEPS, "saves": (5,), "kills": kills.steps, "pause": 0.1}
    thread = threading.Thread(target=lambda: found.extend(followed(tmp_path / "demo")))
    starts: list[object] = []

    def follow(record: object) -> None:
        starts.append(record)
        if len(starts) == 1:
            thread.start()

    result = trainer(train_from_checkpoints, config, on_report=kills, on_start=follow).fit()
    thread.join()
    versions = [version for version, _ in found]
    assert (len(starts), max(versions)) == (2, STEPS)
    assert any(later < earlier for earlier, later in pairwise(versions))  # from 10 to 5
    for version, weights in found:
        if version:
            published = load_file(result.path / f"weights-{version}.safetensors")
            assert weights.keys() == published.keys()
            assert all(torch.equal(weights[name], published[name]) for name in weights), version
    with pytest.raises(ConfigError, match="publishes nothing any more, because it has finished"):
        rayzero.follow(tmp_path / "demo")
