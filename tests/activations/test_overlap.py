"""Copies run beside the computation: what started before what ended."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from rayzero.activations import ActivationOffload, OffloadPolicy
from tests.activations.models import Exps
from tests.support.watched_lane import WatchedLane


class Timeline:
    """When each module computed and when each copy moved its bytes, on one clock.

    A copy moves only once the module beside it has begun, and that one goes on only once the copy is over: if copies
    and computation could not run at the same time, nothing would ever end."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.moving: dict[str, float] = {}  # a copy's bytes begin to move
        self.lane = WatchedLane(self._hold)
        self._changed = threading.Condition()

    def begin(self, what: str) -> None:
        with self._changed:
            self.began[what] = time.perf_counter()
            self._changed.notify_all()

    def end(self, what: str, after: str) -> None:
        """``what`` has computed; ``after``: the copy that runs beside it."""
        deadline = time.monotonic() + 60
        while after not in self.moved():  # spans are read, nobody tells of them
            assert time.monotonic() < deadline, f"{after} waited for {what}"
            time.sleep(1e-4)
        self.ended[what] = time.perf_counter()

    def moved(self) -> dict[str, float]:
        """When each copy was over."""
        return {f"{span.direction} {span.label}": span.stop for span in self.lane.spans()}

    def _hold(self, direction: str, label: str) -> None:
        beside = {"out": f"forward {int(label[-1]) + 1}", "in": f"backward {int(label[-1]) + 1}"}[direction]
        with self._changed:
            last = label == f"steps.{LAST}"  # nothing runs beside its copies: its backward comes at once
            assert last or self._changed.wait_for(lambda: beside in self.began, 60), f"{beside} waited for a copy"
        self.moving[f"{direction} {label}"] = time.perf_counter()


class Clocked(nn.Module):
    """Puts a step on the timeline."""

    def __init__(self, inner: nn.Module, line: Timeline, index: int) -> None:
        super().__init__()
        self.inner, self.line, self.index = inner, line, index

    def forward(self, x):
        line, i = self.line, self.index
        line.begin(f"forward {i}")
        if i > 0:
            x.register_hook(lambda grad: line.end(f"backward {i}", f"in steps.{i - 1}"))
        y = self.inner(x)
        if i > 0:
            line.end(f"forward {i}", f"out steps.{i - 1}")
        y.register_hook(lambda grad: line.begin(f"backward {i}"))
        return y


LAST = 3


@pytest.mark.promise("hidden", "activations")
def test_on_the_timeline_every_copy_moves_its_bytes_while_a_neighbour_computes():
    line = Timeline()
    model = Exps(LAST + 1)
    for index in range(LAST + 1):
        model.steps[index] = Clocked(model.steps[index], line, index)
    x = torch.randn(1000, requires_grad=True)
    policy = OffloadPolicy(min_bytes=1, margin=0, prefetch=1)
    with ActivationOffload(model, policy, offload_modules=["steps.?"], lane=line.lane) as offload:
        loss = model(x).sum()
        offload.graph_marks.forward_record()
        loss.backward()
    moved = line.moved()
    for i in range(LAST):
        for copy, beside in ((f"out steps.{i}", f"forward {i + 1}"), (f"in steps.{i}", f"backward {i + 1}")):
            assert line.began[beside] < line.moving[copy] < moved[copy] < line.ended[beside]
    want = torch.autograd.grad(Exps(LAST + 1)(x).sum(), x)[0]
    assert torch.equal(x.grad, want)
