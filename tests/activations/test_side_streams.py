"""Offloaded activations of a model that computes on several streams: ordered on each, and held for each."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from rayzero.activations import ActivationOffload, OffloadPolicy
from tests.activations.models import equal, two_groups
from tests.support import simulated_autograd
from tests.support.simulated_lane import SimulatedLane

POLICIES: dict[str, dict[str, Any]] = {
    "one ahead": {"prefetch": 1},
    "three ahead": {"prefetch": 3},
    "one in flight": {"prefetch": 2, "max_in_flight": 1},
    "wait for each": {"prefetch": 2, "max_in_flight": 0},
    "a part": {"prefetch": 2, "fraction": 0.6},
    "rounded": {"prefetch": 1, "compress": "bf16"},
}
GROUPS = {"on one stream": "blocks.*.net", "from one stream to another": "blocks.[01].[012]"}
STREAMS = ("compute", "side", "far side")


class Strided(nn.Module):
    """Saves a view of a third of its input: those bytes are gathered before they leave."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1.0)[:, ::3].square()


class Branch(nn.Module):
    """Runs on a stream, and does not wait for it at the end."""

    def __init__(self, stream: str, dim: int, *, strided: bool) -> None:
        super().__init__()
        self.stream = stream
        first = [Strided(), nn.Linear(dim // 3, 3 * dim)] if strided else [nn.Linear(dim, 3 * dim)]
        self.net = nn.Sequential(*first, nn.GELU(), nn.Linear(3 * dim, dim))
        self.lane: SimulatedLane | None = None  # None: on the stream of the caller

    def forward(self, x: Tensor) -> Tensor:
        if self.lane is None:
            return self.net(x)
        caller = str(self.lane.stream())
        with self.lane.on(self.stream):
            self.lane.wait_stream(caller)
            self.lane.used(x)
            return self.net(x)

    def joined(self, out: Tensor) -> Tensor:
        if self.lane is not None:
            self.lane.wait_stream(self.stream)
            self.lane.used(out)
        return out


class Branches(nn.Module):
    """Blocks of three branches, two of which save the same input. They order and hold what their streams share, as a
    model on CUDA has to do without any offload."""

    def __init__(self, streams: list[list[str]], dim: int = 18) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for block in streams:
            branches = [Branch(stream, dim, strided=at == 2) for at, stream in enumerate(block)]
            self.blocks.append(nn.ModuleList(branches))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            outs = [branch(x) for branch in block]
            x = x + sum(branch.joined(out) for branch, out in zip(block, outs, strict=True))
        return x


def train(
    lane: SimulatedLane, seed: int, pattern: str | None, *, delay: bool = False, drops: bool = False, **policy: Any
) -> None:
    """Two steps of two microbatches, whose gradients are those of a plain model (where nothing is rounded).
    ``drops``: on some stream, the second one is dropped when its activations are on their way back."""
    draws = random.Random(seed)
    torch.manual_seed(seed)
    model = Branches([[draws.choice(STREAMS) for _ in range(3)] for _ in range(2)])
    plain = Branches([["compute"] * 3] * 2)
    plain.load_state_dict(model.state_dict())
    for module in model.modules():
        if isinstance(module, Branch):
            module.lane = lane
    # A fill with poison is the host's own work, but the lane takes it for that of the current stream.
    settings = OffloadPolicy(min_bytes=256, margin=0, poison=not drops, **policy)
    names = {} if pattern is None else {"branch": pattern}
    with ActivationOffload(model, settings, offload_modules=names, delay_groups=["branch"], lane=lane) as offload:
        for _ in range(2):
            batches = [torch.randn(draws.choice((12, 20)), 18, requires_grad=True) for _ in range(2)]
            model.zero_grad()
            plain.zero_grad()
            with lane.watching():
                with offload.delayed() if delay else nullcontext():
                    losses = [model(batch.clone()).square().mean() for batch in batches]
                while losses:
                    simulated_autograd.backward(lane, losses.pop(0))
                    if drops:
                        with lane.on(draws.choice(STREAMS)):
                            losses.clear()
                            offload.summary()  # frees
            for batch in batches[:1] if drops else batches:
                plain(batch).square().mean().backward()
            ours, theirs = ([p.grad for p in net.parameters()] for net in (model, plain))
            assert equal(ours, theirs) or "compress" in policy
        assert (offload.summary().offloaded_bytes > 0) is (pattern is not None)
        assert offload.summary().host["in_use_bytes"] == 0


@pytest.mark.parametrize("seed", range(6))
def test_the_model_itself_is_ordered(seed: int) -> None:
    train(SimulatedLane(seed), seed, None)


@pytest.mark.spread(3)
@pytest.mark.parametrize("delay", [False, True], ids=["", "delayed"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_any_stream_saves_and_reads_is_ordered_and_held_for_it(policy: str, groups: str, delay: bool) -> None:
    seed = crc32(f"{policy}, {groups}, {delay}".encode())  # each its own schedule
    train(SimulatedLane(seed), seed, GROUPS[groups], delay=delay, **POLICIES[policy])


@pytest.mark.spread(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_what_nobody_reads_is_held_until_its_copies_are_over(seed: int, policy: str) -> None:
    train(SimulatedLane(seed), seed, GROUPS["on one stream"], drops=True, **POLICIES[policy])


def test_what_is_still_leaving_is_held_for_all_that_use_it() -> None:
    """Bytes that are gathered on one stream, copied out, read on another, and freed by a third."""
    lane = SimulatedLane(0)
    x = torch.randn(30, 18, requires_grad=True)
    policy = OffloadPolicy(min_bytes=1, margin=0, max_in_flight=1)
    with ActivationOffload(nn.Identity(), policy, lane=lane) as offload, lane.watching():
        with lane.on("side"), offload.group("strided", commit=False) as scope:
            loss = Strided()(x).sum()
        scope.commit()
        with lane.on("side"):
            simulated_autograd.backward(lane, loss)
        with lane.on("far side"):
            del loss
            assert offload.summary().host["in_use_bytes"] == 0
    assert torch.equal(x.grad[:, ::3], 2 * (x.detach()[:, ::3] + 1))


def test_what_is_still_leaving_is_held_until_it_has_left() -> None:
    """Nobody reads it any more, and another stream frees it."""
    lane = SimulatedLane(0)
    x = torch.randn(100, requires_grad=True)
    policy = OffloadPolicy(min_bytes=1, margin=0, max_in_flight=1)
    with ActivationOffload(nn.Identity(), policy, lane=lane) as offload, lane.watching():
        with lane.on("side"), offload.group("exp"):
            y = x.exp()
        with lane.on("far side"):
            del y
            assert offload.summary().host["in_use_bytes"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_host_buffer_is_filled_after_a_return_that_only_another_stream_has_waited_for(seed: int) -> None:
    """A graph whose first group was asked for ahead is dropped on another stream than the next forward's."""
    lane = SimulatedLane(seed)
    policy = OffloadPolicy(min_bytes=1, margin=0, max_in_flight=0, prefetch=1)
    with ActivationOffload(nn.Identity(), policy, lane=lane) as offload, lane.watching():
        for _ in range(4):
            x, low, y = two_groups(offload)
            node = low.grad_fn
            del low
            torch.autograd.grad(y, [GradientEdge(node, 0)])  # reads the second alone, and asks for the first ahead
            with lane.on("far side"):
                del x, y, node
                assert offload.summary().host["in_use_bytes"] == 0  # frees
