"""A run is followed by its folder or its name, by a process that loads little, and refused where that is impossible."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rayzero
from rayzero.config import ZeroConfig
from rayzero.errors import ConfigError, StallError
from tests.support import needs

pytestmark = needs.shared_memory

NEEDED = {
    # ours, torch's own, and what checks records
    "rayzero", "torch", "numpy", "google", "pydantic", "pydantic_core", "annotated_types", "typing_inspection",
    "typing_extensions", "psutil", "yaml", "xxhash", "zstandard", "threadpoolctl",
}  # fmt: skip
UNWANTED = {"ray", "grpc", "transformers", "safetensors", "accelerate", "lightning"}
_LOADED = """
import sys, torch
before = {name.partition(".")[0] for name in sys.modules}
import rayzero
rayzero.follow("nobody").version
new = {name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names
print(*sorted(name for name in new if "cython" not in name and not name.startswith("_")))
"""


def test_a_follower_loads_neither_ray_nor_grpc_nor_more_than_it_needs() -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded & UNWANTED == set()
    assert loaded <= NEEDED


def record(folder: Path, **entries: Any) -> None:
    content = {
        "run": "nobody",
        "state": "running",
        "started_at": 1.0,
        "driver": {"pid": 1, "host": "another-host"},
        "config": {"zero": ZeroConfig().model_dump(mode="json")},
    }
    (folder / "run.json").write_text(json.dumps(content | entries))


def test_a_folder_says_where_a_run_publishes(tmp_path: Path) -> None:
    zero = ZeroConfig(slab_dir=str(tmp_path)).model_dump(mode="json")
    record(tmp_path, config={"zero": zero})
    with pytest.raises(StallError, match=re.escape(f"run 'nobody' has no optimizers in {tmp_path}")):
        rayzero.follow(tmp_path).wait(0, timeout_s=0.01)


@pytest.mark.parametrize(
    ("entries", "error", "words"),
    [
        ({"state": "finished", "checkpoint": "step-9"}, ConfigError, "has finished: its newest checkpoint is step-9"),
        ({"state": "failed"}, ConfigError, "has failed: it has no checkpoint"),
        ({"config": {}}, ConfigError, "does not say how the run is configured"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    tmp_path: Path, entries: dict[str, Any], error: type[Exception], words: str
) -> None:
    record(tmp_path, **entries)
    with pytest.raises(error, match=words):
        rayzero.follow(tmp_path)


def test_a_folder_without_a_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path} holds no run, because it has no run.json")):
        rayzero.follow(tmp_path)
    monkeypatch.chdir(tmp_path.parent)  # in one word it could be a run's name, too
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path.name} holds no run, because it has no run.json")):
        rayzero.follow(tmp_path.name)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rayzero.follow(3), "run is 3 but must be a run's folder or its name"),
        (lambda: rayzero.follow("nobody", model=-1), "model is -1 but must be 0 for the first"),
        (lambda: rayzero.follow("nobody").read(-1), "version is -1 but must be a whole number of steps, 0 or more"),
        (lambda: rayzero.follow("nobody").wait("1"), "version is '1' but must be a whole number of steps"),
        (lambda: rayzero.follow("nobody").wait(1, timeout_s=float("nan")), "timeout_s is nan but must be a number of"),
        (lambda: rayzero.follow("nobody").into(torch.nn.Linear(1, 1), timeout_s=-1), "timeout_s is -1 but must be"),
    ],
)
def test_what_is_no_run_version_or_time_is_refused_by_name(call: Callable[[], object], words: str) -> None:
    """A wait of nan seconds would have no end."""
    with pytest.raises(ConfigError, match=words):
        call()
