"""Which checkpoints a folder holds and which is the newest: by their manifests' steps, whatever their names."""

from __future__ import annotations

import json
import logging
import os

import pytest

from rayzero.checkpoint import Catalog, stale_folders, sweep_stale
from rayzero.checkpoint.writer import _replaced_path, check_target
from rayzero.convert.remote_checkpoints import newest_checkpoint
from rayzero.errors import CheckpointError


def test_the_newest_checkpoint_is_the_one_of_the_highest_step_whatever_its_name(written, tmp_path):
    for name, step in (("step-000009", 9), ("zero", 7), ("final", 1_000_000), ("step-999999", 999_999), ("best", 20)):
        written.save(tmp_path / name, step=step)
    assert newest_checkpoint(tmp_path) == tmp_path / "final"
    assert newest_checkpoint(str(tmp_path)) == tmp_path / "final"
    assert [(one.path.name, one.step) for one in Catalog.of(tmp_path).sound] == [
        ("zero", 7), ("step-000009", 9), ("best", 20), ("step-999999", 999_999), ("final", 1_000_000),
    ]  # fmt: skip


def test_a_runs_folder_may_be_named_and_a_file_may_not(written, tmp_path):
    assert newest_checkpoint(tmp_path / "not yet") is None
    written.save(tmp_path / "run" / "checkpoints" / "final", step=3)
    assert newest_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "final"
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is a file, not a folder of checkpoints"):
        newest_checkpoint(tmp_path / "file")


def test_of_two_checkpoints_of_one_step_the_newest_is_the_one_written_last(written, tmp_path):
    for written_s, name in enumerate(("b", "c", "a")):
        written.save(tmp_path / name, step=5)
        os.utime(tmp_path / name / "manifest.json", (written_s, written_s))
    assert newest_checkpoint(tmp_path) == tmp_path / "a"


def test_what_is_no_checkpoint_is_not_listed(written, tmp_path):
    written.save(tmp_path / "final", step=3)
    written.stage(tmp_path / "step-000009")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "latest").symlink_to("final")
    written.save(tmp_path / "final" / "model-1", step=9)  # the second model of the same checkpoint
    assert newest_checkpoint(tmp_path) == tmp_path / "final"
    assert len(Catalog.of(tmp_path).sound) == 1
    assert newest_checkpoint(tmp_path / "nothing") is None
    assert newest_checkpoint(tmp_path / "notes") is None


def manifest_changed(path):
    described = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(described | {"step": 99}))


def manifest_cut(path):
    os.truncate(path / "manifest.json", 100)


def file_cut(path):
    os.truncate(path / "owner-001.safetensors", 100)


def file_gone(path):
    (path / "rank-0000.safetensors").unlink()


@pytest.mark.parametrize("damage", [manifest_changed, manifest_cut, file_cut, file_gone])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_it(written, tmp_path, damage, caplog):
    written.save(tmp_path / "whole", step=3)
    written.save(tmp_path / "hurt", step=9)
    assert newest_checkpoint(tmp_path) == tmp_path / "hurt"
    damage(tmp_path / "hurt")
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == tmp_path / "whole"
    [warning] = caplog.messages
    assert str(tmp_path / "hurt") in warning
    assert list(Catalog.of(tmp_path).damaged) == [tmp_path / "hurt"]


def test_what_interrupted_saves_left_under_any_name_is_put_right(written, tmp_path):
    replaced = written.save(tmp_path / "final", step=3)
    (tmp_path / "final").rename(_replaced_path(tmp_path / "final"))  # the first of two renames; then the power went
    written.stage(tmp_path / "best")
    (tmp_path / "..hidden.taken").mkdir()
    assert newest_checkpoint(tmp_path) is None
    assert sweep_stale(tmp_path) == ["..hidden.taken", ".best.tmp", ".final.replaced"]
    assert newest_checkpoint(tmp_path) == tmp_path / "final"
    assert replaced.step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final"]


def test_folders_and_files_of_others_are_not_swept(written, tmp_path):
    for name in (".cache.tmp", ".old.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / ".file.tmp").write_text("mine")
    (tmp_path / ".link.tmp").symlink_to(".cache.tmp")
    assert stale_folders(tmp_path) == []
    assert sweep_stale(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4


def test_one_checkpoints_leftovers_are_swept_alone(written, tmp_path):
    for name in ("final", "best"):
        written.stage(tmp_path / name)
    assert sweep_stale(tmp_path, "final") == [".final.tmp"]
    assert [path.name for path in tmp_path.iterdir()] == [".best.tmp"]


STAGED = r"\.final\.\w+: names of this form .*; name a new directory"
NO_NAME = r"cannot save to '.*a\\\w+.*': no file can have this name; name a new dir"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((f".final.{state}", STAGED) for state in ("tmp", "taken", "replaced")),
        *((name, NO_NAME) for name in ("a\0b", "a\0b/c", "a\ud800")),
    ],
    ids=ascii,
)
def test_a_name_that_saves_stage_their_files_under_or_no_file_can_have_is_refused(tmp_path, name, said):
    with pytest.raises(CheckpointError, match=said):
        check_target(tmp_path / name)
