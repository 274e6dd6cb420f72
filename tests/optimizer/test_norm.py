"""Sums of squares: exact enough, and the same bits whatever computed them."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rayzero.messages import FinishReport, Norm, NormParts, StepInputs
from rayzero.optimizer.decide import clip_factor, decide, total_norm
from rayzero.optimizer.norm import LEAF, SquareSum


def gradients(numel: int, ranks: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("numel", [1, 63, 64, 255, 257, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF + 1000])
def test_parts_are_sums_of_squares(numel: int) -> None:
    (grad,) = gradients(numel)
    exact = math.fsum(x * x for x in grad.double().tolist())
    assert SquareSum().part([grad], [0], 0, numel) == pytest.approx(exact, rel=1e-14)


def test_bits_depend_on_neither_tiles_nor_threads() -> None:
    numel = 5 * LEAF + 12_345
    grads = gradients(numel, 3, torch.bfloat16)
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for tile in (LEAF, 2 * LEAF, 8 * LEAF):
                found.add(SquareSum(tile).part(grads, [0, 1, 2], 0, numel))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_leaves_start_at_the_slice_and_not_at_the_shard() -> None:
    numel = 3 * LEAF + 77
    (grad,) = gradients(numel)
    shifted = [torch.cat([torch.randn(640), grad])]
    summer = SquareSum()
    assert summer.part(shifted, [0], 640, 640 + numel) == summer.part([grad], [0], 0, numel)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(bad: float) -> None:
    (grad,) = gradients(LEAF + 10)
    grad[LEAF + 3] = bad
    assert not math.isfinite(SquareSum().part([grad], [0], 0, grad.numel()))


def test_large_gradients_do_not_overflow() -> None:
    grad = torch.full((1000,), 1e30)
    assert SquareSum().part([grad], [0], 0, 1000) == pytest.approx(1e63, rel=1e-6)


def test_parts_are_added_in_shard_order_whoever_sent_them() -> None:
    for seed in range(30):  # owner by owner, half of such draws give other bits
        values = random.Random(seed)
        parts = [(shard, slot, values.random() * 10 ** values.randint(-3, 3)) for shard in range(9) for slot in (0, 2)]
        totals = set()
        for num_owners in (1, 2, 3, 5):
            owners = [
                NormParts(step=4, parts=tuple(part for part in parts if part[0] % num_owners == owner))
                for owner in reversed(range(num_owners))
            ]
            totals.add(total_norm(4, owners, world_size=2).total)
        (total,) = totals
        assert total == pytest.approx(math.sqrt(sum(part[2] for part in parts)) / 2)


def test_factors_of_several_clips_multiply() -> None:
    assert clip_factor(10.0, []) == 1.0
    assert clip_factor(0.5, [1.0]) == 1.0
    once = clip_factor(10.0, [2.0])
    assert once == 2.0 / (10.0 + 1e-6)
    assert clip_factor(10.0, [2.0, 1.0]) == once * (1.0 / (10.0 * once + 1e-6))


def test_a_norm_that_is_not_finite_skips() -> None:
    report = FinishReport(step=3, attempt=2, rank=0, counts=())
    norm = Norm(step=3, total=math.nan, finite=False)
    decision = decide(norm, {0: report}, StepInputs(max_norms=(1.0,), hyper=()), world_size=1)
    assert (decision.action, decision.scale, decision.attempts) == ("skip", 0.0, (2,))
