"""keep_last, keep_every: which checkpoints a save deletes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from saved import save_checkpoint
from torch import nn

import rayzero
from rayzero.checkpoint import reader
from rayzero.checkpoint.reader import delete_older
from rayzero.checkpoint.writer import sweep_stale
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import CheckpointError
from rayzero.testing import run_ranks


def save(directory: Path, step: int) -> None:
    """A complete checkpoint of any name."""
    saved = save_checkpoint(directory.parent / "elsewhere", step, {"weight": (4,)})
    saved.rename(directory)
    shutil.rmtree(directory.parent / "elsewhere")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_oldest_of_the_series_go_and_nothing_else(tmp_path: Path) -> None:
    for step, name in ((1, "step-1"), (2, "step-2"), (10, "step-10"), (3, "best"), (4, "other-1"), (11, "step-11")):
        save(tmp_path / name, step)
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "manifest.json").write_text("damaged")
    assert [path.name for path in delete_older(tmp_path / "step-10", 2)] == ["step-1"]
    assert names(tmp_path) == ["best", "other-1", "step-0", "step-10", "step-11", "step-2"]
    assert [path.name for path in delete_older(tmp_path / "step-11", 1)] == ["step-2", "step-10"]
    assert delete_older(tmp_path / "best", 1) == []


def test_every_nth_step_stays_beside_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5, 6, 7):
        save(tmp_path / f"step-{step}", step)
        delete_older(tmp_path / f"step-{step}", 2, keep_every=3)
    assert names(tmp_path) == ["step-3", "step-6", "step-7"]
    delete_older(tmp_path / "step-7", 1)
    assert names(tmp_path) == ["step-7"]


def test_links_folders_with_other_files_and_other_series_stay(tmp_path: Path) -> None:
    for step, name in ((1, "seed1-step-1"), (1, "seed2-step-1"), (2, "seed2-step-2"), (3, "seed2-step-3")):
        save(tmp_path / name, step)
    save(tmp_path / "kept", 0)
    (tmp_path / "seed2-step-0").symlink_to(tmp_path / "kept")
    (tmp_path / "seed2-step-2" / "notes.txt").write_text("mine")
    assert [path.name for path in delete_older(tmp_path / "seed2-step-3", 1)] == ["seed2-step-1"]
    assert names(tmp_path) == ["kept", "seed1-step-1", "seed2-step-0", "seed2-step-2", "seed2-step-3"]


def test_a_kill_in_between_leaves_what_a_sweep_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}", step)

    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reader.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            delete_older(tmp_path / "step-2", 1)
    assert names(tmp_path) == [".step-1.taken", "step-2"]
    sweep_stale(tmp_path)
    assert names(tmp_path) == ["step-2"]


def test_one_that_cannot_be_deleted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}", step)

    def refused(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    assert delete_older(tmp_path / "step-2", 1) == []
    assert "step-1: Permission denied" in caplog.text


def test_a_loop_keeps_its_newest(tmp_path: Path) -> None:
    with running_in(RankContext()):
        model = nn.Linear(4, 4)
        _, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()))
        for step in range(4):
            optimizer.step()
            rayzero.save_checkpoint(optimizer, tmp_path / f"step-{step + 1:06d}", {}, keep_last=1, keep_every=2)
        assert names(tmp_path) == ["step-000002", "step-000004"]


def test_older_checkpoints_go_once_all_models_have_saved(tmp_path: Path) -> None:
    def loop(context: RankContext) -> list[list[str]]:
        made = [nn.Linear(4, 4), nn.Linear(2, 2)]
        optimizers = [rayzero.prepare(model, torch.optim.SGD(model.parameters()))[1] for model in made]
        seen = []
        for step in range(2):
            for optimizer in optimizers:
                optimizer.step()
                rayzero.save_checkpoint(optimizer, tmp_path / f"at-{step}", {}, keep_last=1)
                seen.append(names(tmp_path))
        return seen

    assert run_ranks(loop, 1, 1) == [[["at-0"], ["at-0"], ["at-0", "at-1"], ["at-1"]]]
    assert "model-1" in names(tmp_path / "at-1")


def prepared(width: int) -> rayzero.ZeroOptimizer:
    model = nn.Linear(width, width)
    return rayzero.prepare(model, torch.optim.SGD(model.parameters()))[1]


def test_alone_every_model_keeps_its_own_newest_and_replaces_no_others(tmp_path: Path) -> None:
    with running_in(RankContext()):
        first, second = prepared(4), prepared(4)
        for step in range(2):
            for name, optimizer in (("first", first), ("second", second)):
                optimizer.step()
                rayzero.save_checkpoint(optimizer, tmp_path / name / f"step-{step}", {}, keep_last=1)
        assert [names(tmp_path / name) for name in ("first", "second")] == [["step-1"]] * 2
        with pytest.raises(CheckpointError, match=r"first/step-1 is the checkpoint of another model that this process"):
            rayzero.save_checkpoint(second, tmp_path / "first" / "step-1", {})
        again = prepared(4)  # a cell of a notebook that runs again, its first model still there
        again.step()
        rayzero.save_checkpoint(again, tmp_path / "first" / "step-1", {})
