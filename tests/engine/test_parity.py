"""Training on several ranks gives the weights of unsharded training on all ranks' batches."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks

from .models import Net, oracle, relative_difference, same_bits, seeded, tight, token_loss, tokens

STEPS, MAX_NORM = 20, 0.5

adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=True)


def train(
    context: RankContext, base: nn.Module, config: ZeroConfig, *, steps: int = STEPS, max_norm: float | None = MAX_NORM
) -> tuple[dict[str, Tensor], list[float]]:
    """A plain loop on one rank; the complete state and the norms before clipping."""
    model = copy.deepcopy(base)
    model, optimizer = rayzero.prepare(model, adamw(model.parameters()), config)
    norms = []
    for step in range(steps):
        token_loss(model, tokens(step, context.rank)).backward()
        if max_norm is not None:
            norms.append(float(optimizer.clip_grad_norm_(max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return rayzero.full_state_dict(model), norms


SMALL_SHARDS = ZeroConfig(shard_bytes=16 << 10, min_unit_bytes=1 << 12)


@pytest.mark.promise("exact", "optimizers")
@pytest.mark.spread(1)
@pytest.mark.parametrize("world_size", [2, 1, 3])
def test_twenty_clipped_adamw_steps_equal_unsharded_training_for_any_number_of_owners(world_size: int) -> None:
    base = seeded(Net)
    expected, expected_norms = oracle(base, adamw, world_size=world_size, steps=STEPS, max_norm=MAX_NORM)
    assert all(norm > MAX_NORM for norm in expected_norms), "clipping must trigger"
    first = None
    for num_optimizers in (1, 2, 5):
        results = run_ranks(lambda ctx: train(ctx, base, SMALL_SHARDS), world_size, num_optimizers)
        state, norms = results[0]
        assert relative_difference(state, expected) <= 1e-6
        assert norms == pytest.approx(expected_norms, rel=1e-6)
        first = first or state
        assert all(same_bits(other, first) for other, _ in results)


def test_one_rank_without_clipping_is_bit_equal_to_fused_adamw() -> None:
    base = seeded(Net)
    expected, _ = oracle(base, adamw, world_size=1, steps=STEPS)
    ((state, _),) = run_ranks(lambda ctx: train(ctx, base, ZeroConfig(), max_norm=None), 1, 2)
    assert same_bits(state, expected)


VARIANTS = {
    "no overlap": ZeroConfig(overlap="none"),
    "no prefetch": tight(Net(), async_prefetch=False),
    "one ahead": tight(Net(), prefetch_buffer_size=1),
    "synchronous": ZeroConfig(overlap_computation=False),
    "resident": ZeroConfig(offload_params=False),
    "sums on the device": ZeroConfig(offload_grads=False),
    "clip in the step": ZeroConfig(max_grad_norm=MAX_NORM),
    "small budget": ZeroConfig(gpu_param_memory_budget=160 << 10),
    "other shard map": ZeroConfig(shard_map="contiguous"),
}


@pytest.fixture
def two_ranks() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model, and what two ranks make of it in five steps with all defaults."""
    base = seeded(Net)
    return base, run_ranks(lambda ctx: train(ctx, base, ZeroConfig(), steps=5), 2, 2)[0][0]


@pytest.mark.promise("hidden", "precisions")
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_do_not_depend_on_how_bytes_move(variant: str, two_ranks: tuple[nn.Module, dict[str, Tensor]]) -> None:
    base, expected = two_ranks
    config = VARIANTS[variant]
    clip = None if config.max_grad_norm else MAX_NORM
    for state, _ in run_ranks(lambda ctx: train(ctx, base, config, steps=5, max_norm=clip), 2, 3):
        assert same_bits(state, expected)


@pytest.mark.promise("exact", "transports")
def test_bits_do_not_depend_on_the_transport(two_ranks: tuple[nn.Module, dict[str, Tensor]]) -> None:
    base, expected = two_ranks
    for state, _ in run_ranks(lambda ctx: train(ctx, base, ZeroConfig(), steps=5), 2, 2, "grpc"):
        assert same_bits(state, expected)
