"""Compression: its size and its stated error."""

from __future__ import annotations

import pytest
import torch

from rayzero.activations.tensors.codec import BLOCK, codec_for


def round_trip(name: str, values: torch.Tensor) -> torch.Tensor:
    codec = codec_for(name, values.dtype)
    source = values.view(torch.uint8)
    encoded = codec.encode(source, values.dtype)
    assert encoded.numel() == codec.encoded_bytes(source.numel(), values.dtype)
    target = torch.full_like(source, 255)
    codec.decode(encoded, values.dtype, target)
    return target.view(values.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8])
def test_none_is_exact(dtype):
    values = (torch.randn(1000) * 50).to(dtype)
    assert torch.equal(round_trip("none", values), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bf16_error_is_within_the_bound_and_the_bound_is_tight(dtype):
    values = torch.randn(100_000, dtype=dtype) * torch.logspace(-20, 20, 100_000, dtype=dtype)
    error = ((round_trip("bf16", values) - values).abs() / values.abs()).max()
    assert 2**-8 * 0.98 < error <= 2**-8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 256, 257, 10_000])
def test_int8_error_is_within_the_bound_of_each_block(dtype, count):
    values = (torch.randn(count) * 3).to(dtype)
    padded = torch.nn.functional.pad(values.float(), (0, -count % BLOCK)).view(-1, BLOCK)
    most = padded.abs().amax(1, keepdim=True).expand(-1, BLOCK).flatten()[:count]
    rounding = torch.finfo(dtype).eps * values.float().abs() + torch.finfo(dtype).tiny
    error = (round_trip("int8", values).float() - values.float()).abs()
    assert (error <= most / 254 * (1 + 1e-5) + rounding * 1.01).all()
    assert count < 256 or error.max() > most.max() / 600


def test_int8_zeros_stay_and_nonfinite_values_stay_loud():
    assert torch.equal(round_trip("int8", torch.zeros(300)), torch.zeros(300))
    for bad in (float("inf"), float("nan")):
        values = torch.ones(512)
        values[3] = bad
        back = round_trip("int8", values)
        assert back[:256].isnan().all()
        assert torch.equal(back[256:], values[256:])


def test_integers_are_never_rounded():
    values = torch.arange(1000)
    assert torch.equal(round_trip("int8", values), values)
    assert torch.equal(round_trip("bf16", values), values)
