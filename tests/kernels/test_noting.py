"""The native kernel notes which published words an update changes: all of them, no other, and no bit differs for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rayzero.codecs.changes import compare
from rayzero.kernels import AdamMemory, AdamOptions, Segment, native
from rayzero.kernels.moments import BLOCK, CODED, CodedMoment, Moment
from tests.support.reference_kernel import plain_states, tensors_of

LOADED = native.load()
if isinstance(LOADED, str):
    pytest.skip(LOADED, allow_module_level=True)
ISAS = [native.ISAS[isa] for isa in LOADED.isas]
OPTIONS = AdamOptions(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, amsgrad=False)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNT = 2 * native.TILE + 5 * 64


def make_memory(params: torch.dtype, moments: str, *, amsgrad: bool = False) -> AdamMemory:
    """A shard whose published parameters are its rounded master; an infinite one and a NaN among them."""
    random = torch.Generator().manual_seed(0)
    master, mean, square = torch.randn(3, COUNT, generator=random)
    master[7], master[70], master[71] = torch.inf, torch.nan, 0.0
    states: dict[str, Moment] = {**plain_states(mean * 1e-2, square**2 * 1e-3, square.abs() if amsgrad else None)}
    for name, plain in list(states.items()) if moments in CODED else ():
        codes, scales = torch.zeros(COUNT, dtype=CODED[moments]), torch.zeros(COUNT // BLOCK)
        states[name] = CodedMoment(codes, scales, is_root=name == "exp_avg_sq")
        states[name].write(0, COUNT, plain.read(0, COUNT))
    memory = AdamMemory(master=master, states=states, params=torch.empty(COUNT, dtype=params))
    gradients = [torch.zeros(COUNT)]
    still = [Segment(offset=0, length=COUNT, ranks=(0,), options=replace(OPTIONS, lr=0.0, weight_decay=0.0), step=1)]
    native.NativeKernel().update(memory, gradients, still, 1.0)  # rounds a NaN as it does
    return memory


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("params", DTYPES[:2], ids=str)
@pytest.mark.parametrize("gradient", DTYPES, ids=str)
@pytest.mark.parametrize("moments", ["fp32", "amsgrad", *CODED])
@pytest.mark.parametrize("ranks", [(0,), (0, 1, 8)], ids=str)
@pytest.mark.parametrize("lr", [0.0, 1e-5, 1e-2])
def test_what_is_noted_is_what_changed(
    isa: str, params: torch.dtype, gradient: torch.dtype, moments: str, ranks: tuple[int, ...], lr: float
) -> None:
    options = replace(OPTIONS, lr=lr, amsgrad=moments == "amsgrad")
    random = torch.Generator().manual_seed(1)
    gradients = [(torch.randn(COUNT, generator=random) * 0.1).to(gradient) for _ in range(9)]
    segments = [
        Segment(offset=start, length=stop - start, ranks=ranks, options=options, step=3)
        for start, stop in [(0, 64), (128, native.TILE + 192), (native.TILE + 256, COUNT)]
    ]
    off, on = (make_memory(params, moments, amsgrad=moments == "amsgrad") for _ in range(2))
    assert on.params is not None
    before, changed = on.params.clone(), torch.zeros(COUNT // 8, dtype=torch.uint8)
    native.NativeKernel(isa=isa, threads=1).update(off, gradients, segments, 0.5)
    noting = replace(on, changed=changed)
    native.NativeKernel(isa=isa, threads=3).update(noting, gradients, segments, 0.5)
    for ours, theirs in zip(tensors_of(off), tensors_of(on), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(changed, compare(before, on.params))
    assert bool(changed.any()) == (lr > 0)
