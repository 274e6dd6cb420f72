"""Activation offload in the engine: weights are handles, activations wait in host memory, no bit changes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import ConfigError
from rayzero.testing import run_ranks
from tests.support.leftovers import threads, threads_left

from .models import WIDTH, Net, fit, prepared_copy, same_bits, seeded, tight, token_loss, tokens

BATCH, LENGTH = 4, 8  # of tokens()
ROW = BATCH * LENGTH * WIDTH * 4  # bytes of one activation of width WIDTH

momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # its buffer after a step is the averaged gradient
PLACES = {
    "the units themselves": ("net.layers.?",),
    "inside units": ("net.layers.?.up", "net.layers.?.down"),
    "around units": ("net",),
    "nested": ("net", "net.layers.?.up"),
}


class Whole(nn.Module):
    """A Net inside another module, which has a name of its own so."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(num_layers=4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)


def offloading(model: nn.Module, *, up: bool, patterns: tuple[str, ...], **settings: Any) -> ZeroConfig:
    """``up``: the whole model stays up, and weights need no handles."""
    own = {"offload_activations": patterns, "activation_min_bytes": ROW} | settings
    return ZeroConfig(**own) if up else tight(model, prefetch_buffer_size=1, **own)


def trained(
    context: RankContext, base: nn.Module, config: ZeroConfig, steps: int = 3
) -> tuple[dict[str, Tensor], list[Tensor], list[tuple[str, str]], Any]:
    """Complete weights, the first step's gradients, the units' events, and what the offload counted."""
    model, optimizer = prepared_copy(base, momentum, config)
    events: list[tuple[str, str]] = []
    optimizer.engine.cache.observers.append(lambda verb, unit: events.append((verb, unit)))
    gradients: list[Tensor] = []
    for step in range(steps):
        fit(model, optimizer, [step], context.rank)
        if not gradients:
            gradients = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    assert optimizer.engine.residency.budget.peak <= config.gpu_param_memory_budget
    activations = optimizer.engine.activations
    return rayzero.full_state_dict(model), gradients, events, activations and activations.summary()


@pytest.mark.promise("exact", "activations")
@pytest.mark.usefixtures("full_depth")
@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_gradients_and_the_units_schedule_are_those_without(place, world_size, up):
    base = seeded(Whole)
    config = offloading(base, up=up, patterns=PLACES[place])
    want = run_ranks(lambda ctx: trained(ctx, base, config.replace(offload_activations=())), world_size, 2)
    got = run_ranks(lambda ctx: trained(ctx, base, config), world_size, 2)
    for (state, gradients, events, counted), plain in zip(got, want, strict=True):
        assert same_bits(state, plain[0])
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain[1], strict=True))
        assert sorted(set(events)) == sorted(set(plain[2]))
        assert counted.offloaded_bytes > 0
        assert (counted.device_bytes, counted.host["in_use_bytes"]) == (0, 0)


@pytest.mark.parametrize("up", [False, True])
def test_what_leaves_are_the_activations_and_no_weight(up):
    base = seeded(lambda: Net(num_layers=4))
    config = offloading(base, up=up, patterns=("layers.?",))
    ((_, _, _, counted),) = run_ranks(lambda ctx: trained(ctx, base, config, steps=1), 1, 1)
    # A block saves its input, the normed input, and two tensors twice as wide: gelu's input and its output.
    assert counted.groups["layers.?"].saved_bytes == 4 * (1 + 1 + 2 + 2) * ROW


@pytest.mark.parametrize("up", [False, True])
def test_the_share_that_leaves_and_the_memory_it_may_take_are_the_configs(up):
    base = seeded(lambda: Net(num_layers=4))
    config = offloading(base, up=up, patterns=("layers.?",), activation_fraction=0.5)
    half = run_ranks(lambda ctx: trained(ctx, base, config, steps=2), 1, 1)[0][3]
    # Of 24 rows a step, the last group's 6 stay; in the first step the total is not known yet, and half of all leaves.
    assert half.offloaded_bytes == 12 * ROW + (24 - 6) // 2 * ROW
    capped = config.replace(activation_fraction=1.0, activation_host_budget=2 * ROW)
    assert run_ranks(lambda ctx: trained(ctx, base, capped), 1, 1)[0][3].host["peak_bytes"] <= 2 * ROW


