"""Every test runs on one thread, offline, in debug mode (buffers swapped out are NaN), with Hugging Face's bars off."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

from rayzero.engine.context import RankContext, running_in
from rayzero.integrations import ray_train

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setenv("RAYZERO_DEBUG", "1")


def reset_accelerate() -> None:
    """Accelerate keeps its state once a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    yield
    reset_accelerate()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.trainer_callback.PrinterCallback, "on_log", lambda *_, **__: None)


@pytest.fixture(scope="session")
def vllms_python() -> Path:
    """Of the environment that ``scripts/vllm`` makes."""
    root = Path(__file__).parents[2]
    subprocess.run([root / "scripts/vllm"], check=True, timeout=1200)
    return root / ".venv-vllm/bin/python"


@pytest.fixture
def alone() -> Iterator[RankContext]:
    with running_in(RankContext()) as context:
        yield context


class Place:
    """The only worker of a fit."""

    get_world_rank = staticmethod(lambda: 0)
    get_local_rank = staticmethod(lambda: 0)
    get_local_world_size = staticmethod(lambda: 1)
    get_world_size = staticmethod(lambda: 1)
    get_experiment_name = staticmethod(lambda: "demo")


@pytest.fixture
def in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_train.train, "get_context", Place)
    monkeypatch.setattr(ray_train, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(ray_train, "_group", lambda: ("group", ("node",)))
