"""What every codec must do, and each codec's stated error."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.codecs import CODECS, RAW, codec_for
from rayzero.config.choices import CpuCompressionMethod
from rayzero.errors import StoreError
from tests.codecs.bounds import stated_error

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PAIRS = [
    pytest.param(codec, dtype, id=f"{codec.name}-{str(dtype).removeprefix('torch.')}")
    for codec in CODECS.values()
    for dtype in FLOATS
    if codec.takes(dtype)
]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def round_trip(codec, values):
    encoded = codec.encode(values)
    assert (encoded.dtype, encoded.dim()) == (torch.uint8, 1)
    assert encoded.numel() <= codec.most_bytes(values.numel(), values.dtype)
    back = torch.full_like(values, 7.0)
    codec.decode(encoded.clone(), back)
    return back


def same_bits(a, b):
    return torch.equal(a.view(BITS[a.itemsize]), b.view(BITS[b.itemsize]))


def check(codec, values):
    """The round trip keeps the stated error; a value whose bound is nan comes back as nan, an infinite one's as inf or
    near its size."""
    back, bound = round_trip(codec, values), stated_error(codec, values)
    if not codec.lossy:
        assert same_bits(back, values)
        return
    kept = bound.isfinite()
    nan, inf = values.isnan(), values.isinf()
    error = (back.double() - values.double()).abs()
    assert (error <= bound)[kept & ~nan & ~inf].all()
    assert back[bound.isnan()].isnan().all()
    assert back[nan].isnan().all()
    assert (back[inf & kept] == values[inf & kept]).all()
    wild = bound == torch.inf
    assert (back[wild].isinf() | (back[wild].abs() >= torch.finfo(torch.float16).max)).all()


def values_of(dtype):
    """Tensors of any bits: every float there is, in runs as long as a block and a bit."""
    size = dtype.itemsize
    few = st.binary(min_size=0, max_size=40 * size)
    repeated = st.tuples(st.binary(min_size=size, max_size=8 * size), st.integers(1, 80)).map(
        lambda pair: pair[0] * pair[1]
    )
    return (few | repeated).map(
        lambda data: (
            torch.frombuffer(bytearray(data[: len(data) // size * size]), dtype=dtype)
            if len(data) >= size
            else torch.empty(0, dtype=dtype)
        )
    )


@pytest.mark.parametrize(("codec", "dtype"), PAIRS)
def test_any_bits_come_back_within_the_stated_error(codec, dtype):
    @given(values=values_of(dtype))
    def holds(values):
        check(codec, values)

    holds()


@pytest.mark.parametrize("numel", [1, 2, 255, 256, 257, 100_001, 131_072, 131_073, 300_000])
@pytest.mark.parametrize(("codec", "dtype"), PAIRS)
def test_weights_of_any_number_come_back_within_the_stated_error(codec, dtype, numel):
    generator = torch.Generator().manual_seed(numel)
    check(codec, (torch.randn(numel, generator=generator, dtype=torch.float64) * 0.02).to(dtype))


SPECIAL = {
    "zeros": [0.0, -0.0] * 200,
    "one inf": [1.0, math.inf, 2.0, *[0.5] * 300],
    "one nan": [1.0, math.nan, 2.0, *[0.5] * 300],
    "subnormals": [1e-45, -3e-45, 1e-39, 1e-40] * 70,
    "half subnormals": [6e-8, -1.2e-7, 3e-5, 5.9e-5] * 70,
    "from the smallest to the largest": [1e-45, 1e-30, 1e-10, 1.0, 6e4, 3.4e38, -3.4e38] * 50,
    "65,519, 65,520": [65519.0, 65520.0, -65520.0, 65504.0],
    "nothing": [],
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize(("codec", "dtype"), PAIRS)
def test_special_values_come_back_within_the_stated_error(codec, dtype, name):
    check(codec, torch.tensor(SPECIAL[name], dtype=torch.float64).to(dtype))


@pytest.mark.parametrize(("codec", "dtype"), PAIRS)
def test_the_stated_error_is_not_far_from_what_happens(codec, dtype):
    """A bound that nothing comes near would say nothing."""
    if not codec.lossy:
        pytest.skip("no error")
    values = (torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    error = (round_trip(codec, values).double() - values.double()).abs()
    assert (error / stated_error(codec, values)).max() > 0.9


@pytest.mark.parametrize(("codec", "dtype"), PAIRS)
def test_an_encoding_does_not_depend_on_threads(codec, dtype):
    values = (torch.randn(700_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = codec.encode(values).clone()
        torch.set_num_threads(4)
        assert torch.equal(codec.encode(values), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("codec", "dtype"), PAIRS)
def test_an_encoding_of_whole_blocks_is_the_encodings_of_its_parts(codec, dtype):
    """So a shard may be encoded tile by tile. A lossless encoding has a table in front and is made whole."""
    if codec.name == "lossless":
        pytest.skip("has a table in front")
    values = torch.randn(2048 + 100, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    parts = [codec.encode(part) for part in (values[:256], values[256:1024], values[1024:])]
    assert torch.equal(torch.cat(parts), codec.encode(values))


RATIOS = {"none": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 260 / 1024, "quantization": 140 / 1024}


@pytest.mark.parametrize("name", RATIOS)
def test_stored_over_original_bytes_of_float32_are_the_formats(name):
    values = torch.randn(4096)
    codec = codec_for(name, values.dtype)
    assert codec.encode(values).numel() == codec.most_bytes(4096, values.dtype) == 4 * 4096 * RATIOS[name]


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 0.65, 0.68), (torch.float32, 0.82, 0.84)])
def test_lossless_takes_what_an_exponents_entropy_says(dtype, least, most):
    values = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(4)) * 0.02).to(dtype)
    stored = codec_for("lossless", dtype).encode(values).numel()
    assert least < stored / (values.numel() * values.itemsize) < most


def test_bf16_values_kept_as_fp32_lose_their_zeros_too():
    values = (torch.randn(1 << 18) * 0.02).bfloat16().float()
    assert codec_for("lossless", torch.float32).encode(values).numel() < 0.36 * 4 * values.numel()


@pytest.mark.parametrize("cut", [0, 1, 9, 40_000])
def test_a_damaged_lossless_encoding_is_refused(cut):
    codec = codec_for("lossless", torch.float32)
    encoded = codec.encode(torch.randn(70_000))
    with pytest.raises(StoreError, match="lossless encoding"):
        codec.decode(encoded[:cut], torch.empty(70_000))
    damaged = encoded.clone()
    damaged[-3] ^= 1  # in the exponents, which are compressed
    with pytest.raises(StoreError, match="damaged"):
        codec.decode(damaged, torch.empty(70_000))


@pytest.mark.parametrize("method", CpuCompressionMethod)
def test_what_a_codec_does_not_take_is_stored_as_it_is(method):
    for dtype in (torch.int64, torch.bool, torch.complex64):
        assert codec_for(method, dtype) is RAW


def test_a_codec_says_of_itself_what_the_config_says():
    for method, codec in CODECS.items():
        assert (codec.name, codec.lossy) == (method.value, method.is_lossy())
