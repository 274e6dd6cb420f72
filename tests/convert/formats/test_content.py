"""What a source says of itself, asked once a tensor."""

from __future__ import annotations

import torch

from rayzero.convert.formats.content import Content, Param, WeightDecl, cut_into_files

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
