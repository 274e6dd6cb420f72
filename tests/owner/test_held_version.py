"""A version that is written while later updates overwrite it: its bits, its bound, and a disk that stands still."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from store.toy import WAIT, make_spec, random_grads
from torch import Tensor

from rayzero.checkpoint.tensor_file import DeferredTensor
from rayzero.errors import CheckpointAbandonedError, CheckpointWriteError
from rayzero.layout.shard_map import shard_map_for
from rayzero.memory.planner import plan_owner
from rayzero.owner.checkpoint import HeldVersion
from rayzero.protocol.messages import FileEntry
from rayzero.telemetry.names import CHECKPOINT_STALL_SECONDS
from rayzero.telemetry.recorder import MemoryRecorder
from tests.support.standing_disk import Disk, standing_still

from .owner import Owner, owner_of

SHARDS, NUMEL = 5, 700
SIZE = NUMEL * 4


def shards() -> list[Tensor]:
    return [torch.full((NUMEL,), float(index)) for index in range(SHARDS)]


def held(memory: list[Tensor], budget: int, *, decoded: bool = False) -> HeldVersion:
    def entry(values: Tensor) -> Tensor | DeferredTensor:
        return DeferredTensor(numel=NUMEL, dtype=torch.float32, make=lambda: values * 1) if decoded else values

    return HeldVersion({f"shard {index}": (index, entry(values)) for index, values in enumerate(memory)}, budget)


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("budget", [0, SIZE, 2 * SIZE, SHARDS * SIZE])
@pytest.mark.parametrize("seed", range(6))
def test_a_file_has_the_version_and_copies_stay_in_their_budget(
    seed: int, budget: int, decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updater and the writer run against each other, and change turns at random between two pieces."""
    monkeypatch.setattr("rayzero.owner.checkpoint.PIECE_BYTES", 1000)
    memory, draws = shards(), random.Random(seed)
    version = held(memory, budget, decoded=decoded)
    turn = threading.Semaphore(0)

    def update() -> None:
        for index, values in enumerate(memory):
            turn.acquire()
            version.protect(index)
            values.fill_(-1.0)

    with ThreadPoolExecutor(1) as updater:
        updates = updater.submit(update)
        written = {}
        for name, stream in version.streamed().items():
            found = []
            for part in stream.parts():
                found.append(part.clone())
                for _ in range(draws.randrange(3)):
                    turn.release()
            written[name] = torch.cat(found)
        for _ in memory:
            turn.release()
        updates.result(WAIT)
    assert all(torch.equal(written[f"shard {index}"], values) for index, values in enumerate(shards()))
    assert version.most_copied <= budget
    assert version.copied == 0
    assert all(bool((values == -1.0).all()) for values in memory)


def test_updates_wait_for_the_writer_once_the_copies_have_their_budget() -> None:
    memory = shards()
    version = held(memory, 2 * SIZE)
    first = version.streamed()["shard 0"]
    version.protect(1)
    version.protect(0)
    assert version.copied == 2 * SIZE
    with ThreadPoolExecutor(1) as updater:
        third = updater.submit(version.protect, 2)
        assert not third.done()  # no room, and nobody writes
        assert torch.equal(torch.cat([part.clone() for part in first.parts()]), shards()[0])
        third.result(WAIT)  # the first copy is written
    assert version.copied == version.most_copied == 2 * SIZE


@pytest.mark.parametrize("budget", [0, SIZE])
def test_who_waits_goes_on_when_nobody_wants_the_file_any_more(budget: int) -> None:
    version = held(shards(), budget)
    streams = version.streamed()
    with ThreadPoolExecutor(1) as updater:
        waits = updater.submit(lambda: [version.protect(index) for index in range(SHARDS)])
        version.cancel(CheckpointAbandonedError("a newer one"))
        waits.result(WAIT)
    with pytest.raises(CheckpointAbandonedError, match="a newer one"):
        next(iter(streams["shard 0"].parts()))
    assert version.copied == 0


# ---- an owner


ENOUGH = 1 << 20


