"""What the caller overwrites once step() has returned: the copies out have been made by then, however late they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayzero import HybridDeviceOptimizer
from rayzero.lanes import Direction, Event, ThreadLane
from tests.hybrid.models import backward, equal, net, weights
from tests.support.watched_lane import WatchedLane

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


class LastMomentLane(ThreadLane):
    """Copies gradients at the last moment that is allowed: when the caller orders its own work after them.

    The worker, which joins them, waits until then. ``run_out`` makes all that is left, as a slow link would one day."""

    def __init__(self) -> None:
        super().__init__(overlap=False)
        self._left: list[LateEvent] = []
        self._running = threading.RLock()

    def issue(self, direction: Direction, copy: Callable[[], object], **options: Any) -> Event:
        if direction == "in":
            return super().issue(direction, copy, **options)
        event = LateEvent(self, lambda: super(LastMomentLane, self).issue(direction, copy, **options))
        self._left.append(event)
        return event

    def close(self) -> None:
        self.run_out()

    def run_out(self) -> None:
        with self._running:
            while self._left:
                self._left.pop(0).run()


class LateEvent:
    def __init__(self, lane: LastMomentLane, copy: Callable[[], Event]) -> None:
        self._lane, self._copy, self._made = lane, copy, threading.Event()

    def run(self) -> None:
        self._copy().wait()
        self._made.set()

    def wait(self) -> None:
        self._lane.run_out()

    def join(self) -> None:
        assert self._made.wait(60), "nobody ordered anything after this copy"


def gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters()]


def refill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A buffer of the caller's own becomes the gradient of the next step."""
    draws = torch.Generator().manual_seed(7)
    for grad in gradients(model):
        grad.copy_(torch.randn(grad.shape, generator=draws))


def through_numpy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for grad in gradients(model):
        grad.numpy()[...] = 3.0


CHANGES = {
    "zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "zero_": lambda model, optimizer: [grad.zero_() for grad in gradients(model)],
    "foreach": lambda model, optimizer: torch._foreach_mul_(gradients(model), 0.5),
    "data": lambda model, optimizer: [grad.data.fill_(-1.0) for grad in gradients(model)],
    "numpy": through_numpy,
    "refilled": refill,
    "accumulated": lambda model, optimizer: [grad.add_(1.0) for grad in gradients(model)],
    "freed": lambda model, optimizer: [grad.untyped_storage().resize_(0) for grad in gradients(model)],
}


def flat_gradients(model: nn.Module) -> None:
    """Every gradient is a view of one buffer that stays, as frameworks with gradient buffers have it."""
    params = list(model.parameters())
    flat = torch.zeros(sum(param.numel() for param in params))
    for param, view in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.grad = view.view_as(param)


@pytest.mark.parametrize(
    ("in_backward", "flat"), [("nothing", False), ("send", False), ("send", True), ("step", False)]
)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_belong_to_the_caller_once_step_has_returned(change, gated, fraction, in_backward, flat):
    model, twin, lane = net(), net(), LastMomentLane()
    hybrid = HybridDeviceOptimizer(
        model.parameters(), fraction, lane=lane, in_backward=in_backward, return_in_forward=gated, bucket_bytes=4096,
        **ADAMW,
    )  # fmt: skip
    reference = torch.optim.AdamW(twin.parameters(), fused=True, **ADAMW)
    for step in range(3):
        for each, optimizer in ((model, hybrid), (twin, reference)):
            if flat and change != "freed":
                flat_gradients(each)
            backward(each, step)
            optimizer.step()
            CHANGES[change](each, optimizer)
            if change == "freed":
                optimizer.zero_grad()
        lane.run_out()
        assert equal(weights(model), weights(twin))
    hybrid.close()


def test_a_buffer_that_is_refilled_after_step_is_the_next_steps_gradient():
    """No backward at all: the caller fills ``decoupled_grad``, steps, and fills it again at once."""
    model, twin, lane = net(), net(), LastMomentLane()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, lane=lane, bucket_bytes=4096, **ADAMW)
    reference = torch.optim.AdamW(twin.parameters(), fused=True, **ADAMW)
    buffers = [torch.empty_like(param) for param in model.parameters()]
    draws = torch.Generator().manual_seed(1)
    for _ in range(3):
        for buffer, ours, theirs in zip(buffers, model.parameters(), twin.parameters(), strict=True):
            buffer.copy_(torch.randn(buffer.shape, generator=draws))
            ours.decoupled_grad, theirs.grad = buffer, buffer.clone()
        hybrid.step()
        reference.step()
    for buffer in buffers:
        buffer.zero_()
    lane.run_out()
    assert equal(weights(model), weights(twin))
    hybrid.close()


def test_a_copy_out_that_fails_ends_the_step_and_every_use_after_it():
    def fail(direction: str, label: str) -> None:
        if direction == "out":
            raise OSError("the link is down")

    model = net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, lane=WatchedLane(fail), **ADAMW)
    backward(model, 0)
    for attempt in (hybrid.step, lambda: model(torch.ones(1, 13)), hybrid.step):
        with pytest.raises(OSError, match="the link is down"):
            attempt()


def test_options_in_tensors_belong_to_the_caller_once_step_has_returned():
    """The worker takes the options as they were at step(), also tensors that are then changed in place."""

    def options() -> dict[str, object]:
        return {"lr": torch.tensor(1e-2), "betas": (torch.tensor(0.9), torch.tensor(0.99)), "weight_decay": 0.1}

    begin = threading.Event()

    class Held:
        """A copy that ends late for the worker, while the caller goes on."""

        def __init__(self, copy: Event) -> None:
            self._copy = copy
            self.wait = copy.wait

        def join(self) -> BaseException | None:
            assert begin.wait(60)
            return self._copy.join()

    class Lane(ThreadLane):
        def issue(self, direction: Direction, copy: Callable[[], object], **options: Any) -> Event:
            event = super().issue(direction, copy, **options)
            return Held(event) if direction == "out" else event

    model, twin = net(), net()
    hybrid = HybridDeviceOptimizer(model.parameters(), 1.0, lane=(lane := Lane()), **options())
    reference = torch.optim.AdamW(twin.parameters(), fused=True, **options())
    for step in range(2):
        begin.clear()
        for each, optimizer in ((model, hybrid), (twin, reference)):
            optimizer.zero_grad()
            backward(each, step)
            optimizer.step()
            group = optimizer.param_groups[0]
            group["lr"].mul_(0.5)
            group["betas"][0].mul_(0.9)
        begin.set()
        assert equal(weights(model), weights(twin))
    hybrid.close()
    lane.close()
