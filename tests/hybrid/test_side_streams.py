"""Models that compute on several streams: parameters are back for each stream, and gradients leave after each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayzero import HybridDeviceOptimizer
from tests.hybrid.models import equal, net, weights
from tests.support import simulated_autograd
from tests.support.simulated_lane import SimulatedLane

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
WAYS: list[dict[str, Any]] = [
    {},
    {"in_backward": "step"},
    {"in_backward": "nothing"},
    {"return_in_forward": False},
    {"overlap_cpu_optimizer_d2h_h2d": False},
]
BUCKETS = {"one bucket": 1 << 20, "buckets of both": 4096, "many buckets": 1024}


class Branches(nn.Module):
    """Two branches with the same input, each on a stream. What the streams share is ordered and held, as a model on
    CUDA has to do with any optimizer."""

    def __init__(self, streams: tuple[str, str] = ("compute", "compute"), lane: SimulatedLane | None = None) -> None:
        super().__init__()
        self.branches = nn.ModuleList([net(), net()])
        self.streams, self.lane = streams, lane

    def forward(self, x: Tensor) -> Tensor:
        if self.lane is None:
            return sum(branch(x) for branch in self.branches)
        for stream in self.streams:  # before any of them uses a parameter
            with self.lane.on(stream):
                self.lane.wait_stream("compute")
                self.lane.used(x)
        outs = []
        for stream, branch in zip(self.streams, self.branches, strict=True):
            with self.lane.on(stream):
                outs.append(branch(x))
        for stream, out in zip(self.streams, outs, strict=True):
            self.lane.wait_stream(stream)
            self.lane.used(out)
        return sum(outs)


def interleaved(model: Branches) -> list[nn.Parameter]:
    """So that buckets have parameters of both branches."""
    return [param for pair in zip(*(branch.parameters() for branch in model.branches), strict=True) for param in pair]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("streams", [("side", "compute"), ("compute", "side"), ("side", "far side")], ids=str)
@pytest.mark.parametrize("bucket_bytes", BUCKETS.values(), ids=BUCKETS)
@pytest.mark.parametrize("seed", range(3))
def test_branches_on_several_streams_train_to_equal_weights(
    seed: int, bucket_bytes: int, streams: tuple[str, str], way: dict[str, Any]
) -> None:
    lane = SimulatedLane(seed)
    model, twin = Branches(streams, lane), Branches()
    hybrid = HybridDeviceOptimizer(interleaved(model), 1.0, lane=lane, bucket_bytes=bucket_bytes, **way, **ADAMW)
    reference = torch.optim.AdamW(interleaved(twin), fused=True, **ADAMW)
    try:
        for step in range(3):
            x = torch.randn(8, 13, generator=torch.Generator().manual_seed(step))
            with lane.watching():
                simulated_autograd.backward(lane, model(x.clone()).square().mean())
                hybrid.step()
                hybrid.zero_grad(set_to_none=step % 2 == 0)
            twin(x).square().mean().backward()
            reference.step()
            reference.zero_grad(set_to_none=step % 2 == 0)
        assert equal(weights(model), weights(twin))
    finally:
        hybrid.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_bucket_leaves_after_the_gradients_of_every_stream(seed: int) -> None:
    lane = SimulatedLane(seed)
    model = Branches(("side", "compute"), lane)
    hybrid = HybridDeviceOptimizer(interleaved(model), 1.0, lane=lane, **ADAMW)
    (run,) = hybrid._runs
    try:
        with lane.watching():
            loss = model(torch.randn(8, 13)).square().mean()
            simulated_autograd.backward(lane, loss)
            assert len(run.sends) == 1, "in backward"
            lane.drain("out")
        sent = zip(run.bucket.grad_views, run.params, strict=True)
        assert all(torch.equal(view, param.grad) for view, param in sent)
    finally:
        hybrid.close()
