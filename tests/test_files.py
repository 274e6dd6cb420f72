"""A small file replaced as a whole, and a folder made as a whole."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from rayzero.files import new_folder, replace_file


def test_text_and_bytes_replace_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    replace_file(path, "first, é")
    assert path.read_bytes() == "first, é".encode()
    replace_file(path, b"\0second")
    assert path.read_bytes() == b"\0second"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_reader_sees_the_old_or_the_new_file_and_never_a_part(tmp_path: Path) -> None:
    path, whole = tmp_path / "a", {b"x" * 100_000, b"y" * 300_000}
    replace_file(path, min(whole))
    ended = threading.Event()

    def write() -> None:
        for _ in range(50):
            for content in whole:
                replace_file(path, content)
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not ended.is_set():
        seen.add(path.read_bytes())
    writer.join()
    assert seen <= whole


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    replace_file(path, "old")
    write = Path.write_bytes

    def half(self: Path, content: bytes) -> int:
        write(self, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_gets_its_name_when_it_is_full_and_what_a_killed_process_left_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a" / ".b.tmp").mkdir(parents=True)
    (tmp_path / "a" / ".b.tmp" / "left").touch()
    with new_folder(tmp_path / "a" / "b") as folder:
        (folder / "x").touch()
        assert not (tmp_path / "a" / "b").exists()
    assert os.listdir(tmp_path / "a") == ["b"]
    assert os.listdir(tmp_path / "a" / "b") == ["x"]


def make_folder(target: Path, fails: bool) -> None:
    with new_folder(target) as folder:
        (folder / "x").touch()
        if fails:
            raise OSError(errno.ENOSPC, "full")


def test_nothing_is_left_of_a_folder_that_could_not_be_filled_or_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"):
        make_folder(tmp_path / "a", fails=True)
    assert os.listdir(tmp_path) == []
    (tmp_path / "a" / "kept").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty"):
        make_folder(tmp_path / "a", fails=False)
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == ["kept"]