@pytest.mark.parametrize("up", [False, True])
def test_a_budget_is_kept_by_offload_or_recomputation(up, monkeypatch):
    from rayzero.activations.cost import Choice, CostBook

    choices = [Choice.RECOMPUTE, Choice.OFFLOAD, Choice.KEEP, Choice.RECOMPUTE]

    def choice(self: CostBook, group: Any) -> Choice:  # the plan's own would depend on measured times
        known = group.key in self._measured
        return choices[int(group.key.label.removeprefix("layers."))] if known else Choice.OFFLOAD

    monkeypatch.setattr(CostBook, "choice", choice)
    base = seeded(lambda: Net(num_layers=4))
    config = offloading(base, up=up, patterns=("layers.?",), activation_device_budget=ROW)
    want, got = (
        run_ranks(lambda ctx, config=config: trained(ctx, base, config), 1, 1)[0]
        for config in (config.replace(offload_activations=()), config)
    )
    assert same_bits(got[0], want[0])
    totals = got[3].groups["layers.?"]
    assert totals.recomputed == 2 * 2  # layers 0 and 3, in two steps
    assert totals.offloaded_bytes == (4 + 2 * 1) * 6 * ROW  # all in the first step, then layer 1


def test_a_users_own_hooks_outside_keep_what_they_pack():
    base = seeded(Net)
    config = offloading(base, up=False, patterns=("layers.?",))
    with running_in(RankContext(config=config)):
        model, optimizer = rayzero.prepare(base, momentum(base.parameters()))
        packed: list[int] = []
        with saved_tensors_hooks(lambda t: (packed.append(t.numel()), t)[1], lambda t: t):
            loss = token_loss(model, tokens(0))
        loss.backward()
        assert packed
        assert optimizer.engine.activations.summary().groups == {}


def test_a_copy_of_the_model_has_no_offload_and_threads_end_with_the_rank():
    base = seeded(Net)
    before = threads()
    with running_in(RankContext(config=offloading(base, up=False, patterns=("layers.?",)))):
        model, optimizer = rayzero.prepare(base, momentum(base.parameters()))
        token_loss(model, tokens(0)).backward()
        left = optimizer.engine.activations.summary().offloaded_bytes
        plain = copy.deepcopy(model)
        token_loss(plain, tokens(0)).backward()
        assert optimizer.engine.activations.summary().offloaded_bytes == left > 0
    assert threads_left(before) == []


@pytest.mark.promise("refused", "activations")
def test_a_pattern_without_match_is_refused_before_anything_is_changed():
    base = seeded(Net)
    with running_in(RankContext()), pytest.raises(ConfigError, match=r"^offload_activations: 'blocks\.\*' matches no"):
        rayzero.prepare(base, momentum(base.parameters()), ZeroConfig(offload_activations="blocks.*"))
    assert type(base.embed.weight) is nn.Parameter


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("up", [False, True])
def test_on_cuda_gradients_are_those_without_and_activations_leave_the_device(up):
    base = seeded(lambda: Net(num_layers=4)).cuda()
    batch = tuple(part.cuda() for part in tokens(0))
    found = []
    for patterns in ((), ("layers.?",)):
        with running_in(RankContext(config=offloading(base, up=up, patterns=patterns))):
            model, optimizer = prepared_copy(base, momentum)
            token_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append([state["momentum_buffer"].cpu() for state in optimizer.state_dict()["state"].values()])
    assert optimizer.engine.activations.summary().offloaded_bytes > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
