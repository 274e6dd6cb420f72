"""The kernels against torch's own optimizers and against plain arithmetic."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rayzero.errors import ConfigError, UnsupportedError
from rayzero.kernels import AdamMemory, AdamOptions, Segment, choose_kernel, segments_of, torch_kernel
from rayzero.kernels.rank_sum import RankSum
from rayzero.kernels.stamps import STAMP
from rayzero.kernels.torch_kernel import TorchKernel
from tests.support.reference_kernel import ReferenceKernel, plain_states, tensors_of

OPTIONS = AdamOptions(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
VARIANTS = {
    "adamw": OPTIONS,
    "adam": replace(OPTIONS, decoupled=False),
    "amsgrad": replace(OPTIONS, amsgrad=True),
    "maximize": replace(OPTIONS, maximize=True, weight_decay=0.0),
}


def make_memory(numel: int, *, bf16: bool = False) -> AdamMemory:
    master = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    return AdamMemory(
        master=master,
        states=plain_states(torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)),
        params=master.bfloat16() if bf16 else None,
    )


def make_grads(numel: int, ranks: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]


def whole(numel: int, options: AdamOptions, step: int, ranks: int = 1) -> Segment:
    return Segment(offset=0, length=numel, ranks=tuple(range(ranks)), options=options, step=step)


def same(ours: AdamMemory, theirs: AdamMemory) -> bool:
    return all(map(torch.equal, tensors_of(ours), tensors_of(theirs)))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_torch_kernel_has_the_bits_of_torchs_fused_optimizer(name: str) -> None:
    options, numel = VARIANTS[name], 64 * 1000
    memory, kernel = make_memory(numel), TorchKernel(tile=64 * 128)
    param = torch.nn.Parameter(memory.master.clone())
    cls = torch.optim.AdamW if options.decoupled else torch.optim.Adam
    optimizer = cls(
        [param],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        weight_decay=options.weight_decay,
        amsgrad=options.amsgrad,
        maximize=options.maximize,
        fused=True,
    )
    for step in range(1, 6):
        grads = make_grads(numel, 1, step)
        kernel.update(memory, grads, [whole(numel, options, step)], 1.0)
        param.grad = grads[0]
        optimizer.step()
    assert torch.equal(memory.master, param.detach())


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize(("ranks", "scale"), [(1, 1.0), (1, 0.3), (2, 0.5)])
def test_a_limit_clamps_the_scaled_sum_and_nothing_else(kernel: str, ranks: int, scale: float) -> None:
    limited, given = make_memory(256, bf16=True), make_memory(256, bf16=True)
    grads = make_grads(256, ranks, 1)
    kept = [grad.clone() for grad in grads]
    clamped = (torch.stack(grads).sum(0) * scale).clamp_(-0.01, 0.01)
    assert 0 < int((clamped.abs() == 0.01).sum()) < 256
    choose_kernel(kernel).update(limited, grads, [whole(256, OPTIONS, 1, ranks)], scale, limit=0.01)
    choose_kernel(kernel).update(given, [clamped], [whole(256, OPTIONS, 1)], 1.0)
    torch.testing.assert_close(tensors_of(limited)[1], tensors_of(given)[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(limited.master, given.master, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_torch_kernel_agrees_with_plain_arithmetic(name: str) -> None:
    options, numel = VARIANTS[name], 256
    fast, plain = make_memory(numel, bf16=True), make_memory(numel, bf16=True)
    for step in range(1, 4):
        grads = make_grads(numel, 2, step, torch.bfloat16)
        for memory, kernel in ((fast, TorchKernel()), (plain, ReferenceKernel())):
            kernel.update(memory, grads, [whole(numel, options, step, 2)], 0.25)
    torch.testing.assert_close(fast.master, plain.master, rtol=1e-6, atol=1e-7)
    assert fast.params is not None
    assert torch.equal(fast.params, fast.master.bfloat16())


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_depend_on_neither_segments_nor_threads(kernel: str, threads: int) -> None:
    numel = 64 * 40_000  # several tiles, more than torch works on with one thread
    grads = make_grads(numel, 3, 1, torch.bfloat16)
    before = torch.get_num_threads()
    results = []
    try:
        for count, cuts in ((1, [0, numel]), (threads, [0, 64, 64 * 17, 64 * 30_001, numel])):
            torch.set_num_threads(count)
            memory = make_memory(numel, bf16=True)
            for step in (1, 2):
                segments = [
                    Segment(offset=a, length=b - a, ranks=(0, 2), options=OPTIONS, step=step) for a, b in pairwise(cuts)
                ]
                choose_kernel(kernel).update(memory, grads, segments, 0.3)
            results.append(memory)
    finally:
        torch.set_num_threads(before)
    assert same(*results)


def test_bits_do_not_depend_on_the_tile_size() -> None:
    numel, grads = 64 * 150, make_grads(64 * 150, 2, 1)
    results = []
    for tile in (64, 64 * 7, 1 << 19):
        memory = make_memory(numel, bf16=True)
        TorchKernel(tile).update(memory, grads, [whole(numel, OPTIONS, 1, 2)], 0.5)
        results.append(memory)
    assert same(results[0], results[2])
    assert same(results[1], results[2])


def on_each_tile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Have the thread that has updated a tile call ``act``."""
    update_tile = torch_kernel._Hand._update_tile

    def update(hand: Any, *tile: Any) -> None:
        update_tile(hand, *tile)
        act()

    monkeypatch.setattr(torch_kernel._Hand, "_update_tile", update)


