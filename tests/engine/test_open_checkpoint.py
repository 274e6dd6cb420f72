"""Checkpoints that are written while training goes on: their bits, and what waits for what. Deaths meanwhile are in
tests/elastic/test_open_checkpoint.py."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.checkpoint import CheckpointReader
from rayzero.checkpoint.manifest import MANIFEST
from rayzero.engine.context import OpenCheckpoint, RankContext, running_in
from rayzero.errors import CheckpointWriteError
from rayzero.store.shm.signals import why_no_sharing
from rayzero.testing import run_ranks
from tests.support.standing_disk import Disk, standing_still

from .models import fit, prepared_copy, same_bits, seeded
from .test_comeback import Small

WAIT = 60.0  # seconds after which a test is broken
LAST = 6


BASE = seeded(Small, 1)


def prepared(config: ZeroConfig | None = None) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    return prepared_copy(BASE, torch.optim.AdamW, config, lr=1e-3)


def files_of(checkpoint: Path) -> dict[str, str]:
    """Name -> hash of each owner's file, as the manifest says. (Ranks' files have generators, of which threads share
    Python's with their links.)"""
    described = json.loads((checkpoint / MANIFEST).read_text())
    return {entry["name"]: entry["sha256"] for entry in described["owner_files"]}


TRANSPORTS = ["inproc", "grpc", pytest.param("shm", marks=pytest.mark.skipif(why_no_sharing() is not None, reason="-"))]


@pytest.mark.spread(2)
@pytest.mark.parametrize("moments", ["fp32", "int8"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_is_the_checkpoint_that_training_would_have_waited_for(
    transport: Any, moments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps and a write are made while no byte of the owners' files is written."""

    def loop(context: RankContext, beside: bool, disk: Disk | None) -> Any:
        model, optimizer = prepared(ZeroConfig(moments=moments))
        rayzero.track()
        opened = saved = None
        for number in range(LAST):
            fit(model, optimizer, [number], context.rank)
            if number == 1 and beside:
                opened = rayzero.begin_checkpoint(optimizer, tmp_path / "beside", {"step": 2})
                with torch.no_grad():
                    model.head.weight.mul_(2.0)
            elif number == 1:
                saved = rayzero.save_checkpoint(optimizer, tmp_path / "alone", {"step": 2})
                with torch.no_grad():
                    model.head.weight.mul_(2.0)
        if opened is not None and disk is not None:
            weights = rayzero.full_state_dict(model)
            assert not opened.done()
            assert not (tmp_path / "beside").exists()
            rayzero.mean_over_ranks(1.0)  # all ranks have looked
            disk.goes_on.set()
            return opened.result(), weights
        return saved, rayzero.full_state_dict(model)

    alone = run_ranks(lambda context: loop(context, False, None), transport=transport)
    with standing_still(monkeypatch) as disk:
        beside = run_ranks(lambda context: loop(context, True, disk), transport=transport)
    assert [saved.digest for saved, _ in beside] == [saved.digest for saved, _ in alone]
    assert files_of(tmp_path / "beside") == files_of(tmp_path / "alone")
    for (_, ours), (_, theirs) in zip(beside, alone, strict=True):
        assert same_bits(ours, theirs)
    with CheckpointReader(tmp_path / "beside") as reader, CheckpointReader(tmp_path / "alone") as other:
        assert reader.step == 2
        for rank in range(2):
            assert reader.rank_state(rank)[0]["loop_state"] == other.rank_state(rank)[0]["loop_state"]
            assert same_bits(reader.buffers(rank), other.buffers(rank))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "beside"]


def test_the_next_one_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, waited = OpenCheckpoint.finish, []

    with standing_still(monkeypatch) as disk, running_in(RankContext()):

        def watched(checkpoint: OpenCheckpoint) -> None:
            waited.append((checkpoint.directory.name, checkpoint.done()))
            disk.goes_on.set()
            finish(checkpoint)

        monkeypatch.setattr(OpenCheckpoint, "finish", watched)
        model, optimizer = prepared()
        fit(model, optimizer, [0])
        first = rayzero.begin_checkpoint(optimizer, tmp_path / "step-1")
        assert disk.asked.wait(WAIT)
        fit(model, optimizer, [1])
        second = rayzero.begin_checkpoint(optimizer, tmp_path / "step-2", keep_last=1)
        assert first.done()
        assert waited == [("step-1", False)]
        assert second.result().step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_an_error_that_nobody_has_had_comes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_still(monkeypatch) as disk, running_in(RankContext()):
        disk.error = OSError(28, "No space left on device")
        disk.goes_on.set()
        model, optimizer = prepared()
        fit(model, optimizer, [0])
        rayzero.begin_checkpoint(optimizer, tmp_path / "step-1")
        fit(model, optimizer, [1])
        with pytest.raises(CheckpointWriteError, match="No space left"):
            rayzero.begin_checkpoint(optimizer, tmp_path / "step-2")
        disk.error = None
        assert rayzero.begin_checkpoint(optimizer, tmp_path / "step-2").result().step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


@pytest.mark.promise("observable", "checkpoints")
def test_a_full_disk_is_a_warning_where_the_run_wants_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with standing_still(monkeypatch) as disk, running_in(RankContext(on_checkpoint_error="warn")):
        disk.error = OSError(28, "No space left on device")
        disk.goes_on.set()
        model, optimizer = prepared()
        fit(model, optimizer, [0])
        assert rayzero.begin_checkpoint(optimizer, tmp_path / "step-1").result() is None
        fit(model, optimizer, [1])
    assert "CHECKPOINT NOT SAVED" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_a_loop_waits_for_it_and_for_its_copy_in_remote_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path / 'remote'}"
    with standing_still(monkeypatch) as disk, running_in(RankContext()) as context:
        model, optimizer = prepared()
        fit(model, optimizer, [0])
        rayzero.begin_checkpoint(optimizer, tmp_path / "step-1", upload_to=url)
        context.on_close(lambda _: disk.goes_on.set())  # called first
        assert not (tmp_path / "step-1").exists()
    assert files_of(tmp_path / "step-1") == files_of(tmp_path / "remote" / "step-1")


def test_the_end_of_a_loop_names_an_error_that_nobody_has_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with standing_still(monkeypatch) as disk, running_in(RankContext()):
        disk.error = OSError(28, "No space left on device")
        disk.goes_on.set()
        model, optimizer = prepared()
        fit(model, optimizer, [0])
        rayzero.begin_checkpoint(optimizer, tmp_path / "step-1")
    (said,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert said.startswith(f"CHECKPOINT NOT SAVED: {tmp_path / 'step-1'}: cannot write")