@pytest.mark.promise("hidden", "checkpoints")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_go_on_while_a_version_is_written_and_its_file_is_that_of_a_save_nobody_disturbed(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(make_spec(1, dtypes=[dtype] * 3), checkpoint_copies=ENOUGH)
    grads = [random_grads(spec, seed) for seed in range(4)]
    with owner_of(spec) as owner:
        owner.take_step([grads[0]])
        alone = owner.service.write_checkpoint(1, tmp_path / "alone").result(WAIT)
    recorder = MemoryRecorder()
    with standing_still(monkeypatch) as still, owner_of(spec, recorder=recorder) as owner:
        owner.take_step([grads[0]])
        owner.service.begin_checkpoint(1, tmp_path / "beside").result(WAIT)
        assert still.asked.wait(WAIT)
        for step in range(1, 4):
            owner.take_step([grads[step]], step)
        owner.read(10, 4)  # all updates are made
        entry = owner.service.write_checkpoint(1, tmp_path / "beside")
        assert not entry.done()
        still.goes_on.set()
        assert entry.result(WAIT) == alone
    files = [tmp_path / f".{name}.tmp" / alone.name for name in ("alone", "beside")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert recorder.total(CHECKPOINT_STALL_SECONDS) > 0


@contextmanager
def standing_disk(
    monkeypatch: pytest.MonkeyPatch, folder: Path, copies: int
) -> Iterator[tuple[Owner, Disk, Future[FileEntry]]]:
    """An owner whose file of version 1 a disk does not take, with a step decided since. ``copies``: in bytes."""
    spec = replace(make_spec(1), checkpoint_copies=copies)
    with standing_still(monkeypatch) as still, owner_of(spec) as owner:
        owner.take_step([random_grads(spec, 0)])
        file = owner.service.write_checkpoint(1, folder)
        assert still.asked.wait(WAIT)
        owner.take_step([random_grads(spec, 1)], 1)
        yield owner, still, file


def test_without_copies_an_update_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_disk(monkeypatch, tmp_path / "step", 0) as (owner, still, file):
        waits = owner.service.read(0, 2, "compute")
        assert not waits.done()
        still.goes_on.set()
        waits.result(WAIT)
        assert file.result(WAIT).size_bytes > 0


def test_a_disk_that_fails_ends_the_file_and_no_update_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_disk(monkeypatch, tmp_path / "step", 0) as (owner, still, file):
        still.error = OSError(28, "No space left on device")
        still.goes_on.set()
        owner.read(10, 2)
        with pytest.raises(CheckpointWriteError, match="No space left"):
            file.result(WAIT)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_request_ends_the_file_that_nobody_wants_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lead is dead: a lead asks for one file at a time."""
    with standing_disk(monkeypatch, tmp_path / "older", ENOUGH) as (owner, still, older):
        owner.read(10, 2)
        owner.service.begin_checkpoint(2, tmp_path / "newer").result(WAIT)
        owner.service.settled().result(WAIT)  # the updater has seen the request
        still.goes_on.set()
        with pytest.raises(CheckpointAbandonedError, match="before an older version was written"):
            older.result(WAIT)
        assert owner.service.write_checkpoint(2, tmp_path / "newer").result(WAIT).size_bytes > 0
    assert not (tmp_path / ".older.tmp").exists()


def test_an_owner_that_closes_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        standing_disk(monkeypatch, tmp_path / "step", 0) as (owner, still, written),
        ThreadPoolExecutor(1) as closing,
    ):
        closed = closing.submit(owner.service.close)
        owner.read(10, 2)  # decided steps are finished, though the last one's update waits
        still.goes_on.set()
        closed.result(WAIT)
    assert written.exception(WAIT) is not None


@pytest.mark.parametrize(("budget", "planned"), [(0, 0), (1000, 1000), (1 << 40, 12)])
def test_the_plan_names_copies_and_no_more_than_masters_and_moments(budget: int, planned: int) -> None:
    spec = make_spec(1)
    layout = spec.layout
    plan = plan_owner(layout, shard_map_for(layout, 1, "balanced"), 0, 1, 1, splits=False, copies=budget)
    trained = sum(shard.numel for shard in layout.shards if layout.units[shard.unit].trainable)
    assert plan.copies == (planned if budget < trained * 12 else trained * planned)
    assert plan.total == plan.params + plan.master + plan.moments + plan.gradients + plan.staging + plan.copies
    assert ("checkpoint copies" in plan.describe()) == bool(budget)
