"""A run on Ray is followed by its folder, from a process that is no part of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rayzero
from rayzero import ZeroTrainer
from rayzero.engine import full_state_dict, get_context
from rayzero.errors import ConfigError, StoreClosedError

from .processes import Kills, until_killed
from .tiny import batch, make, tiny_steps

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STEPS = 20


def train(_: Any) -> None:
    context = get_context()
    for step, (_, model, _) in enumerate(tiny_steps(), 1):
        if context.rank == 0:
            save_file(full_state_dict(model), Path(context.run_dir or "") / f"weights-{step}.safetensors")
        if step == STEPS:
            return
        time.sleep(0.1)


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
def test_a_run_is_followed_by_its_folder(
    trainer: Callable[..., ZeroTrainer], nothing_left: None, tmp_path: Path
) -> None:
    found: dict[int, dict[str, Tensor]] = {}

    def follow(_: Any) -> None:  # every rank is about to enter its loop
        thread.start()

    thread = threading.Thread(target=lambda: found.update(dict(followed(tmp_path / "demo"))))
    result = trainer(train, on_start=follow).fit()
    thread.join()
    assert len(found) > STEPS // 4
    assert max(found) == STEPS
    for version, weights in found.items():
        if version:
            published = load_file(result.path / f"weights-{version}.safetensors")
            assert weights.keys() == published.keys()
            assert all(torch.equal(weights[name], published[name]) for name in weights), version
    with pytest.raises(ConfigError, match="publishes nothing any more, because it has finished"):
        rayzero.follow(tmp_path / "demo")


def train_from_checkpoints(config: dict[str, Any]) -> None:
    """A loop that tracks nothing, so a rank that dies begins the run again from its checkpoint."""
    context = get_context()
    model, plain = make()
    model, optimizer = rayzero.prepare(model, plain)
    folder = Path(context.run_dir or "")
    for step in range(context.step, STEPS):
        until_killed(folder, config["kills"], step)
        model(batch(step, context.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rayzero.report({"done": step + 1})
        if context.rank == 0:
            save_file(full_state_dict(model), folder / f"weights-{step + 1}.safetensors")
        if step + 1 == 5:
            rayzero.save_checkpoint(optimizer, folder / "checkpoints" / "step-5")
        time.sleep(0.1)


@pytest.mark.thorough
def test_a_follower_goes_on_with_a_run_that_begins_again(
    trainer: Callable[..., ZeroTrainer], nothing_left: None, tmp_path: Path
) -> None:
    found: list[tuple[int, dict[str, Tensor]]] = []
    kills = Kills(tmp_path / "demo", {10: "rank 1"})
    thread = threading.Thread(target=lambda: found.extend(followed(tmp_path / "demo")))
    starts: list[object] = []

    def follow(record: object) -> None:
        starts.append(record)
        if len(starts) == 1:
            thread.start()

    result = trainer(train_from_checkpoints, {"kills": kills.steps}, on_report=kills, on_start=follow).fit()
    thread.join()
    versions = [version for version, _ in found]
    assert (len(starts), max(versions)) == (2, STEPS)
    assert any(later < earlier for earlier, later in pairwise(versions))  # from 10 to 5
    for version, weights in found:
        if version:
            published = load_file(result.path / f"weights-{version}.safetensors")
            assert all(torch.equal(weights[name], published[name]) for name in weights), version
