"""The native kernel: right by the other kernels, and the same bits however the work is cut."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import itertools
import math
import os
import platform
import re
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayzero.config import ZeroConfig
from rayzero.errors import UnsupportedError
from rayzero.kernels import choose_kernel, choose_squares, native
from rayzero.kernels.kernel import AdamMemory, AdamOptions, Segment
from rayzero.kernels.rank_sum import RankSum, SquareSum
from rayzero.kernels.torch_kernel import TorchKernel
from rayzero.protocol.gradient_sum import KeptTotal
from tests.support.reference_kernel import ReferenceKernel, plain_states, tensors_of

LOADED = native.load()
if isinstance(LOADED, str):
    pytest.skip(LOADED, allow_module_level=True)
LIBRARY = LOADED
ISAS = [native.ISAS[isa] for isa in LIBRARY.isas]

ADAMW = AdamOptions(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
FLAVOURS = {
    "adamw": ADAMW,
    "adam": replace(ADAMW, decoupled=False),
    "no decay": replace(ADAMW, weight_decay=0.0),
    "amsgrad": replace(ADAMW, amsgrad=True),
    "maximize": replace(ADAMW, maximize=True, decoupled=False),
    "beta 0": replace(ADAMW, beta1=0.0, beta2=0.0, eps=1e-3),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_memory(count: int, params: torch.dtype | None = torch.bfloat16, seed: int = 0) -> AdamMemory:
    """A shard in the middle of a training."""
    random = torch.Generator().manual_seed(seed)
    return AdamMemory(
        master=torch.randn(count, generator=random),
        states=plain_states(
            torch.randn(count, generator=random) * 1e-2,
            torch.rand(count, generator=random) * 1e-3,
            torch.rand(count, generator=random) * 1e-3,
        ),
        params=None if params is None else torch.zeros(count, dtype=params),
    )


def make_gradients(count: int, ranks: int, dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [(torch.randn(count, generator=random) * 0.1).to(dtype) for _ in range(ranks)]


def fields(memory: AdamMemory) -> list[Tensor]:
    """Bit patterns of everything a kernel writes."""
    return [t.view(torch.int32 if t.dtype is torch.float32 else torch.int16) for t in tensors_of(memory)]


def same_bits(a: AdamMemory, b: AdamMemory) -> bool:
    return all(torch.equal(x, y) for x, y in zip(fields(a), fields(b), strict=True))


LIMIT = 0.03  # of what raw_update clamps: within the gradients' range


def segment(count: int, ranks: Sequence[int] = (0,), options: AdamOptions = ADAMW, *, offset: int = 0) -> Segment:
    return Segment(offset=offset, length=count, ranks=tuple(ranks), options=options, step=3)


def updated(
    kernel: Any,
    gradients: list[Tensor],
    segments: list[Segment],
    *,
    scale: float = 0.37,
    limit: float = LIMIT,
    **memory: Any,
) -> AdamMemory:
    made = make_memory(gradients[0].numel(), **memory)
    kernel.update(made, gradients, segments, scale, limit=limit)
    return made


def raw_update(
    memory: AdamMemory, gradients: list[Tensor], segments: list[Segment], start: int, stop: int, tile: int, isa: str
) -> None:
    """The C function itself, where nothing needs to be a multiple of 64."""
    table = native._segment_table(segments, gradients, 0.37, LIMIT)
    tensors = native._memory_table(memory, stop, amsgrad=segments[0].options.amsgrad)
    LIBRARY.adam(None, LIBRARY.isa(isa), ctypes.byref(tensors), table, len(table), start, stop, tile)


# ---- Right ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("limit", [math.inf, 0.04])
@pytest.mark.parametrize("other", [TorchKernel(), ReferenceKernel()], ids=lambda kernel: str(kernel.name))
def test_it_agrees_with_the_other_kernels(isa: str, dtype: torch.dtype, flavour: str, other: Any, limit: float) -> None:
    count, options = 256, FLAVOURS[flavour]
    ours, theirs = make_memory(count), make_memory(count)
    kernel = native.NativeKernel(isa=isa)
    for step in range(1, 6):
        gradients = make_gradients(count, 2, dtype, seed=step)
        segments = [Segment(offset=0, length=count, ranks=(0, 1), options=options, step=step)]
        kernel.update(ours, gradients, segments, 0.5, limit=limit)
        other.update(theirs, gradients, segments, 0.5, limit=limit)
    for mine, other in zip(tensors_of(ours)[:-1], tensors_of(theirs)[:-1], strict=True):
        torch.testing.assert_close(mine, other, atol=1.2e-6, rtol=0.0)
    assert ours.params is not None
    assert torch.equal(ours.params, ours.master.to(torch.bfloat16))


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch's own kernel has no FMA here"
)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("limit", [math.inf, 0.01])
def test_its_bits_are_those_of_torchs_fused_kernel(isa: str, flavour: str, limit: float) -> None:
    count, options = 1 << 14, FLAVOURS[flavour]
    ours, theirs = make_memory(count), make_memory(count)
    for step in (1, 2, 3, 1000):
        gradients = make_gradients(count, 9, torch.bfloat16, seed=step)
        segments = [Segment(offset=0, length=count, ranks=tuple(range(9)), options=options, step=step)]
        native.NativeKernel(isa=isa).update(ours, gradients, segments, 1 / 9, limit=limit)
        TorchKernel().update(theirs, gradients, segments, 1 / 9, limit=limit)
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("params", [*DTYPES, None])
def test_it_publishes_the_rounded_master_in_any_dtype(params: torch.dtype | None) -> None:
    memory = updated(native.NativeKernel(), make_gradients(192, 1, torch.bfloat16), [segment(192)], params=params)
    assert not torch.equal(memory.master, make_memory(192).master)
    if params is not None:
        assert memory.params is not None
        assert torch.equal(memory.params, memory.master.to(params))


def test_segments_have_their_own_options_steps_and_ranks() -> None:
    count, options = 512, list(FLAVOURS.values())[:4]
    segments = [
        Segment(offset=128 * i, length=64, ranks=ranks, options=options[i], step=i + 1)
        for i, ranks in enumerate([(0,), (1, 2), (0, 1, 2), (2,)])
    ]
    gradients = make_gradients(count, 3, torch.bfloat16)
    ours = updated(native.NativeKernel(), gradients, segments[::-1])
    theirs = updated(ReferenceKernel(), gradients, segments)
    torch.testing.assert_close(ours.master, theirs.master, atol=1.2e-6, rtol=0.0)
    for gap in range(64, count, 128):  # nothing between segments is touched
        for got, before in zip(fields(ours), fields(make_memory(count)), strict=True):
            assert torch.equal(got[gap : gap + 64], before[gap : gap + 64])


@pytest.mark.parametrize("isa", ISAS)
def test_every_half_precision_number_is_read_as_torch_reads_it(isa: str) -> None:
    still = replace(ADAMW, lr=0.0, beta1=0.0, weight_decay=0.0)  # exp_avg becomes the gradient itself
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        gradient = patterns.view(dtype)
        finite = gradient.isfinite()
        gradient = torch.where(finite, gradient, torch.zeros((), dtype=dtype))
        memory = make_memory(1 << 16)
        mean = memory.states["exp_avg"].tensors[0].zero_()
        native.NativeKernel(isa=isa).update(memory, [gradient], [segment(1 << 16, options=still)], 1.0)
        assert torch.equal(mean, gradient.float())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_master_is_rounded_as_torch_rounds_it(isa: str, dtype: torch.dtype) -> None:
    still = replace(ADAMW, lr=0.0, weight_decay=0.0)
    random = torch.Generator().manual_seed(5)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=random, dtype=torch.int64)
    halfway = (torch.arange(1 << 16, dtype=torch.int64) << 16) | 0x8000  # ties of bf16
    ties = torch.arange(0x33000000, 0x48000000, 0x1000, dtype=torch.int64)  # of fp16, subnormal ones included
    master = torch.cat([bits, halfway, ties, -ties - 1]).to(torch.int32).view(torch.float32)
    master = master[: master.numel() // 64 * 64].clone()
    memory = replace(make_memory(master.numel(), params=dtype), master=master.clone())
    gradient = torch.zeros(master.numel(), dtype=torch.bfloat16)
    native.NativeKernel(isa=isa).update(memory, [gradient], [segment(master.numel(), options=still)], 1.0)
    assert memory.params is not None
    want, number = master.to(dtype), ~master.isnan()
    assert torch.equal(memory.params[number].view(torch.int16), want[number].view(torch.int16))
    assert bool(memory.params[~number].isnan().all())


@settings(max_examples=min(settings.default.max_examples, 60))
@given(
    present=st.lists(st.integers(0, 40), min_size=1, max_size=17, unique=True).map(sorted),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 1000),
)
def test_ranks_are_summed_in_order_in_groups_of_eight(
    present: list[int], dtype: torch.dtype, isa: str, seed: int
) -> None:
    count = 192
    gradients = make_gradients(count, present[-1] + 1, dtype, seed)
    summed = RankSum(count).sum(gradients, present, 0, count).clone()
    ours = updated(native.NativeKernel(isa=isa), gradients, [segment(count, present)])
    assert same_bits(ours, updated(native.NativeKernel(isa=isa), [summed], [segment(count)]))


@settings(max_examples=min(settings.default.max_examples, 60))
@given(
    parts=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=8),
    count=st.sampled_from([1, 15, 64, 1024, 3000]),
    start=st.integers(0, 5),
    isa=st.sampled_from(ISAS),
    seed=st.integers(0, 1000),
)
def test_ranks_of_a_group_are_added_into_other_memory_with_the_same_bits(
    parts: list[torch.dtype], count: int, start: int, isa: str, seed: int
) -> None:
    gradients = [make_gradients(count + start, 1, dtype, seed + i)[0][start:] for i, dtype in enumerate(parts)]
    wanted, found = torch.empty(count), torch.full((count + 2,), 7.0)
    RankSum(100).sum_group(wanted, gradients)
    native.NativeAdder(isa).sum_group(found[1:-1], gradients)
    assert torch.equal(found[1:-1].view(torch.int32), wanted.view(torch.int32))
    assert found[0] == found[-1] == 7.0


@settings(max_examples=min(settings.default.max_examples, 60))
@given(
    present=st.lists(st.integers(0, 20), min_size=1, max_size=17, unique=True).map(sorted),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(ISAS),
    fresh=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_round_is_added_to_a_total_with_the_same_bits_and_what_changes_is_kept(
    present: list[int], dtype: torch.dtype, isa: str, fresh: bool, seed: int
) -> None:
    count, ranges = 3 * 1024, ((64, 1500), (1536, 3005))
    gradients, before = make_gradients(count, present[-1] + 1, dtype, seed), torch.linspace(-1, 1, count)
    totals = []
    for adder in (RankSum(100), native.NativeAdder(isa)):
        total, kept = before.clone(), KeptTotal(torch.full((count,), 7.0), torch.tensor([5]))
        adder.add_round(total, gradients, present, ranges[:1], kept, fresh=fresh)
        adder.add_round(total, gradients, present, ranges[1:], kept, fresh=fresh)
        assert int(kept.count) == 3005
        assert torch.equal(kept.values[5:3005], before[5:3005]), "with what lies between the ranges"
        assert kept.values[:5].eq(7.0).all()
        assert kept.values[3005:].eq(7.0).all()
        plain = before.clone()
        adder.add_round(plain, gradients, present, ranges, fresh=fresh)
        assert torch.equal(plain.view(torch.int32), total.view(torch.int32)), "no bit depends on what is kept"
        totals.append(total)
    expected = before.clone()
    for start, stop in ranges:
        summed = RankSum(count).sum(gradients, present, start, stop)
        expected[start:stop] = summed if fresh else summed + before[start:stop]
    assert all(torch.equal(total.view(torch.int32), expected.view(torch.int32)) for total in totals)


def test_ranks_may_send_different_dtypes() -> None:
    mixed = [make_gradients(128, 1, dtype)[0] for dtype in DTYPES]
    wide = [gradient.float() for gradient in mixed]
    ours = updated(native.NativeKernel(), mixed, [segment(128, (0, 1, 2))])
    assert same_bits(ours, updated(native.NativeKernel(), wide, [segment(128, (0, 1, 2))]))


# ---- The same bits ----------------------------------------------------------------------------------------------


@settings(max_examples=min(settings.default.max_examples, 80))
@given(
    ranks=st.integers(1, 17),
    dtype=st.sampled_from(DTYPES),
    params=st.sampled_from([*DTYPES, None]),
    flavour=st.sampled_from(list(FLAVOURS)),
    count=st.integers(1, 40).map(lambda n: 64 * n),
    cuts=st.lists(st.integers(1, 2559), max_size=6),
    tile=st.integers(1, 700),
)
def test_no_cut_and_no_instruction_set_changes_a_bit(
    ranks: int,
    dtype: torch.dtype,
    params: torch.dtype | None,
    flavour: str,
    count: int,
    cuts: list[int],
    tile: int,
) -> None:
    gradients = make_gradients(count, ranks, dtype)
    segments = [segment(count, range(ranks), FLAVOURS[flavour])]
    whole = updated(native.NativeKernel(isa="portable"), gradients, segments, params=params)
    ends = sorted({0, count, *(cut for cut in cuts if cut < count)})
    for isa in ISAS:
        cut = make_memory(count, params)
        for start, stop in itertools.pairwise(ends):
            raw_update(cut, gradients, segments, start, stop, tile, isa)
        assert same_bits(whole, cut), isa


@pytest.mark.parametrize("isa", ISAS)
def test_no_number_of_threads_changes_a_bit(isa: str) -> None:
    count = 40 * native.TILE + 64
    gradients = make_gradients(count, 2, torch.bfloat16)
    segments = [segment(64 * 99, (0, 1)), segment(count - 64 * 100, (1,), offset=64 * 100)]
    alone = updated(native.NativeKernel(threads=1, isa=isa), gradients, segments)
    for threads in (2, 3, 5):
        assert same_bits(alone, updated(native.NativeKernel(threads=threads, isa=isa), gradients, segments))


@pytest.mark.parametrize("isa", ISAS)
def test_memory_at_any_address_gives_the_same_bits(isa: str) -> None:
    count = 64 * 7
    gradients = make_gradients(count, 2, torch.bfloat16)
    want = updated(native.NativeKernel(isa=isa), gradients, [segment(count, (0, 1))])
    for shift in (1, 3, 8, 17):
        master, *states, params = (
            torch.cat([tensor.new_zeros(shift), tensor])[shift:] for tensor in tensors_of(make_memory(count))
        )
        shifted = AdamMemory(master=master, states=plain_states(*states), params=params)
        moved = [torch.cat([g.new_zeros(shift), g])[shift:] for g in gradients]
        native.NativeKernel(isa=isa).update(shifted, moved, [segment(count, (0, 1))], 0.37, limit=LIMIT)
        assert same_bits(want, shifted)


def test_subnormals_are_kept_even_where_the_thread_flushes_them() -> None:
    count, still = 128, replace(ADAMW, lr=0.0)
    memories = []
    for flush in (False, True):
        memory = replace(make_memory(count, params=None), master=torch.full((count,), 1e-40))
        memory.states["exp_avg_sq"].tensors[0].zero_()
        assert torch.set_flush_denormal(flush)
        try:
            gradients = [torch.full((count,), 1e-19)]
            native.NativeKernel().update(memory, gradients, [segment(count, options=still)], 1.0)
            flushes = float(torch.full((64,), 1e-38).mul_(0.1).view(torch.int32)[0]) == 0.0
        finally:
            torch.set_flush_denormal(False)
        assert flushes is flush  # the thread's own setting is back
        memories.append(memory)
    for subnormal in (memories[0].states["exp_avg_sq"].tensors[0], memories[0].master):
        assert 0 < int(subnormal.view(torch.int32)[0]) < 0x00800000
    assert same_bits(*memories)


# ---- Sums of squares ----------------------------------------------------------------------------------------------


def leaf_by_definition(values: Sequence[float]) -> float:
    lanes = [0.0] * 16
    for i, value in enumerate(values):
        lanes[i % 16] += value * value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_sums_of_squares_are_the_written_definition(isa: str, dtype: torch.dtype, ranks: int) -> None:
    start, stop = 64, 64 + 2 * native.LEAF + 777
    gradients = make_gradients(stop + 10, ranks, dtype)
    got = native.NativeSquareSum(isa=isa, threads=2).parts(gradients, range(ranks), [(start, stop)])[0]
    summed = RankSum(stop - start).sum(gradients, range(ranks), start, stop).tolist()
    want = 0.0
    for at in range(0, len(summed), native.LEAF):
        want += leaf_by_definition(summed[at : at + native.LEAF])
    assert struct.pack("d", got) == struct.pack("d", want)


def test_a_sum_alone_wakes_no_helper_and_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 9 * native.LEAF + 5
    gradients = make_gradients(count, 2, torch.bfloat16)
    woken: list[native.NativeSquareSum] = []
    squares = native.NativeSquareSum(threads=2)
    together = squares.parts(gradients, (0, 1), [(0, count)])
    monkeypatch.setattr(squares, "_team_address", lambda: woken.append(squares))
    assert squares.parts(gradients, (0, 1), [(0, count)], alone=True) == together
    assert woken == []
    squares.parts(gradients, (0, 1), [(0, count)])
    assert woken == [squares], "it would have woken one"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_counted_and_passed_on(isa: str, bad: float) -> None:
    count = 64 * 50
    gradients = make_gradients(count, 2, torch.bfloat16)
    at = [0, 5, 1000, count - 1]
    gradients[1][at] = bad
    squares = native.NativeSquareSum(isa=isa)
    assert not math.isfinite(squares.parts(gradients, (0, 1), [(0, count)])[0])
    assert squares.nonfinite(gradients, (0, 1), 0, count) == 4
    assert math.isfinite(squares.parts(gradients, (0,), [(0, count)])[0])
    assert squares.nonfinite(gradients, (0,), 0, count) == 0
    memory = updated(native.NativeKernel(isa=isa), gradients, [segment(count, (0, 1))], limit=math.inf)
    assert memory.params is not None
    hit = torch.zeros(count, dtype=torch.bool)
    hit[at] = True
    assert torch.equal(memory.master.isnan(), hit)
    assert torch.equal(memory.params.isnan(), hit)


def test_a_sum_that_overflows_is_not_finite() -> None:
    gradients = [torch.full((64,), 3e38), torch.full((64,), 3e38)]
    squares = native.NativeSquareSum()
    assert squares.nonfinite(gradients, (0, 1), 0, 64) == 64
    assert math.isfinite(squares.parts(gradients, (0,), [(0, 64)])[0])  # squares of finite gradients never overflow


# ---- Refusals, flags, threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradient", "named"),
    [
        (torch.zeros(128, dtype=torch.float64), "gradient of rank 0 is torch.float64"),
        (torch.zeros(256)[::2], "strides"),
        (torch.zeros(64), "at least 128"),
        (torch.zeros(2, 64), "1D"),
    ],
)
def test_what_c_would_misread_is_refused_by_name(gradient: Tensor, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        native.NativeKernel().update(make_memory(128), [gradient], [segment(128)], 1.0)


def test_memory_that_does_not_fit_is_refused_by_name() -> None:
    kernel, gradients = native.NativeKernel(), make_gradients(128, 1, torch.bfloat16)
    memory = make_memory(128)
    mean, square, _ = (state.read(0, 128) for state in memory.states.values())
    for wrong, options, named in [
        (replace(memory, states=plain_states(mean.to(torch.bfloat16), square)), ADAMW, "exp_avg is torch.bfloat16"),
        (replace(memory, master=memory.master[:64]), ADAMW, "master"),
        (replace(memory, states=plain_states(mean, square)), FLAVOURS["amsgrad"], "amsgrad"),
    ]:
        with pytest.raises(UnsupportedError, match=named):
            kernel.update(wrong, gradients, [segment(128, options=options)], 1.0)
    with pytest.raises(UnsupportedError, match="two segments have element 64"):
        kernel.update(memory, gradients, [segment(128), segment(64, offset=64)], 1.0)


def test_an_instruction_set_that_does_not_run_here_is_refused_by_name() -> None:
    missing = next(isa for isa in (*native.ISAS, "mmx") if isa not in ISAS)
    with pytest.raises(UnsupportedError, match=missing):
        native.NativeKernel(isa=missing)
    assert native.NativeKernel().isa == ISAS[-1]


def helper_states() -> dict[int, str]:
    """What the system says of each helper thread of this process: "S" is asleep."""
    helpers = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            stat = task.joinpath("stat").read_text(encoding="utf-8", errors="replace")
            if "(rayzero-kernel)" in stat:
                helpers[int(task.name)] = stat.rpartition(")")[2].split()[0]
    return helpers


def until_helpers(true: Callable[[dict[int, str]], bool], else_: str) -> None:
    """Return once it is so; they take microseconds, and longer on a loaded machine."""
    for _ in range(10_000):  # 10 s
        if true(helper_states()):
            return
        threading.Event().wait(1e-3)
    pytest.fail(f"{else_}: {helper_states()}")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_helpers_begin_with_the_first_large_call_sleep_when_idle_and_end_with_their_kernel() -> None:
    gc.collect()  # kernels of earlier tests: their helpers end now, not meanwhile
    others, count = helper_states().keys(), 8 * native.TILE
    kernel, gradients = native.NativeKernel(threads=4), make_gradients(count, 1, torch.bfloat16)
    updated(kernel, gradients, [segment(64)])
    assert helper_states().keys() <= others
    updated(kernel, gradients, [segment(count)])
    mine = helper_states().keys() - others
    assert len(mine) == 3
    until_helpers(lambda states: all(states.get(helper) == "S" for helper in mine), "helpers are awake without work")
    del kernel
    until_helpers(lambda states: not mine & states.keys(), "helpers outlive their kernel")


def test_calls_in_quick_succession_lose_and_repeat_nothing() -> None:
    squares, count = native.NativeSquareSum(threads=5), 8 * native.LEAF
    gradients = make_gradients(count, 1, torch.bfloat16)
    want = native.NativeSquareSum(threads=1).parts(gradients, (0,), [(0, count)])[0]
    assert {squares.parts(gradients, (0,), [(0, count)])[0] for _ in range(500)} == {want}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_helpers_of_its_own() -> None:
    count = 40 * native.TILE
    gradients, kernel = make_gradients(count, 1, torch.bfloat16), native.NativeKernel(threads=3)
    mine, childs = make_memory(count), make_memory(count)
    kernel.update(mine, gradients, [segment(count)], 0.5)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # no torch operation here: its own threads do not outlive a fork
        kernel.update(childs, gradients, [segment(count)], 0.5)
        os.write(
            writing, hashlib.sha256(childs.master.numpy()).digest() + bytes([LIBRARY.team_size(kernel._team.address)])
        )
        os._exit(0)
    answer = os.read(reading, 33) if select.select([reading], [], [], 30)[0] else b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading), os.close(writing)
    assert answer == hashlib.sha256(mine.master.numpy()).digest() + bytes([3])


def test_the_kernel_uses_as_many_threads_as_torch() -> None:
    kernel, count = native.NativeKernel(), 8 * native.TILE
    gradients, before = make_gradients(count, 1, torch.bfloat16), torch.get_num_threads()
    try:
        for threads in (2, 1, 3):
            torch.set_num_threads(threads)
            updated(kernel, gradients, [segment(count)])
            assert kernel._team.threads == threads
            assert threads == 1 or LIBRARY.team_size(kernel._team.address) == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.promise("installs", "optimizers")
def test_it_is_chosen_where_it_is_there_and_its_sums_with_it() -> None:
    assert isinstance(choose_kernel("auto"), TorchKernel if native.why_not() else native.NativeKernel)
    assert isinstance(choose_kernel(ZeroConfig(kernel="native").kernel), native.NativeKernel)
    assert isinstance(choose_squares(choose_kernel("native").name), native.NativeSquareSum)
    assert isinstance(choose_squares(choose_kernel("torch").name), SquareSum)


def test_a_processor_without_fused_multiply_add_gets_the_torch_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIBRARY, "has_fma", False)
    assert native.why_not() == "this processor has no fused multiply-add: it would be slower"
    monkeypatch.setattr(LIBRARY, "has_fma", True)
    assert native.why_not() is None


@pytest.mark.parametrize("threads", [1, 2])
def test_several_ranges_in_one_call_have_the_sums_of_each(threads: int) -> None:
    gradients = [torch.randn(5 * native.LEAF).bfloat16() for _ in range(2)]
    ranges = [(0, 1), (64, 64 + 3 * native.LEAF), (64 + 3 * native.LEAF, 64 + 3 * native.LEAF), (7, 4 * native.LEAF)]
    squares = native.NativeSquareSum(threads=threads)
    together = squares.parts(gradients, (0, 1), ranges)
    assert together == [squares.parts(gradients, (0, 1), [one])[0] for one in ranges]
    assert together[2] == 0.0
    assert squares.parts(gradients, (0, 1), []) == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads an x86-64 kernel's flags")
def test_instruction_sets_are_those_that_the_system_lists() -> None:
    """Whatever compiled the library: a compiler's own check of the processor says no to everything under some."""
    flags = set(re.search("^flags.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0].split())
    needed = {"portable": set(), "avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx512f", "avx512bw"}}
    assert [isa for isa, needs in needed.items() if needs <= flags] == ISAS
