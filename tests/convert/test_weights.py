"""Named tensors that are read in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rayzero.convert import weights
from rayzero.convert.weights import Weights

TENSORS = {"a": torch.arange(35.0).view(5, 7), "b": torch.arange(11).to(torch.int16), "c": torch.empty(0, 3)}


class Maker(Mapping[str, Tensor]):
    """Makes tensors when it is asked for them, and counts."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.made.append(name)
        return TENSORS[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(TENSORS)

    def __len__(self) -> int:
        return len(TENSORS)


@pytest.mark.parametrize("part", [1 << 20, 4])
@pytest.mark.parametrize("of", ["file", "mapping"])
def test_a_tensor_is_copied_whole_whatever_the_parts(
    of: str, part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PART", part)
    save_file(TENSORS, tmp_path / "x.safetensors")
    opened = Weights(tmp_path / "x.safetensors" if of == "file" else TENSORS).open()
    for name, tensor in TENSORS.items():
        copy = torch.full((tensor.numel(),), -1.0)
        opened.copy_to(name, copy)
        assert torch.equal(copy, tensor.reshape(-1).float())
        assert torch.equal(opened.read(name), tensor)


def test_a_mapping_makes_a_tensor_once_for_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PART", 4)
    maker = Maker()
    opened = Weights(maker).open()
    maker.made.clear()  # each was made to learn its shape
    opened.copy_to("a", torch.empty(35))
    assert torch.equal(opened.part("b", 2, 5), TENSORS["b"][2:5])
    assert torch.equal(opened.part("a", 8, 9), TENSORS["a"].reshape(-1)[8:9])
    assert maker.made == ["a", "b", "a"]
