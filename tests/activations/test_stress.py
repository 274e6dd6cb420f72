"""Random delays in the copy lane, poisoned buffers, a small host: no difference."""

from __future__ import annotations

import random
import time

import pytest
import torch

from rayzero.activations import ActivationOffload, OffloadPolicy
from tests.activations.models import equal, transformer
from tests.support.watched_lane import WatchedLane

pytestmark = pytest.mark.thorough

RUNS = 1000


@pytest.mark.thorough
def test_a_thousand_steps_with_random_delays_are_bit_equal():
    rng = random.Random(11)
    model, plain = (transformer(dim=16, num_layers=2, dropout=0.0) for _ in range(2))
    inputs = [torch.randn(2, length, 16) for length in (4, 7, 12)]

    def step(net, x):
        net.zero_grad()
        net(x).square().mean().backward()
        return [p.grad for p in net.parameters()]

    want = [[grad.clone() for grad in step(plain, x)] for x in inputs]

    def delay(direction: str, label: str) -> None:
        if rng.random() < 0.05:
            time.sleep(rng.choice((2e-4, 2e-3)))  # the fault under test

    done = 0
    for prefetch, limit, fraction, cap in [
        (1, None, 1.0, None),
        (0, None, 1.0, None),
        (3, 1, 1.0, None),
        (1, None, 0.6, 40_000),
    ]:
        policy = OffloadPolicy(
            min_bytes=512, margin=0, prefetch=prefetch, max_in_flight=limit, fraction=fraction, poison=True,
            host_cap_bytes=cap,
        )  # fmt: skip
        lane = WatchedLane(delay)
        patterns = {"attn": "layers.*.attn", "mlp": "layers.*.mlp"}
        with ActivationOffload(model, policy, offload_modules=patterns, lane=lane) as offload:
            for _ in range(RUNS // 4):
                index = rng.randrange(3)
                assert equal(step(model, inputs[index]), want[index])
                done += 1
            assert offload.summary().offloaded_bytes > 0
            assert offload.summary().device_bytes == 0
            assert offload.summary().host["in_use_bytes"] == 0
    assert done == RUNS
