"""Folders of Hugging Face whose files say more than their index, or that have two sets of weights; and what any source
says of itself, asked once a tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from checkpoint.conftest import require_one_line
from safetensors.torch import save_file
from torch import Tensor

from rayzero.convert.formats.content import Content, Param, WeightDecl, cut_into_files
from rayzero.convert.formats.safetensors_folder import INDEX_FILE, WHOLE_FILE
from rayzero.convert.weights import Weights
from rayzero.errors import CheckpointError

from .foreign import refusal_of


def write(folder: Path, files: Mapping[str, Mapping[str, float]], placed: Mapping[str, str] | None = None) -> Path:
    """files: file -> tensor -> the value of its elements. placed: the index, if there is one."""
    folder.mkdir()
    for file, tensors in files.items():
        save_file({name: torch.full((3,), value) for name, value in tensors.items()}, folder / file)
    if placed is not None:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": placed}))
    return folder


def read(path: Path) -> dict[str, float]:
    opened = Weights(path).open()
    found: dict[str, Tensor] = {name: opened.read(name) for name in opened.decls}
    return {name: tensor[0].item() for name, tensor in found.items()}


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    return require_one_line(caught.value)


def test_tensors_that_the_index_leaves_out_are_there(tmp_path: Path) -> None:
    """As transformers has it: all tensors of the files that the index names, and no other file's."""
    files = {
        "one.safetensors": {"a": 1.0, "b": 2.0},
        "two.safetensors": {"c": 3.0},
        "consolidated.safetensors": {"d": 4.0},
    }
    folder = write(tmp_path / "hf", files, {"a": "one.safetensors", "c": "two.safetensors"})
    assert read(folder) == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert read(folder / INDEX_FILE) == {"a": 1.0, "b": 2.0, "c": 3.0}


@pytest.mark.parametrize(
    "placed", [{"a": "one.safetensors", "b": "two.safetensors"}, {"b": "two.safetensors", "c": "one.safetensors"}]
)
def test_a_tensor_in_two_files_of_the_index_is_refused_by_name(tmp_path: Path, placed: Mapping[str, str]) -> None:
    files = {"one.safetensors": {"a": 1.0, "c": 3.0}, "two.safetensors": {"a": 9.0, "b": 2.0}}
    folder = write(tmp_path / "hf", files, placed)
    said = refused(folder)
    assert "'a'" in said
    assert "one.safetensors" in said
    assert "two.safetensors" in said
    assert "'a'" in refusal_of(folder)


def test_a_single_file_beside_an_index_is_refused_and_each_can_be_given_by_its_path(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", {WHOLE_FILE: {"a": 9.0}, "one.safetensors": {"a": 1.0}}, {"a": "one.safetensors"})
    said = refused(folder)
    assert f"both {WHOLE_FILE} and {INDEX_FILE}" in said
    assert str(folder) in said
    assert read(folder / WHOLE_FILE) == {"a": 9.0}
    assert read(folder / INDEX_FILE) == {"a": 1.0}


def test_an_index_of_the_single_file_is_no_second_set(tmp_path: Path) -> None:
    assert read(write(tmp_path / "hf", {WHOLE_FILE: {"a": 1.0}}, {"a": WHOLE_FILE})) == {"a": 1.0}


def test_an_index_of_the_single_file_and_others_is_refused(tmp_path: Path) -> None:
    """transformers would read the single file and leave the other one's tensors as they were initialized."""
    files = {WHOLE_FILE: {"a": 1.0}, "two.safetensors": {"b": 2.0}}
    folder = write(tmp_path / "hf", files, {"a": WHOLE_FILE, "b": "two.safetensors"})
    assert f"both {WHOLE_FILE} and {INDEX_FILE}" in refused(folder)


# ---- what a source says of itself -----------------------------------------------------------------------------------


CONTENT = Content(
    params={"w": Param(decl=WeightDecl((2,), "float32")), "mean": Param(decl=WeightDecl((3,), "float32"))},
    buffers={"mean": WeightDecl((3,), "float32"), "count": WeightDecl((), "int64")},
    tied={"head": "w"},
)


def test_tensors_are_listed_once_however_often_each_is_asked_about() -> None:
    """A list for every tensor would take a minute for 20,000."""
    assert CONTENT.decls is CONTENT.decls
    assert list(CONTENT.decls) == ["w", "mean", "head", "count"]


def test_parameters_are_cast_under_all_their_names_and_no_buffer() -> None:
    cast = {name: CONTENT.cast_dtype(name, torch.bfloat16) for name in CONTENT.decls}
    assert cast == {"w": torch.bfloat16, "head": torch.bfloat16, "mean": torch.float32, "count": torch.int64}


def test_a_file_is_filled_to_the_last_byte_and_what_is_larger_is_alone() -> None:
    assert list(cut_into_files([2, 2, 2, 9, 1], lambda size: size, 4)) == [[2, 2], [2], [9], [1]]
    assert list(cut_into_files([], len, 4)) == [[]]
