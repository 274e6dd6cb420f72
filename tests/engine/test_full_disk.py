"""Storage that does not take a checkpoint: every rank hears why, nothing is left, and training goes on if it is to."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero.checkpoint import CheckpointReader
from rayzero.checkpoint import writer as checkpoint_writer
from rayzero.convert.remote_checkpoints import newest_checkpoint
from rayzero.engine.context import RankContext
from rayzero.errors import CheckpointError, CheckpointWriteError
from rayzero.testing import run_ranks

FULL = "No space left on device"


class Disk:
    """Full for one file of a checkpoint until there is room again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
        self.file: str | None = file
        for name in ("_begin", "fsync"):
            self._guard(monkeypatch, name)

    def _guard(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(checkpoint_writer, name)

        def call(path: Path, *args: Any, **named: Any) -> Any:
            if path.name.removesuffix(".part") == self.file:
                path.parent.mkdir(exist_ok=True)
                path.write_text("what fitted")
                raise OSError(errno.ENOSPC, FULL)
            return original(path, *args, **named)

        monkeypatch.setattr(checkpoint_writer, name, call)


FILES = ["rank-0001.safetensors", "owner-001.safetensors", "manifest.json"]


def trained() -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return rayzero.prepare(model, torch.optim.AdamW(model.parameters()))


def step(model: nn.Module, optimizer: rayzero.ZeroOptimizer) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("transport", ["inproc", "grpc"])
@pytest.mark.parametrize("file", FILES)
def test_training_goes_on_without_a_checkpoint_that_did_not_fit(
    file: str, transport: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch, file)
    left: list[list[Path]] = []

    def loop(context: RankContext) -> list[str | None]:
        context.on_checkpoint_error = "warn"
        model, optimizer = trained()
        told = []
        for number in range(3):
            step(model, optimizer)
            info = rayzero.save_checkpoint(optimizer, tmp_path / f"step-{number}", {"step": number})
            told.append(None if info is None else Path(info.path).name)
            if context.rank == 0 and number == 1:
                left.append(list(tmp_path.iterdir()))
                disk.file = None
            step(model, optimizer)  # every rank is past its save: nobody stages the next file before
        return told

    assert run_ranks(loop, 2, 2, transport) == [[None, None, "step-2"]] * 2
    assert left == [[]], "a failed save leaves nothing"
    assert newest_checkpoint(tmp_path) == tmp_path / "step-2"
    with CheckpointReader(tmp_path / "step-2") as reader:
        reader.verify()
        assert reader.step == 5
    warnings = [message for message in caplog.messages if message.startswith("CHECKPOINT NOT SAVED")]
    assert len(warnings) == 2, "one a failed save, of rank 0"
    assert all(FULL in warning for warning in warnings)


@pytest.mark.parametrize("file", FILES)
def test_where_it_is_to_raise_every_rank_raises_what_one_met(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Disk(monkeypatch, file)

    def loop(context: RankContext) -> str:
        _, optimizer = trained()
        with pytest.raises(CheckpointWriteError) as error:
            rayzero.save_checkpoint(optimizer, tmp_path / "final", {})
        return str(error.value)

    said = run_ranks(loop, 2)
    assert said[0] == said[1]
    assert FULL in said[0]
    assert file.startswith("rank-") == said[0].startswith("rank 1: cannot write")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_call_is_raised_whatever_the_setting(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()

    def loop(context: RankContext) -> None:
        context.on_checkpoint_error = "warn"
        _, optimizer = trained()
        with pytest.raises(CheckpointError, match="not a checkpoint"):
            rayzero.save_checkpoint(optimizer, tmp_path / "final", {})

    run_ranks(loop, 1)


def test_further_models_are_not_saved_into_a_checkpoint_that_the_first_one_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier save left there is of another step."""
    disk = Disk(monkeypatch, "")

    def loop(context: RankContext) -> list[bool]:
        context.on_checkpoint_error = "warn"
        models = [trained(), trained()]
        saved = []
        for room in (True, False, True):
            disk.file = "" if room else "manifest.json"
            for model, optimizer in models:
                step(model, optimizer)
            for _, optimizer in models:
                saved.append(rayzero.save_checkpoint(optimizer, tmp_path / "last", {}) is not None)
                disk.file = ""
        return saved

    assert run_ranks(loop, 1, transport="grpc") == [[True, True, False, False, True, True]]
    for part in (tmp_path / "last", tmp_path / "last" / "model-1"):
        with CheckpointReader(part) as reader:
            assert reader.step == 3
