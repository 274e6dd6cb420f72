"""Buffers of every dtype that safetensors files can hold come back with the same bits, in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import rayzero
from rayzero.checkpoint.state_values import from_bytes, to_bytes
from rayzero.checkpoint.tensor_file import TensorFile, TensorFileWriter, declare
from rayzero.convert.conversion import convert, export_full
from rayzero.errors import CheckpointError, UnsupportedError

HELD = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


def bits(dtype: torch.dtype, seed: int) -> Tensor:
    """3 x 8 bytes of a dtype: (3, 8 / bytes of an element)."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (24,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype).view(3, -1)


class Model(nn.Module):
    """A layer, and a buffer of each dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for dtype in HELD:
            self.register_buffer(str(dtype).replace(".", "_"), bits(dtype, seed))
        self.register_buffer("scalar", torch.tensor(seed, dtype=torch.uint16))
        self.register_buffer("nothing", torch.empty(0, 4, dtype=torch.float8_e5m2))


def same(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same dtype, shape and bits."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.reshape(-1).contiguous().view(torch.uint8), other.reshape(-1).contiguous().view(torch.uint8)
    )


def prepared(seed: int, **sources: Any) -> tuple[Model, Any]:
    """The model with an optimizer of RayZero."""
    model = Model(seed)
    return rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), **sources)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = prepared(1)
    model.layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    info = rayzero.save_checkpoint(optimizer, tmp_path_factory.mktemp("saved") / "step-1")
    assert info is not None
    return Path(info.path)


def exported(source: Path, out: Path) -> dict[str, Tensor]:
    export_full(source, out / "model.safetensors")
    return load_file(out / "model.safetensors")


def as_hf(source: Path, out: Path, dtype: torch.dtype | None = torch.bfloat16) -> dict[str, Tensor]:
    convert(source, out / "hf", to="hf", dtype=dtype)
    return load_file(out / "hf" / "model.safetensors")


def through_dcp(source: Path, out: Path) -> dict[str, Tensor]:
    convert(source, out / "dcp", to="dcp")
    return as_hf(out / "dcp", out, None)  # DCP does not tell buffers from parameters


def through_hf(source: Path, out: Path) -> dict[str, Tensor]:
    as_hf(source, out)
    convert(out / "hf", out / "again", to="hf")
    return load_file(out / "again" / "model.safetensors")


def resumed(source: Path, out: Path) -> dict[str, Tensor]:
    model, _ = prepared(2, resume=source)
    return dict(model.named_buffers())


def started(source: Path, out: Path) -> dict[str, Tensor]:
    model, _ = prepared(2, weights=source)
    return dict(model.named_buffers())


def started_from_hf(source: Path, out: Path) -> dict[str, Tensor]:
    as_hf(source, out)
    return started(out / "hf", out)


WAYS = [exported, as_hf, through_dcp, through_hf, resumed, started, started_from_hf]


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_of_any_dtype_comes_back(
    way: Callable[[Path, Path], dict[str, Tensor]], saved: Path, tmp_path: Path
) -> None:
    found = way(saved, tmp_path)
    differs = [name for name, expected in Model(1).named_buffers() if not same(found[name], expected)]
    assert differs == []


def test_so_does_one_that_a_loop_gives_to_be_saved() -> None:
    held = dict(Model(1).named_buffers()) | {"wide": torch.ones(2, dtype=torch.complex128)}
    found = from_bytes(to_bytes(held))
    assert [name for name in held if not same(found[name], held[name])] == []


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.ones(2, dtype=torch.complex128), "'x' has dtype torch.complex128, which safetensors files cannot hold"),
        (torch.ones((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "'x' is a .* without dimensions"),
    ],
)
def test_one_that_safetensors_files_cannot_hold_is_refused_by_name(tensor: Tensor, said: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=said):
        TensorFileWriter(tmp_path / "x.safetensors", {"x": declare(tensor)})


def test_a_file_with_half_a_byte_is_damaged(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    with pytest.raises(CheckpointError, match=r"dtype F4 has shape \[2, 3\], and its last size has to be even"):
        TensorFile(tmp_path / "x.safetensors")
