"""The block codecs in C and in torch: the same bytes, and back the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.codecs import blocks
from rayzero.codecs.blocks import BLOCK, FourBits, Int8
from rayzero.errors import StoreError
from rayzero.kernels import native

LIBRARY = native.load()
ISAS = [] if isinstance(LIBRARY, str) else [native.ISAS[isa] for isa in LIBRARY.isas]
CODECS = [pytest.param(Int8(), 8, id="int8"), pytest.param(FourBits(), 4, id="4 bits")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {2: torch.int16, 4: torch.int32}


@pytest.fixture
def in_torch(monkeypatch):
    """As where there is no compiler."""
    monkeypatch.setattr(blocks, "_native", lambda bits: None)


def weights(numel, dtype):
    generator = torch.Generator().manual_seed(numel)
    spread = torch.logspace(-6, 1, numel, dtype=torch.float64)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * spread).to(dtype)


def same(codec, bits, isa, values):
    """Encode with C, compare with what torch makes of it, both ways."""
    rows = torch.zeros(codec.most_bytes(values.numel(), values.dtype), dtype=torch.uint8)
    native.NativeBlocks(LIBRARY, bits, isa).encode(values, rows)
    assert torch.equal(codec.encode(values), rows)
    ours, theirs = torch.full_like(values, 7.0), torch.full_like(values, 7.0)
    native.NativeBlocks(LIBRARY, bits, isa).decode(rows, ours)
    codec.decode(rows, theirs)
    numbers = ~theirs.isnan()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.view(BITS[ours.itemsize])[numbers], theirs.view(BITS[ours.itemsize])[numbers])


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("numel", [1, 31, 255, 256, 257, 10_000, 100_001])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("codec", "bits"), CODECS)
def test_weights_of_any_number(codec, bits, isa, dtype, numel):
    same(codec, bits, isa, weights(numel, dtype))


SPECIAL = {
    "zeros": [0.0, -0.0] * 200,
    "halves between two codes": [127.0, *[i + 0.5 for i in range(-127, 127)]],
    "one inf": [1.0, math.inf, 2.0, *[0.5] * 300],
    "minus inf": [1.0, -math.inf, 2.0, *[0.5] * 300],
    "one nan": [1.0, math.nan, 2.0, *[0.5] * 300],
    "subnormals": [1e-45, -3e-45, 1e-39, 1e-40] * 70,
    "scales below the least float": [1e-45, -1e-45] * 200,
    "from the smallest to the largest": [1e-45, 1e-30, 1e-10, 1.0, 6e4, 3.4e38, -3.4e38] * 50,
}


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("codec", "bits"), CODECS)
def test_special_values(codec, bits, isa, dtype, name):
    same(codec, bits, isa, torch.tensor(SPECIAL[name], dtype=torch.float64).to(dtype))


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("codec", "bits"), CODECS)
def test_any_bits(codec, bits, isa, dtype):
    @given(st.binary(min_size=4, max_size=1200))
    def holds(data):
        same(codec, bits, isa, torch.frombuffer(bytearray(data[: len(data) // 4 * 4]), dtype=dtype))

    holds()


@pytest.mark.parametrize(("codec", "bits"), CODECS)
def test_a_wrong_number_of_bytes_is_refused(codec, bits):
    rows = codec.encode(torch.randn(BLOCK + 1))
    with pytest.raises(StoreError, match=f"{len(rows) - 1} bytes are no {codec.name} encoding of 257 values"):
        codec.decode(rows[:-1], torch.empty(BLOCK + 1))
