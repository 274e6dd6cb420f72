"""The same on a CUDA device; skipped without one."""

from __future__ import annotations

import pytest
import torch

from rayzero import HybridDeviceOptimizer
from tests.hybrid.models import net, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.parametrize("in_backward", ["nothing", "send", "step"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_weights_are_close_to_the_device_optimizers(fraction, overlap, in_backward):
    model, twin = net().cuda(), net().cuda()
    want = train(twin, torch.optim.AdamW(twin.parameters(), fused=True, **ADAMW), 10)
    hybrid = HybridDeviceOptimizer(
        model.parameters(),
        fraction,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        in_backward=in_backward,
        bucket_bytes=4096,
        **ADAMW,
    )
    got = train(model, hybrid, 10)
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(got, want, strict=True))
    assert all(run.bucket.params.is_pinned() and run.bucket.grads.is_pinned() for run in hybrid._runs)


def test_states_lie_where_their_side_is():
    model = net().cuda()
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.4, **ADAMW)
    train(model, hybrid, 1)
    params = list(model.parameters())
    assert hybrid.state[params[0]]["exp_avg"].device.type == "cpu"
    assert hybrid.state[params[-1]]["exp_avg"].device.type == "cuda"


def test_parameters_on_the_cpu_are_the_hosts_and_are_not_counted():
    model = net()
    model[0].cuda()
    hybrid = HybridDeviceOptimizer(model.parameters(), 0.0, **ADAMW)
    assert hybrid.placement().offload_fraction == 0.0
    assert hybrid.placement().num_buckets == 1
