"""The hybrid optimizer on a simulated device: copies as late as CUDA may make them, equal bits, no race."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from rayzero import HybridDeviceOptimizer
from rayzero.errors import UnsupportedError
from tests.hybrid.models import backward, equal, net, weights
from tests.support.simulated_lane import SimulatedLane

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
@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_of_copies_gives_equal_weights(seed: int, fraction: float, way: dict[str, Any]) -> None:
    train(SimulatedLane(seed), fraction, **way)


@contextmanager
def stepping(seed: int) -> Iterator[tuple[SimulatedLane, nn.Module, HybridDeviceOptimizer]]:
    """A watched lane, a model that is updated in host memory and has gradients, which are on their way there."""
    lane, model = SimulatedLane(seed), net()
    with closing(HybridDeviceOptimizer(model.parameters(), 1.0, lane=lane, **ADAMW)) as hybrid, lane.watching():
        backward(model, 0)
        assert all(run.sends for run in hybrid._runs)
        yield lane, model, hybrid


@pytest.mark.parametrize("seed", range(3))
def test_parameters_return_after_what_has_read_them_since_backward(seed: int) -> None:
    with stepping(seed) as (_, model, hybrid):
        torch._foreach_norm(list(model.parameters()))
        hybrid.step()
        hybrid.wait()


@pytest.mark.parametrize("seed", range(3))
def test_a_model_and_its_optimizer_may_be_dropped_while_parameters_return(seed: int) -> None:
    lane = SimulatedLane(seed)
    with lane.watching():
        model = net()
        hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, lane=lane, **ADAMW)
        backward(model, 0)
        hybrid.step()
        hybrid._sides.host.close()  # the worker has issued the copies, and holds nothing
        gone = [weakref.ref(param) for param in model.parameters()]
        del model, hybrid
        gc.collect()
        assert not any(ref() is not None for ref in gone)
    lane.drain("in")


@pytest.mark.parametrize("seed", range(3))
def test_a_capture_that_uses_a_parameter_on_its_way_back_is_refused_by_name(seed: int) -> None:
    with stepping(seed) as (lane, model, hybrid):
        hybrid.step()
        with pytest.raises(UnsupportedError, match="capture both, or neither"), lane.captured():
            model(torch.ones(1, 13))
        model(torch.ones(1, 13))
