"""Split masters: the parameters that are published and 16 bits more are the same masters, and an update gives the same
bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayzero.codecs.changes import compare
from rayzero.errors import UnsupportedError
from rayzero.kernels import AdamMemory, AdamOptions, Segment, native
from rayzero.kernels.split_master import SignedSquares, SplitMaster
from tests.support.reference_kernel import plain_states, tensors_of

LOADED = native.load()
if isinstance(LOADED, str):
    pytest.skip(LOADED, allow_module_level=True)
ISAS = [native.ISAS[isa] for isa in LOADED.isas]
OPTIONS = AdamOptions(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
COUNT = 2 * native.TILE + 5 * 64


def split(master: Tensor, squares: Tensor) -> SplitMaster:
    """Split memory with these masters."""
    made = SplitMaster(torch.zeros_like(master, dtype=torch.int16), torch.zeros_like(master).bfloat16(), squares)
    made.write(0, len(master), master)
    return made


def half_way(count: int) -> Tensor:
    """fp32 values half-way between two of bf16, of all signs and exponents."""
    words = torch.randint(-(1 << 15), 1 << 15, (count,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    return ((words << 16) + 0x8000).view(torch.float32)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), st.booleans())
def test_every_master_comes_back(patterns: list[int], half: bool) -> None:
    bits = torch.tensor(patterns, dtype=torch.int64)
    bits = (bits & ~0xFFFF | 0x8000) if half else bits
    master = bits.to(torch.int32).view(torch.float32)
    squares = torch.rand(len(master))
    made = split(master, squares.clone())
    found, plain = made.read(0, len(master)), ~master.isnan()
    assert torch.equal(found.isnan(), ~plain)
    assert torch.equal(found[plain].view(torch.int32), master[plain].view(torch.int32))
    assert torch.equal(made.params[plain], master[plain].bfloat16())
    assert torch.equal(SignedSquares(made.squares).read(0, len(master)), squares)


def test_squares_and_masters_are_written_apart() -> None:
    master, squares = half_way(256), torch.rand(256)
    made = split(master, squares)
    assert squares.signbit().any()  # else this says nothing
    SignedSquares(squares).write(64, 192, torch.zeros(128))
    assert torch.equal(made.read(0, 256)[~master.isnan()], master[~master.isnan()])
    made.write(0, 64, torch.ones(64))
    assert not squares[:64].signbit().any()
    assert not SignedSquares(squares).read(64, 192).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("ranks", [(0,), (0, 1, 8)], ids=str)
@pytest.mark.parametrize("lr", [0.0, 1e-5, 1e-2])
def test_an_update_gives_the_bits_of_plain_masters(
    isa: str, gradient: torch.dtype, amsgrad: bool, ranks: tuple[int, ...], lr: float
) -> None:
    random = torch.Generator().manual_seed(1)
    master, mean, square = torch.randn(3, COUNT, generator=random)
    master[: COUNT // 2] = half_way(COUNT // 2)
    master[:3], square = torch.tensor([torch.inf, -torch.inf, 0.0]), square**2
    master, decay = master.nan_to_num(1.0), 0.0 if lr == 0.0 else 0.01  # with neither, every master stays
    gradients = [torch.randn(COUNT, generator=random).to(gradient) for _ in range(9)]
    options = replace(OPTIONS, lr=lr, amsgrad=amsgrad, weight_decay=decay)
    segments = [
        Segment(offset=start, length=stop - start, ranks=ranks, options=options, step=3)
        for start, stop in [(0, 64), (128, native.TILE + 192), (native.TILE + 256, COUNT)]
    ]
    largest = square.clone() if amsgrad else None
    plain = AdamMemory(
        master=master.clone(),
        states=plain_states(mean.clone(), square.clone(), largest),
        params=master.bfloat16(),
    )
    squares = square.clone()
    kept = split(master, squares)
    changed = torch.zeros(COUNT // 8, dtype=torch.uint8)
    divided = AdamMemory(
        master=kept.remainders,
        states=plain_states(mean.clone(), squares, square.clone() if amsgrad else None),
        params=kept.params,
        changed=changed,
    )
    before = kept.params.clone()
    native.NativeKernel(isa=isa, threads=1).update(plain, gradients, segments, 0.5, limit=1.0)
    native.NativeKernel(isa=isa, threads=3).update(divided, gradients, segments, 0.5, limit=1.0)
    assert plain.params is not None
    assert torch.equal(kept.params.view(torch.int16), plain.params.view(torch.int16))
    assert torch.equal(kept.read(0, COUNT).view(torch.int32), plain.master.view(torch.int32))
    _, means, plain_squares, *largest_ones, _ = tensors_of(plain)
    _, divided_means, _, *divided_largest, _ = tensors_of(divided)
    assert torch.equal(divided_means, means)
    assert torch.equal(SignedSquares(squares).read(0, COUNT), plain_squares)
    assert len(largest_ones) == amsgrad
    assert all(map(torch.equal, divided_largest, largest_ones))
    assert torch.equal(changed, compare(before, kept.params))
    assert squares.signbit().any()


def test_what_cannot_be_split_is_refused() -> None:
    zeros = torch.zeros(64)
    memory = AdamMemory(master=zeros.short(), states=plain_states(zeros, zeros.clone()), params=zeros.half())
    segment = Segment(offset=0, length=64, ranks=(0,), options=OPTIONS, step=1)
    with pytest.raises(UnsupportedError, match="a split master needs parameters in bf16 and moments in fp32"):
        native.NativeKernel().update(memory, [zeros], [segment], 1.0)
