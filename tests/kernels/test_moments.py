"""Adam's moments in 8 and 16 bits: the code itself, and that every kernel computes with it alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayzero.errors import UnsupportedError
from rayzero.kernels import AdamMemory, AdamOptions, Segment, check_moments, native
from rayzero.kernels.moments import BLOCK, CODED, CodedMoment, decode, encode, moment_bytes
from rayzero.kernels.torch_kernel import TorchKernel
from tests.support.reference_kernel import ReferenceKernel, plain_states, tensors_of

ADAMW = AdamOptions(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
LIBRARY = native.load()
needs_library = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))
ISAS = [] if isinstance(LIBRARY, str) else [native.ISAS[isa] for isa in LIBRARY.isas]
KINDS = [
    pytest.param(is_root, moments, id=f"{moments}-{'root' if is_root else 'mean'}")
    for moments in CODED
    for is_root in (False, True)
]
ERROR = {("bf16", False): 2**-8, ("bf16", True): 2**-8, ("int8", False): 2**-4, ("int8", True): 2**-5}
FLOOR = 2**-15.8  # of the scale: a smaller mean may become zero, a smaller root is rounded up


def encoded(values: Tensor, moments: str, *, is_root: bool) -> CodedMoment:
    count = values.numel()
    made = CodedMoment(torch.zeros(count, dtype=CODED[moments]), torch.zeros(count // BLOCK), is_root=is_root)
    encode(values, made.codes, made.scales, is_root=is_root)
    return made


def bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def same(a: CodedMoment, b: CodedMoment) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a.tensors, b.tensors, strict=True))


# ---- The code -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_root", "moments"), KINDS)
def test_the_relative_error_is_small_down_to_the_floor(is_root: bool, moments: str) -> None:
    values = torch.randn(64 * BLOCK) * torch.logspace(-3, 0, 64 * BLOCK)
    values = values.abs() if is_root else values
    made = encoded(values, moments, is_root=is_root)
    back, most = decode(*made.tensors, is_root=is_root), values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    large = values.abs() > FLOOR * most
    error = ((back - values).abs() / values.abs())[large]
    assert 0.8 * ERROR[moments, is_root] < error.max() <= ERROR[moments, is_root] * (1 + 1e-5)
    assert ((back - values).abs()[~large] <= 1.1 * FLOOR * most[~large]).all()
    assert torch.equal(back[values.abs() == most], values[values.abs() == most]), "the largest is kept exactly"


@pytest.mark.parametrize(("is_root", "moments"), KINDS)
def test_decoding_and_encoding_again_changes_no_bit(is_root: bool, moments: str) -> None:
    @given(
        st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=BLOCK),
        st.sampled_from([0.0, 1e-30, 1e-12, 1.0, 1e6]),
    )
    def holds(found: list[float], factor: float) -> None:
        values = torch.zeros(BLOCK)
        values[: len(found)] = torch.tensor(found) * factor
        made = encoded(values.abs() if is_root else values, moments, is_root=is_root)
        assert same(encoded(decode(*made.tensors, is_root=is_root), moments, is_root=is_root), made)

    holds()


@pytest.mark.parametrize("code", range(256))
def test_every_code_stands_for_a_value_of_its_own(code: int) -> None:
    for is_root in (False, True):
        codes = torch.full((BLOCK,), 255 if is_root else 127, dtype=torch.uint8)
        codes[0] = code
        values = decode(codes, torch.ones(1), is_root=is_root)
        assert values[1] == 1.0
        again = encoded(values, "int8", is_root=is_root)
        expected = 1 if is_root and code == 0 else code  # no root is zero
        assert again.codes[0] == expected or (code == 128 and values[0] == 0)


@pytest.mark.parametrize("moments", CODED)
def test_zero_stays_zero_in_a_mean_and_in_a_block_of_zeros(moments: str) -> None:
    values = torch.zeros(2 * BLOCK)
    values[0] = 3.0
    mean, root = (encoded(values, moments, is_root=is_root) for is_root in (False, True))
    assert torch.equal(decode(*mean.tensors, is_root=False), values)
    assert torch.equal(decode(*root.tensors, is_root=True)[BLOCK:], values[BLOCK:])
    assert decode(*root.tensors, is_root=True)[0] == 3.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(("is_root", "moments"), KINDS)
def test_what_is_not_finite_does_not_come_back_as_a_number(is_root: bool, moments: str, bad: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[5] = bad
    back = decode(*encoded(values, moments, is_root=is_root).tensors, is_root=is_root)
    assert not back[5].isfinite()
    assert torch.equal(back[BLOCK:], values[BLOCK:])


def test_bytes_of_a_parameter() -> None:
    assert [4 + 2 * moment_bytes(kept) for kept in ("fp32", "bf16", "int8")] == [12.0, 8.125, 6.125]
    made = encoded(torch.randn(4096), "int8", is_root=False)
    assert made.nbytes == 4096 * moment_bytes("int8")


@pytest.mark.parametrize("moments", CODED)
def test_a_part_is_written_and_read_in_fp32(moments: str) -> None:
    """As a parameter of 70 elements from the second block on, whose padding is zero."""
    values = torch.randn(4 * BLOCK).abs()
    values[BLOCK + 70 : 3 * BLOCK] = 0.0
    made = encoded(values, moments, is_root=True)
    before = made.read(0, 4 * BLOCK)
    made.write(BLOCK, BLOCK + 70, before[BLOCK : BLOCK + 70])
    assert torch.equal(made.read(0, BLOCK + 70), before[: BLOCK + 70])
    assert torch.equal(made.read(3 * BLOCK, 4 * BLOCK), before[3 * BLOCK :])


def test_only_adam_without_amsgrad_keeps_moments_in_codes() -> None:
    group = {"amsgrad": True}
    check_moments("fp32", torch.optim.SGD, [group])
    check_moments("int8", torch.optim.AdamW, [{"amsgrad": False}, {}])
    with pytest.raises(UnsupportedError, match="moments='int8' is for Adam and AdamW, not for SGD; use moments='fp32'"):
        check_moments("int8", torch.optim.SGD, [{}])
    with pytest.raises(UnsupportedError, match="moments='bf16' does not work with amsgrad=True"):
        check_moments("bf16", torch.optim.Adam, [{}, group])


# ---- The kernels --------------------------------------------------------------------------------------------------


def make_memory(count: int, moments: str, params: torch.dtype | None = torch.bfloat16) -> AdamMemory:
    """A shard in the middle of a training."""
    random = torch.Generator().manual_seed(0)
    mean = encoded(torch.randn(count, generator=random) * 1e-2, moments, is_root=False)
    root = encoded(torch.rand(count, generator=random) * 3e-2, moments, is_root=True)
    return AdamMemory(
        master=torch.randn(count, generator=random),
        states={"exp_avg": mean, "exp_avg_sq": root},
        params=None if params is None else torch.zeros(count, dtype=params),
    )


def fields(memory: AdamMemory) -> list[Tensor]:
    return list(map(bits, tensors_of(memory)))


def same_bits(a: AdamMemory, b: AdamMemory) -> bool:
    return all(torch.equal(x, y) for x, y in zip(fields(a), fields(b), strict=True))


def gradients_of(count: int, ranks: int, dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(count, generator=random) * 0.1).to(dtype) for _ in range(ranks)]


def update(kernel: Any, memory: AdamMemory, gradients: Sequence[Tensor], step: int = 3, **options: Any) -> AdamMemory:
    count = memory.master.numel()
    adam = AdamOptions(**{**{name: getattr(ADAMW, name) for name in ADAMW.__slots__}, **options})
    segments = [Segment(offset=0, length=count, ranks=tuple(range(len(gradients))), options=adam, step=step)]
    kernel.update(memory, gradients, segments, 0.5)
    return memory


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moments", CODED)
def test_bits_do_not_depend_on_the_instruction_set_or_the_threads(moments: str, dtype: torch.dtype) -> None:
    count = 3 * native.TILE + 5 * BLOCK
    gradients = gradients_of(count, 2, dtype)
    first = update(native.NativeKernel(isa=ISAS[0], threads=1), make_memory(count, moments), gradients)
    for isa in ISAS:
        for threads in (1, 3):
            other = update(native.NativeKernel(isa=isa, threads=threads), make_memory(count, moments), gradients)
            assert same_bits(other, first), (isa, threads)


@needs_library
@pytest.mark.parametrize("params", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", CODED)
def test_the_native_kernel_encodes_as_the_code_says(moments: str, isa: str, params: torch.dtype | None) -> None:
    """With both betas 0 the new moments are the gradient and its square, so their codes are known exactly."""
    count = 16 * BLOCK
    gradient = torch.randn(count) * torch.logspace(-4, 0, count)
    gradient[: BLOCK + 1] = 0.0
    memory = make_memory(count, moments, params)
    update(native.NativeKernel(isa=isa), memory, [gradient], beta1=0.0, beta2=0.0, weight_decay=0.0)
    mean, root = memory.states.values()
    assert same(mean, encoded(gradient * 0.5, moments, is_root=False))
    assert same(root, encoded((gradient * 0.5).square().sqrt(), moments, is_root=True))


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("moments", CODED)
def test_the_native_kernel_decodes_as_the_code_says(moments: str, isa: str) -> None:
    """Without a gradient a mean with beta1 = 0.5 is halved: its codes stay, its scale is halved."""
    memory = make_memory(16 * BLOCK, moments)
    mean, before = memory.states["exp_avg"].read(0, 16 * BLOCK), memory.states["exp_avg"]
    update(native.NativeKernel(isa=isa), memory, [torch.zeros(16 * BLOCK)], beta1=0.5)
    assert same(before, encoded(mean * 0.5, moments, is_root=False))


@pytest.mark.parametrize("kernel", [TorchKernel(), ReferenceKernel()], ids=lambda kernel: str(kernel.name))
@pytest.mark.parametrize("moments", CODED)
@needs_library
def test_it_agrees_with_the_other_kernels(moments: str, kernel: Any) -> None:
    """Roundings differ, so a value between two codes may get either: one code apart at most, and rarely."""
    count = 8 * BLOCK
    ours, theirs = make_memory(count, moments), make_memory(count, moments)
    update(native.NativeKernel(), ours, gradients_of(count, 2, torch.bfloat16))
    update(kernel, theirs, gradients_of(count, 2, torch.bfloat16))
    torch.testing.assert_close(ours.master, theirs.master, atol=1e-6, rtol=1e-6)
    for mine, other in zip(ours.states.values(), theirs.states.values(), strict=True):
        torch.testing.assert_close(mine.scales, other.scales, atol=0.0, rtol=1e-6)
        apart = (bits(mine.codes).int() - bits(other.codes).int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 0.02


@needs_library
def test_a_segment_without_gradients_stays_as_it_is() -> None:
    count = 4 * BLOCK
    memory, untouched = make_memory(count, "int8"), make_memory(count, "int8")
    segments = [Segment(offset=BLOCK, length=BLOCK, ranks=(0,), options=ADAMW, step=2)]
    native.NativeKernel().update(memory, gradients_of(count, 1, torch.bfloat16), segments, 1.0)
    for now, then in zip(fields(memory), fields(untouched), strict=True):
        each = now.numel() // 4
        assert torch.equal(now[:each], then[:each])
        assert torch.equal(now[2 * each :], then[2 * each :])
        assert not torch.equal(now[each : 2 * each], then[each : 2 * each])


@needs_library
@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("moments", CODED)
def test_moments_follow_gradients_that_shrink(moments: str, beta2: float) -> None:
    """Codes alone could not: beta2 = 0.999 changes a root by 1 in 2,000 a step, a code by 1 in 16. The scale does."""
    count, steps = 4 * BLOCK, 3000
    memory, options = make_memory(count, moments), {"beta2": beta2}
    exact = torch.zeros(count)
    memory.states["exp_avg_sq"].write(0, count, exact)
    random = torch.Generator().manual_seed(5)
    kernel = native.NativeKernel(threads=1)
    for step in range(1, steps + 1):
        size = 1.0 if step < steps / 2 else 0.05
        gradient = torch.randn(count, generator=random) * size
        update(kernel, memory, [gradient * 2], step=step, **options)
        exact.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    ratio = (memory.states["exp_avg_sq"].read(0, count) / exact).sqrt()
    assert 0.8 < ratio.median() < 1.25
    assert ratio.min() > 0.5
    assert ratio.max() < 2.0


@pytest.mark.parametrize("kernel", ["native", "torch", "reference"])
@pytest.mark.parametrize("moments", ["fp32", *CODED])
@needs_library
def test_a_square_beyond_fp32_stops_its_own_weight_and_makes_no_nan(moments: str, kernel: str) -> None:
    """As in plain PyTorch: a mean over an infinite root is no step. In 8 bits there is no code for infinity, so the
    block's other weights stop with it."""
    count, huge = 2 * BLOCK, 3
    memory = make_memory(count, "bf16" if moments == "fp32" else moments, None)
    if moments == "fp32":
        memory = replace(memory, states=plain_states(*(state.read(0, count) for state in memory.states.values())))
    kernels: dict[str, Any] = {"native": native.NativeKernel, "torch": TorchKernel, "reference": ReferenceKernel}
    gradient = torch.full((count,), 0.1)
    gradient[huge] = 1e30
    before = memory.master.clone()
    for step in (1, 2, 3):
        update(kernels[kernel](), memory, [gradient], step=step, weight_decay=0.0)
        gradient[huge] = 0.1
    moved = memory.master != before
    assert memory.master.isfinite().all()
    assert not moved[huge]
    assert moved[BLOCK:].all()
    if moments != "int8":
        moved[huge] = True
        assert moved.all()
    assert memory.states["exp_avg_sq"].read(0, count)[huge] == math.inf


@needs_library
def test_amsgrad_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="amsgrad"):
        update(native.NativeKernel(), make_memory(BLOCK, "int8"), gradients_of(BLOCK, 1, torch.float32), amsgrad=True)
