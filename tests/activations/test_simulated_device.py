"""Offloaded activations on a simulated device: copies as late as CUDA may make them, equal bits, no race."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayzero.activations import ActivationOffload, OffloadPolicy
from rayzero.testing.simulated_lane import SimulatedLane
from tests.activations.models import equal, transformer
from tests.mutated_lane import FOUND, MutatedLane, in_at_once, not_held, out_at_once, unchanged

POLICIES = {
    "one ahead": {"prefetch": 1},
    "none ahead": {"prefetch": 0},
    "one in flight": {"prefetch": 3, "max_in_flight": 1},
    "a part, a small host": {"prefetch": 1, "fraction": 0.6, "host_cap_bytes": 40_000},
}


def train(lane: SimulatedLane, seed: int, policy: str) -> None:
    """Three steps, whose gradients are those of a plain model."""
    draws = random.Random(seed)
    model, plain = transformer(dim=16, num_layers=2), transformer(dim=16, num_layers=2)
    for layer in [*model.layers, *plain.layers]:
        layer.drop.p = 0.0
    settings = OffloadPolicy(min_bytes=512, margin=0, poison=True, **POLICIES[policy])
    patterns = {"attn": "layers.*.attn", "mlp": "layers.*.mlp"}
    with ActivationOffload(model, settings, offload_modules=patterns, lane=lane) as offload:
        for _ in range(3):
            x = torch.randn(2, draws.choice((4, 7, 12)), 16)
            with lane.watching():
                model.zero_grad()
                model(x).square().mean().backward()
            plain.zero_grad()
            plain(x).square().mean().backward()
            ours, theirs = ([p.grad for p in net.parameters()] for net in (model, plain))
            assert equal(ours, theirs)
        assert offload.summary().offloaded_bytes > 0
        assert offload.pool_status().in_use_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(50))
def test_any_schedule_of_copies_gives_equal_gradients(seed: int, policy: str) -> None:
    train(SimulatedLane(seed), seed, policy)


@pytest.mark.parametrize(
    ("change", "waits"), [(not_held, True), (in_at_once, True), (out_at_once, True), (unchanged, False)]
)
def test_a_missing_wait_or_hold_is_found(change: Callable[[str, dict[str, Any]], dict[str, Any]], waits: bool) -> None:
    """With one of a few seeds: where copies are as late as they may be, nothing leaves the device in time to return."""
    found = 0
    for seed in range(12):
        try:
            train(MutatedLane(seed, change, waits), seed, "one ahead")
        except FOUND:
            found += 1
    assert found >= 3
