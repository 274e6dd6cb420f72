"""The hybrid optimizer on a simulated device: copies as late as CUDA may make them, equal bits, no race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayzero import HybridDeviceOptimizer
from rayzero.testing.simulated_lane import SimulatedLane
from tests.hybrid.models import backward, equal, net, weights
from tests.mutated_lane import FOUND, MutatedLane, out_at_once, unchanged

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
WAYS = [
    {},
    {"in_backward": "send"},
    {"in_backward": "step"},
    {"return_in_forward": True},
    {"in_backward": "send", "return_in_forward": True},
]


def train(lane: SimulatedLane, fraction: float, **way: Any) -> None:
    """Four steps, after each of which the weights are those of torch's AdamW."""
    model, twin = net(), net()
    hybrid = HybridDeviceOptimizer(model.parameters(), fraction, lane=lane, bucket_bytes=4096, **way, **ADAMW)
    reference = torch.optim.AdamW(twin.parameters(), fused=True, **ADAMW)
    try:
        for step in range(4):
            with lane.watching():
                backward(model, step)
                hybrid.step()
                hybrid.zero_grad(set_to_none=step % 2 == 0)
            backward(twin, step)
            reference.step()
            reference.zero_grad(set_to_none=step % 2 == 0)
        assert equal(weights(model), weights(twin))
    finally:
        hybrid.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("seed", range(20))
def test_any_schedule_of_copies_gives_equal_weights(seed: int, fraction: float, way: dict[str, Any]) -> None:
    train(SimulatedLane(seed), fraction, **way)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("change", "waits", "way"),
    [
        (out_at_once, True, {}),
        (unchanged, False, {}),
        (out_at_once, True, {"in_backward": "send"}),
        (unchanged, False, {"in_backward": "step"}),
    ],
)
def test_a_missing_wait_is_found_with_every_seed(
    change: Callable[[str, dict[str, Any]], dict[str, Any]], waits: bool, way: dict[str, Any], seed: int
) -> None:
    with pytest.raises(FOUND):
        train(MutatedLane(seed, change, waits), 1.0, **way)
