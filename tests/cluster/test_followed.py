"""A run on Ray is followed by its folder, from a process that is no part of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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

from .tiny import tiny_steps

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


def followed(folder: Path) -> dict[int, dict[str, Tensor]]:
    """By version, what is read of a run until it has ended."""
    found: dict[int, dict[str, Tensor]] = {}
    with rayzero.follow(folder) as follower:
        while True:
            try:
                follower.wait()
            except StoreClosedError:
                return found
            reading = follower.read()
            found[reading.version] = {name: tensor.clone() for name, tensor in reading}


@pytest.mark.thorough
def test_a_run_is_followed_by_its_folder(
    trainer: Callable[..., ZeroTrainer], nothing_left: None, tmp_path: Path
) -> None:
    found: dict[int, dict[str, Tensor]] = {}

    def follow(_: Any) -> None:  # every rank is about to enter its loop
        thread.start()

    thread = threading.Thread(target=lambda: found.update(followed(tmp_path / "demo")))
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