def test_threads_of_the_torch_kernel_share_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    working = set[int]()
    on_each_tile(monkeypatch, lambda: working.add(threading.get_ident()))
    numel, grads, results = 6 * STAMP, make_grads(6 * STAMP, 2, 1), []
    for threads in (1, 3):
        memory = make_memory(numel, bf16=True)
        working.clear()
        kernel = TorchKernel(64 * 7, threads=threads)
        for _ in range(3):
            segments = [whole(numel, OPTIONS, 1, 2)]
            kernel.update(memory, grads, segments, 0.5)
        results.append(memory)
        assert (threading.get_ident() in working) == (threads == 1)
        assert 1 <= len(working) <= threads
    assert same(*results)


def test_when_a_thread_of_the_torch_kernel_fails_the_call_does_after_all_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    def end() -> None:
        ended.append(threading.get_ident())
        if len(ended) == 2:
            raise OSError("a tile went wrong")

    on_each_tile(monkeypatch, end)
    numel = 8 * STAMP
    memory, grads = make_memory(numel), make_grads(numel, 1, 1)
    with pytest.raises(OSError, match="a tile went wrong"):
        TorchKernel(64 * 64, threads=2).update(memory, grads, [whole(numel, OPTIONS, 1)], 1.0)
    counted, master = len(ended), memory.master.clone()
    time.sleep(0.05)
    assert len(ended) == counted
    assert torch.equal(memory.master, master)


@pytest.mark.parametrize("kernel", ["torch", "auto"])
def test_only_what_segments_name_is_read_and_written(kernel: str) -> None:
    memory, before = make_memory(256, bf16=True), make_memory(256, bf16=True)
    grads = make_grads(256, 2, 1)
    grads[0][:64] = torch.nan  # rank 0 has nothing there
    grads[1][128:] = torch.nan
    kept = [grad.clone() for grad in grads]
    segments = [
        Segment(offset=0, length=64, ranks=(1,), options=OPTIONS, step=1),
        Segment(offset=64, length=64, ranks=(0, 1), options=OPTIONS, step=7),
    ]
    choose_kernel(kernel).update(memory, grads, segments, 0.5)
    assert torch.isfinite(memory.master).all()
    assert torch.equal(memory.master[128:], before.master[128:])
    assert not (memory.master[:128] == before.master[:128]).any()
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(grads, kept, strict=True))


@pytest.mark.parametrize("kernel", ["torch", "auto"])
def test_zero_gradients_and_weights_stay_zero(kernel: str) -> None:
    memory = make_memory(128)
    memory.master.zero_()
    choose_kernel(kernel).update(memory, [torch.zeros(128)], [whole(128, OPTIONS, 1)], 0.5)
    assert not memory.master.any()  # so padding stays what it is


def test_neighbours_that_agree_are_merged() -> None:
    options = [OPTIONS, replace(OPTIONS, lr=1.0)]
    first = (0, 64, (0, 1), 0, 3)
    begins = Segment(offset=0, length=64, ranks=(0, 1), options=OPTIONS, step=3)
    for part, other in {
        (128, 128, (0, 1), 0, 3): replace(begins, offset=128, length=128),  # a gap
        (64, 128, (0, 1), 0, 4): replace(begins, offset=64, length=128, step=4),
        (64, 128, (1,), 0, 3): replace(begins, offset=64, length=128, ranks=(1,)),
        (64, 128, (0, 1), 1, 3): replace(begins, offset=64, length=128, options=options[1]),
    }.items():
        assert segments_of([first, part], options) == [begins, other]
    parts = [first, (64, 128, (0, 1), 0, 3), (192, 64, (0, 1), 0, 3)]
    assert segments_of(parts, options) == [replace(begins, length=256)]


def test_what_has_no_elements_or_no_gradient_is_in_no_segment() -> None:
    parts = [(0, 64, (0,), 0, 1), (64, 0, (0,), 0, 1), (64, 64, (), 0, 1), (128, 64, (0,), 0, 1)]
    assert [segment.offset for segment in segments_of(parts, [OPTIONS])] == [0, 128]


# ---- the sum across ranks


def test_ranks_are_added_in_groups_of_8_in_rank_order() -> None:
    grads = make_grads(4096, 19, 1)

    def add(parts: list[Tensor]) -> Tensor:
        return sum(parts[1:], parts[0].clone())

    expected = add([add(grads[0:8]), add(grads[8:16]), add(grads[16:19])])
    assert torch.equal(RankSum(4096).sum(grads, range(19), 0, 4096), expected)
    assert not torch.equal(add(grads), expected)


def test_a_rank_that_is_absent_leaves_the_groups_of_the_others_alone() -> None:
    """Also in 16 bits, which are added in 32."""
    grads = make_grads(4096, 10, 1, torch.bfloat16)
    one, seven, eight, nine = (grads[rank].float() for rank in (1, 7, 8, 9))
    expected = (one + seven) + (eight + nine)
    assert torch.equal(RankSum(4096).sum(grads, (1, 7, 8, 9), 0, 4096), expected)


# ---- choice and options


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ConfigError, match="kernel is 'fast' but must be one of auto"):
        choose_kernel("fast")


def test_options_come_from_a_parameter_group() -> None:
    group = torch.optim.Adam([torch.zeros(1)], lr=0.5, betas=(0.8, 0.9), amsgrad=True).param_groups[0]
    hyper = {key: value for key, value in group.items() if key != "params"}
    found = AdamOptions.from_hyper(hyper, decoupled=True)
    assert found == AdamOptions(lr=0.5, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.0, amsgrad=True, decoupled=False)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="betas"):
        replace(OPTIONS, beta1=1.0)
    with pytest.raises(ConfigError, match="lr=-1"):
        replace(OPTIONS, lr=-1.0)
    with pytest.raises(UnsupportedError, match="differentiable"):
        AdamOptions.from_hyper({"differentiable": True}, decoupled=True)
