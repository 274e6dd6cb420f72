"""Sums of squares: exact enough, and the same bits whatever computed them."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rayzero.kernels import Squares, choose_kernel, choose_squares
from rayzero.kernels.rank_sum import LEAF, SquareSum
from rayzero.lead.decide import decide, total_norm
from rayzero.protocol.hyper import edited
from rayzero.protocol.messages import Clamp, Edit, EditKind, FinishReport, Norm, NormParts, StepInputs


def gradients(numel: int, ranks: int = 1, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("numel", [1, 63, 64, 255, 257, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF + 1000])
def test_parts_are_sums_of_squares(numel: int) -> None:
    (grad,) = gradients(numel)
    exact = math.fsum(x * x for x in grad.double().tolist())
    assert SquareSum().parts([grad], [0], [(0, numel)])[0] == pytest.approx(exact, rel=1e-14)


def test_bits_depend_on_neither_tiles_nor_threads() -> None:
    numel = 5 * LEAF + 12_345
    grads = gradients(numel, 3, torch.bfloat16)
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for tile in (LEAF, 2 * LEAF, 8 * LEAF):
                found.add(SquareSum(tile).parts(grads, [0, 1, 2], [(0, numel)])[0])
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_leaves_start_at_the_slice_and_not_at_the_shard() -> None:
    numel = 3 * LEAF + 77
    (grad,) = gradients(numel)
    shifted = [torch.cat([torch.randn(640), grad])]
    summer = SquareSum()
    assert summer.parts(shifted, [0], [(640, 640 + numel)])[0] == summer.parts([grad], [0], [(0, numel)])[0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(bad: float) -> None:
    (grad,) = gradients(LEAF + 10)
    grad[LEAF + 3] = bad
    assert not math.isfinite(SquareSum().parts([grad], [0], [(0, grad.numel())])[0])


def test_large_gradients_do_not_overflow() -> None:
    grad = torch.full((1000,), 1e30)
    assert SquareSum().parts([grad], [0], [(0, 1000)])[0] == pytest.approx(1e63, rel=1e-6)


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


UNSCALE, CLIP_NORM, CLIP_VALUE = EditKind.UNSCALE, EditKind.CLIP_NORM, EditKind.CLIP_VALUE


def test_any_order_of_edits_is_one_multiplication_and_one_clamp() -> None:
    """Folded, they give what torch gives when it does one after the other, on what two ranks' gradients sum up to."""
    summed = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = random.Random(0)
    for _ in range(200):
        edits = [Edit(draws.choice(list(EditKind)), draws.choice([0.03, 0.5, 2.0, 20.0])) for _ in range(6)]
        param = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
        param.grad = summed / 2
        norms, known = [float(param.grad.norm())], True
        for edit in edits:
            if edit.kind is UNSCALE:
                param.grad *= edit.value
            elif edit.kind is CLIP_VALUE:
                torch.nn.utils.clip_grad_value_([param], edit.value)
                known = False
            else:
                norm = float(torch.nn.utils.clip_grad_norm_([param], edit.value))
                norms += [] if known else [norm]
                known = True
        what = edited(edits, norms, world_size=2)
        torch.testing.assert_close((summed * what.scale).clamp(-what.limit, what.limit), param.grad)
        if known:
            assert what.norm == pytest.approx(float(param.grad.norm()))
        else:
            assert what.norm is None


def test_a_norm_that_is_not_finite_skips_whatever_clipping_made_of_it() -> None:
    report = FinishReport(step=3, attempt=2, rank=0, counts=())
    norm = Norm(step=3, total=math.nan, finite=False)
    for edits in ((Edit(CLIP_NORM, 1.0),), (Edit(CLIP_VALUE, 1.0), Edit(CLIP_NORM, 1.0))):
        decision = decide([norm], {0: report}, StepInputs(edits=edits, hyper=()), world_size=1)
        assert (decision.action, decision.scale, decision.attempts) == ("skip", 0.0, (2,))


def test_the_norm_of_a_decision_is_that_of_the_unscaled_gradients_before_clipping() -> None:
    norm = Norm(step=0, total=6.0, finite=True)
    inputs = StepInputs(edits=(Edit(UNSCALE, 0.25), Edit(CLIP_NORM, 0.5), Edit(UNSCALE, 2.0)), hyper=())
    decision = decide([norm], {0: FinishReport(step=0, attempt=0, rank=0, counts=())}, inputs, world_size=1)
    assert decision.norm == 3.0


@pytest.mark.parametrize("squares", [SquareSum(), choose_squares(choose_kernel("auto").name)], ids=["torch", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_of_clamped_sums_are_those_of_what_the_update_uses(squares: Squares, dtype: torch.dtype) -> None:
    numel = 3 * LEAF + 70
    draws = torch.Generator().manual_seed(1)
    grads = [torch.randn(numel, generator=draws).to(dtype) for _ in range(2)]
    clamp = Clamp(scale=1 / 3, limit=0.1)
    for ranks in ((0,), (1,), (0, 1)):
        summed = torch.stack([grads[rank] for rank in ranks]).float().sum(0)
        expected = (summed * (1 / 3)).clamp_(-0.1, 0.1).double().square().sum()
        assert squares.parts(grads, ranks, [(64, numel)], clamp)[0] == pytest.approx(
            float(expected) - float((summed[:64] * (1 / 3)).clamp_(-0.1, 0.1).double().square().sum()), rel=1e-12
        )
