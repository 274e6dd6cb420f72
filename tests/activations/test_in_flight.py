"""What happens while a copy is held up on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rayzero.activations import ActivationOffload, OffloadPolicy
from tests.activations.models import Exps, two_groups
from tests.support.watched_lane import WatchedLane


def held_up(what: str) -> tuple[Callable[[str, str], None], threading.Event]:
    go = threading.Event()
    return lambda direction, label: f"{direction} {label}" == what and go.wait(60) and None, go


def test_a_host_buffer_is_not_free_while_an_unwanted_copy_in_still_reads_it():
    before, go = held_up("in a")
    lane = WatchedLane(before)
    offload = ActivationOffload(nn.Identity(), OffloadPolicy(min_bytes=1, margin=0, max_in_flight=0), lane=lane)
    x, low, y = two_groups(offload)
    alias = low.grad_fn
    del low
    torch.autograd.grad(y, [torch.autograd.graph.GradientEdge(alias, 0)])  # reads b alone, and asks for a ahead
    del x, y, alias
    status = offload.summary().host
    assert (status["in_use_bytes"], status["returning_bytes"]) == (0, 4096)
    go.set()
    lane.settle("in")
    assert offload.summary().host["returning_bytes"] == 0
    offload.close()


def test_what_is_leaving_when_it_is_wanted_soon_stays():
    before, go = held_up("out a")
    lane = WatchedLane(before)
    offload = ActivationOffload(nn.Identity(), OffloadPolicy(min_bytes=1, margin=0), lane=lane)
    x, low, y = two_groups(offload)
    low.register_hook(lambda grad: (go.set(), lane.settle("out"), None)[2])  # after b began, before a does
    del low
    y.backward()
    totals = offload.summary().groups["a"]
    assert (totals.on_device, totals.misses, totals.returned_bytes) == (1, 0, 0)
    assert x.grad is not None
    assert offload.summary().device_bytes == 0
    offload.close()


def test_a_tensor_saved_changed_and_saved_again_is_stored_twice():
    offload = ActivationOffload(nn.Identity(), OffloadPolicy(min_bytes=1, margin=0, max_in_flight=0))
    x = torch.randn(1000, requires_grad=True)
    y = x * 1.0
    with offload.group("first"):
        before = y * y
    with torch.no_grad():
        y.add_(1)
    with offload.group("second"):
        after = y * y
    del y
    (grad,) = torch.autograd.grad(after.sum(), x)
    assert torch.equal(grad, 2 * (x.detach() + 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.sum().backward()
    offload.close()


@pytest.mark.parametrize("ahead", [2, 5])
def test_only_the_first_group_of_a_step_is_not_asked_for_ahead(ahead):
    model = Exps(3)
    policy = OffloadPolicy(min_bytes=1, margin=0, max_in_flight=0)
    with ActivationOffload(model, policy, offload_modules={"exp": "steps.*"}) as offload:
        for _ in range(3):
            losses = [model(torch.randn(1000, requires_grad=True)).sum() for _ in range(ahead)]
            for index in range(5):
                losses.pop(0).backward()
                if index + ahead < 5:
                    losses.append(model(torch.randn(1000, requires_grad=True)).sum())
        totals = offload.summary().groups["exp"]
    assert totals.misses == 3
    assert totals.hits + totals.late == 3 * (5 * 3 - 1)
