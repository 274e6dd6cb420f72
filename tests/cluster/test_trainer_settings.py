"""Settings that cannot work are refused before there is a Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from rayzero.cluster.trainer import ZeroTrainer
from rayzero.config import RunConfig, ZeroConfig
from rayzero.errors import CheckpointError, ConfigError, UnsupportedError


def nothing() -> None:
    """A loop."""


def test_wrong_settings_are_raised_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", None)
    run = RunConfig(name="demo", storage_path=str(tmp_path))
    with pytest.raises(UnsupportedError, match="transport='inproc'"):
        ZeroTrainer(nothing, zero_config=ZeroConfig(transport="inproc"))
    with pytest.raises(ConfigError, match="it takes a, b"):
        ZeroTrainer(lambda a, b: None)
    with pytest.raises(CheckpointError, match="nothing to resume"):
        ZeroTrainer(nothing, run_config=run.replace(resume=True)).fit()


def test_without_shared_memory_there_are_no_successors_and_so_no_spares() -> None:
    with pytest.raises(ConfigError, match=r"warm_spares is 1, but with transport='grpc'"):
        ZeroTrainer(nothing, zero_config=ZeroConfig(transport="grpc"), run_config=RunConfig(warm_spares=1))
