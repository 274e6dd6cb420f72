"""Files to start from that were made to harm: refused in one line, at once, or they are what they say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.conftest import require_one_line
from checkpoint.test_hostile import PLACES, sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from rayzero.convert.formats.safetensors_folder import INDEX_FILE, WHOLE_FILE
from rayzero.convert.weights import Weights
from rayzero.errors import CheckpointError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(5, dtype=torch.bfloat16)}


def read_all(path: Path) -> dict[str, torch.Tensor]:
    opened = Weights(path).open()
    return {name: opened.read(name) for name in opened.decls}


def refusal_of(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_all(path)
    return require_one_line(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face directory of two files, as its cache has them: links to files elsewhere."""
    directory = tmp_path / "snapshot"
    directory.mkdir()
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"blob-{name}")
        (directory / f"{name}.safetensors").symlink_to(tmp_path / f"blob-{name}")
    index(directory, {name: f"{name}.safetensors" for name in TENSORS})
    return directory


def index(directory: Path, placed: Any) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def test_links_to_regular_files_are_followed(folder: Path) -> None:
    found = read_all(folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a.safetensors", INDEX_FILE])
@pytest.mark.parametrize("place", ["fifo", "socket", "zero", "null", "stdin", "itself", "folder", "sparse"])
def test_only_regular_files_are_read(folder: Path, name: str, place: str) -> None:
    (folder / name).unlink()
    PLACES[place](folder / name)
    for path in (folder, folder / name):
        assert str(folder) in refusal_of(path)


@pytest.mark.parametrize(
    "placed",
    [
        None, [], {"a": 5}, {"a": None}, {"a": ["a.safetensors"]}, {"a": {}}, {"a": "/etc/hostname"},
        {"a": "../blob-a"}, {"a": "x/../../blob-a"},
        {"a": "a\0.safetensors"}, {"a": "\ud800"}, {"a": ""}, {"a": "."}, {"a": "x" * 5000},
        {"a": "b.safetensors"},
    ],
)  # fmt: skip
def test_an_index_that_names_anything_else_is_refused(folder: Path, placed: Any) -> None:
    index(folder, placed)
    refusal_of(folder)


@pytest.mark.parametrize("text", ["", "[" * 200_000, '{"weight_map": ' + "[" * 200_000, "7", "null", '{"weight_map"'])
def test_an_index_that_is_no_json_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX_FILE).write_text(text)
    assert INDEX_FILE in refusal_of(folder)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800"])
def test_a_place_that_can_be_none_is_refused(path: str) -> None:
    refusal_of(Path(path))


def test_a_file_of_four_terabytes_with_a_right_header_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / WHOLE_FILE
    sparse(path)
    size = (1 << 42) - 8 - 128
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode().ljust(128)
    with path.open("r+b") as file:
        file.write((128).to_bytes(8, "little") + header)
    try:
        assert Weights(path).open().decls["a"].shape == (size,)
    except CheckpointError as error:  # where the system does not map so much
        require_one_line(error)


@settings(
    max_examples=2 * settings.default.max_examples,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_file_with_a_changed_header_is_refused_or_says_what_it_has(tmp_path: Path, data: Any) -> None:
    path = tmp_path / WHOLE_FILE
    save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    at = data.draw(st.integers(0, header - 1))
    content[at] = data.draw(st.integers(0, 255))
    os.unlink(path)
    path.write_bytes(content)
    try:
        opened = Weights(path).open()
        for name, decl in opened.decls.items():
            tensor = opened.read(name)
            assert (tuple(tensor.shape), str(tensor.dtype)) == (decl.shape, f"torch.{decl.dtype}")
    except CheckpointError as error:
        require_one_line(error)
