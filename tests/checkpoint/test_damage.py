"""A damaged or missing checkpoint is one clear line; a save that dies leaves the old state readable."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayzero.checkpoint import CheckpointReader, staging_path, sweep_stale, write_rank_state
from rayzero.checkpoint import writer as writer_module
from rayzero.convert.remote_checkpoints import newest_checkpoint
from rayzero.errors import CheckpointError
from rayzero.protocol.messages import MASTER, canonical_json

from .test_round_trip import flip_byte


def refusal(directory: Path, *, read: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(directory).verify() if read else CheckpointReader(directory)
    text = str(caught.value)
    assert "\n" not in text
    return text


def edit_manifest(directory: Path, change, *, rehash: bool = True) -> None:
    path = directory / "manifest.json"
    described = json.loads(path.read_text())
    described.pop("sha256")
    change(described)
    digest = hashlib.sha256(canonical_json(described).encode()).hexdigest() if rehash else "0" * 64
    path.write_text(json.dumps(described | {"sha256": digest}))


def test_a_missing_checkpoint_names_those_beside_it(written, directory):
    assert refusal(directory).endswith(f"no checkpoint at {directory}; there is no such folder")
    written.save(directory)
    assert f"checkpoints in {directory.parent}: step-000030" in refusal(directory.with_name("step-000031"))


def test_a_folder_without_a_manifest_is_not_a_checkpoint(tmp_path):
    assert "is not a checkpoint: it has no manifest.json" in refusal(tmp_path)


def test_a_flipped_byte_is_found_by_verify_and_by_the_read_that_meets_it(written, directory):
    written.save(directory, num_owners=1)
    flip_byte(directory / "owner-000.safetensors", -1)
    assert "owner-000.safetensors is damaged: its hash is" in refusal(directory, read=True)
    reader = CheckpointReader(directory)
    last = list(reader.manifest.owner_files[0].content.values())
    broken = next(c for c in last if c["kind"] == "compute" and c["stop"] == 81)
    assert torch.equal(reader.read_slice("w", MASTER, 0, 10), written.values["w", MASTER][:10])
    with pytest.raises(CheckpointError, match=r"owner-000.safetensors is damaged: compute of 'frozen'"):
        reader.read_slice("frozen", "compute", broken["stop"] - 1, broken["stop"])


def test_a_flipped_byte_in_a_rank_file_is_found_when_it_is_read(written, directory):
    written.save(directory)
    flip_byte(directory / "rank-0000.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"rank-0000\.safetensors is damaged"):
        CheckpointReader(directory).rank_state(0)


def cut(directory: Path) -> None:
    path = directory / "owner-000.safetensors"
    os.truncate(path, path.stat().st_size - 8)


def changed(change: Callable[[dict[str, Any]], object], *, rehash: bool = True) -> Callable[[Path], None]:
    return lambda directory: edit_manifest(directory, change, rehash=rehash)


FOUND_AT_ONCE: dict[str, tuple[Callable[[Path], None], str]] = {
    "file cut": (cut, r"owner-000.safetensors has [0-9,]+ bytes, but the manifest says [0-9,]+"),
    "file missing": (
        lambda directory: (directory / "rank-0000.safetensors").unlink(),
        "rank-0000.safetensors is missing",
    ),
    "manifest's hash": (
        changed(lambda d: d.update(step=31), rehash=False),
        "manifest.json is damaged: it says its hash is 000000000000",
    ),
    "entries": (changed(lambda d: d.update(step=31)), "its content digest is"),
    "no field": (changed(lambda d: d.pop("hyper")), "lacks or misstates a field: hyper is missing"),
    "version": (changed(lambda d: d.update(version=1)), "json has format version 1, this RayZero reads version 2"),
    "newer version": (
        changed(lambda d: d.update(version=99)),
        "json was written by a newer RayZero: it has format version 99, this RayZero reads version 2",
    ),
}


@pytest.mark.parametrize(("damage", "said"), FOUND_AT_ONCE.values(), ids=FOUND_AT_ONCE.keys())
def test_damage_is_found_when_the_checkpoint_is_opened(written, directory, damage, said):
    written.save(directory)
    damage(directory)
    assert re.search(said, refusal(directory))


def test_a_manifest_with_another_files_hash_is_found_by_verify(written, directory):
    written.save(directory)
    edit_manifest(directory, lambda d: d["owner_files"][0].update(sha256="f" * 64))
    assert "but the manifest says ffffffffffff" in refusal(directory, read=True)


@pytest.mark.parametrize("name", ["manifest.json", "owner-000.safetensors"])
def test_a_manifest_cut_anywhere_or_file_cut_anywhere_is_refused(written, directory, name):
    written.save(directory)
    whole = (directory / name).read_bytes()
    for length in range(0, len(whole) - 1, max(1, len(whole) // 23)):
        (directory / name).write_bytes(whole[:length])
        refusal(directory)


def test_a_file_that_never_arrived_stops_the_commit(written, directory):
    owners, ranks = written.stage(directory)
    (staging_path(directory) / owners[1].name).unlink()
    with pytest.raises(CheckpointError, match=r"owner-001.safetensors should have .* it is not there.*same storage"):
        written.commit(directory, owners, ranks)
    assert not directory.exists()


def test_leftovers_of_an_interrupted_save_do_not_end_up_in_the_next(written, directory):
    written.stage(directory, num_owners=5)  # died before its manifest
    written.save(directory, num_owners=2)
    assert sorted(path.name for path in directory.iterdir()) == [
        "manifest.json", "owner-000.safetensors", "owner-001.safetensors", "rank-0000.safetensors",
    ]  # fmt: skip
    CheckpointReader(directory).verify()


def test_a_loop_state_that_is_not_json_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="rank 2: the loop state is not JSON-able"):
        write_rank_state(tmp_path / ".step-000001.tmp", 2, {"x": torch.zeros(1)}, {})


def _die_at(written, directory: Path, point: str) -> None:
    """Save in a process that kills itself right before ``point``."""

    def die(*args: object, **named: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(writer_module, point, die)
    written.save(directory)


@pytest.mark.parametrize("point", ["_write_file", "_check_staged", "fsync", "_rename_into_place"])
def test_a_save_killed_before_its_rename_leaves_the_old_state(written, directory, point):
    written.save(directory)
    before = CheckpointReader(directory).digest
    written.values["w", MASTER].add_(1)
    for target in (directory, directory.with_name("step-000060")):
        process = multiprocessing.get_context("fork").Process(target=_die_at, args=(written, target, point))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    sweep_stale(directory.parent)
    assert newest_checkpoint(directory.parent) == directory
    reader = CheckpointReader(directory)
    reader.verify()
    assert reader.digest == before
    assert [path.name for path in directory.parent.iterdir()] == ["step-000030"]


def test_every_file_and_its_name_is_durable_before_the_checkpoint_has_its_own(written, directory, monkeypatch):
    """Else a power failure could leave a checkpoint that is whole by its name and lacks files."""
    durable: set[int] = set()
    lacking: list[str] = []
    fsync, rename = os.fsync, writer_module._rename_into_place

    def make_durable(file: int) -> None:
        durable.add(os.fstat(file).st_ino)
        fsync(file)

    def rename_into_place(taken: Path, target: Path) -> None:
        lacking.extend(path.name for path in (taken, *taken.iterdir()) if path.stat().st_ino not in durable)
        rename(taken, target)

    monkeypatch.setattr(os, "fsync", make_durable)
    monkeypatch.setattr(writer_module, "_rename_into_place", rename_into_place)
    written.save(directory)
    assert lacking == []
    assert directory.parent.stat().st_ino in durable, "so is the name, afterwards"


@pytest.mark.parametrize("replaces", [False, True])
def test_a_save_whose_folder_cannot_be_made_durable_is_saved_with_a_warning(
    written, directory, replaces, monkeypatch, caplog
):
    """After the rename it is there and whole: it would be found, so it is not reported as failed."""
    if replaces:
        written.save(directory)
        written.values["w", MASTER].add_(1)
    fsync = writer_module.fsync

    def fail(folder: Path) -> None:
        if folder == directory.parent:
            raise OSError(errno.EIO, "Input/output error")
        fsync(folder)

    monkeypatch.setattr(writer_module, "fsync", fail)
    info = written.save(directory)
    with CheckpointReader(directory) as reader:
        reader.verify()
        assert reader.digest == info.digest
    [warning] = caplog.messages
    assert f"the checkpoint {directory} is complete, but" in warning
    assert "Input/output error" in warning
    monkeypatch.undo()
    again = written.save(directory)  # nothing that was left stands in its way
    assert CheckpointReader(directory).digest == again.digest
    assert [path.name for path in directory.parent.iterdir()] == ["step-000030"]
