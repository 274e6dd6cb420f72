"""Offloaded activations on a simulated device: copies as late as CUDA may make them, equal bits, no race."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from rayzero.activations import ActivationOffload, OffloadPolicy
from tests.activations.models import Exps, equal, transformer
from tests.support.simulated_lane import SimulatedLane

POLICIES = {
    "one ahead": {"prefetch": 1},
    "none ahead": {"prefetch": 0},
    "one in flight": {"prefetch": 3, "max_in_flight": 1},
    "a part, a small host": {"prefetch": 1, "fraction": 0.6, "host_cap_bytes": 40_000},
}


def train(lane: SimulatedLane, seed: int, policy: str) -> None:
    """Three steps, whose gradients are those of a plain model."""
    draws = random.Random(seed)
    model, plain = (transformer(dim=16, num_layers=2, dropout=0.0) for _ in range(2))
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
        assert offload.summary().host["in_use_bytes"] == 0


@pytest.mark.spread(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_copies_gives_equal_gradients(seed: int, policy: str) -> None:
    train(SimulatedLane(seed), seed, policy)


@pytest.mark.spread(2)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("max_in_flight", [0, 1, 3])
def test_the_bound_of_activations_on_the_device_holds_at_every_operation(max_in_flight: int, prefetch: int) -> None:
    """Each group saves one tensor; the model itself computes one more. What leaves last returns first."""
    policy = OffloadPolicy(min_bytes=1, margin=0, max_in_flight=max_in_flight, prefetch=prefetch)
    x = torch.randn(1 << 10, requires_grad=True)
    groups = 1 + max(max_in_flight, prefetch)
    most = 0

    def train(lane: SimulatedLane) -> None:
        def look() -> None:
            nonlocal most
            most = max(most, lane.allocated())
            assert offload._ledger.device_bytes <= groups * x.nbytes

        model = Exps(12)
        with ActivationOffload(model, policy, offload_modules=["steps.*"], lane=lane) as offload:
            torch.autograd.grad(model(x).sum(), x)  # makes the host's buffers
            lane.drain("in")
            with lane.watching(each=look):
                torch.autograd.grad(model(x).sum(), x)

    for seed in range(12):
        train(SimulatedLane(seed))
    assert most // x.nbytes == groups + 1


@pytest.mark.parametrize(("link", "late"), [(1e15, False), (1e6, True)])
def test_a_hit_is_what_the_device_did_not_wait_for(link: float, late: bool) -> None:
    """The host is ahead of its device all the time: what it sees of a copy says nothing."""
    times = itertools.count()
    lane, model = SimulatedLane(0, link=link, clock=lambda: next(times) * 1e-6), Exps(12)
    x = torch.randn(1 << 10, requires_grad=True)
    policy = OffloadPolicy(min_bytes=1, margin=0, max_in_flight=0, prefetch=3)
    with ActivationOffload(model, policy, offload_modules=["steps.*"], lane=lane) as offload:
        for _ in range(3):
            torch.autograd.grad(model(x).sum(), x)
        lane.drain("in")
        (totals,) = offload.summary().groups.values()
    assert (totals.hits, totals.late)[late] == 3 * 11
    assert totals.misses == 3
    assert (totals.stall_s > 0) is late


def test_a_host_that_runs_ahead_of_its_device_needs_no_more_host_memory() -> None:
    lane, model = SimulatedLane(0), Exps(12)  # makes every copy at the last moment
    x = torch.randn(1 << 10, requires_grad=True)
    policy = OffloadPolicy(min_bytes=1, margin=0, max_in_flight=0)
    with ActivationOffload(model, policy, offload_modules=["steps.*"], lane=lane) as offload:
        total = []
        for _ in range(4):
            with lane.watching():
                torch.autograd.grad(model(x).sum(), x)
            total.append(offload.summary().host["total_bytes"])
    assert total == [12 * x.nbytes] * 4
