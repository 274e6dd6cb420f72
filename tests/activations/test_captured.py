"""Offloaded activations of forwards and backwards that are captured into CUDA graphs: nothing that CUDA refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from rayzero.activations import ActivationOffload, OffloadPolicy
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.lanes.cuda_lane import StreamEvent
from tests.activations.models import equal, transformer
from tests.support.simulated_lane import SimulatedLane

POLICIES: dict[str, dict[str, Any]] = {
    "wait for each": {"max_in_flight": 0},
    "one in flight": {"max_in_flight": 1, "prefetch": 2},
    "all in flight": {"max_in_flight": 50},
    "a part": {"max_in_flight": 1, "fraction": 0.5},
    "none": {"max_in_flight": 1, "fraction": 0.0},
    "rounded": {"max_in_flight": 1, "compress": "bf16"},
    "by cost": {"max_in_flight": 1, "device_budget_bytes": 1 << 14},
    "a small host": {"max_in_flight": 1, "host_cap_bytes": 60_000},
}
Order = str  # of the passes: "f" a forward, "b" the oldest backward, "|" ends a graph, "(...)" captures nothing


class Trained:
    """A model whose passes are captured, beside a plain one."""

    def __init__(self, seed: int, **policy: Any) -> None:
        self.lane = SimulatedLane(seed)
        self.model, self.plain = (transformer(dim=16, num_layers=2, dropout=0.0) for _ in range(2))
        settings = OffloadPolicy(min_bytes=512, margin=0, poison=True, **policy)
        patterns = {"attn": "layers.*.attn", "mlp": "layers.*.mlp"}
        self.offload = ActivationOffload(self.model, settings, offload_modules=patterns, lane=self.lane)
        self.losses: list[Tensor] = []
        self.batches: list[Tensor] = []

    def forward(self) -> None:
        self.batches.append(torch.randn(2, 7, 16))
        marks = self.offload.graph_marks
        x = marks.backward_record(self.batches[-1].clone().requires_grad_())
        self.losses.append(self.model(x).square().mean())
        marks.forward_record()

    def warm_up(self, forwards: int) -> None:
        """A step without graphs, and the host's buffers for what is captured then."""
        self.run("(fb)")
        self.model.zero_grad()
        self.batches.clear()
        self.offload.prepare_capture(forwards)

    def run(self, order: Order) -> None:
        """Graphs are separated by "|"; what stands in parentheses is not captured."""
        for graph in order.split("|"):
            with nullcontext() if graph.startswith("(") else self.lane.captured():
                for each in graph.strip("()"):
                    self.forward() if each == "f" else self.losses.pop(0).backward()

    def check(self) -> None:
        for batch in self.batches:
            self.plain(batch).square().mean().backward()
        ours, theirs = ([p.grad for p in net.parameters()] for net in (self.model, self.plain))
        assert equal(ours, theirs)
        self.batches.clear()


@contextmanager
def training(seed: int, **policy: Any) -> Iterator[Trained]:
    trained = Trained(seed, **policy)
    with trained.offload, trained.lane.watching():
        yield trained


@pytest.mark.spread(2, second=28)
@pytest.mark.parametrize("order", ["fb", "f|b", "f|f|b|b", "fb|fb", "f|fb|b", "(fb)|f|b", "(fb)|f|b|(fb)"])
@pytest.mark.parametrize("policy", POLICIES)
def test_captured_passes_give_equal_gradients(policy: str, order: Order) -> None:
    with training(crc32(f"{policy}, {order}".encode()), **POLICIES[policy]) as trained:  # each its own schedule
        trained.warm_up(2 * order.count("f"))
        for _ in range(2):
            trained.run(order)
            if policy != "rounded":
                trained.check()
        assert (trained.offload.summary().offloaded_bytes > 0) is (policy != "none")
        trained.offload.release_graph_buffers()
        assert trained.offload.summary().host["in_use_bytes"] == 0
        assert trained.offload.summary().device_bytes == 0


@pytest.mark.parametrize(
    ("bound", "order", "said"),
    [
        (0, "(f)|b", "offloaded outside a capture: capture their forward too"),
        (None, "f|b", "needs max_in_flight to be a number"),
        (1, "f|b", r"call prepare_capture\(\)"),
    ],
)
def test_what_a_capture_needs_is_said(bound: int | None, order: Order, said: str) -> None:
    with training(0, max_in_flight=bound) as trained, pytest.raises(UnsupportedError, match=said):
        trained.run(order)


def test_a_captured_backward_brings_nothing_ahead_from_outside() -> None:
    """The backward that follows is of an eager forward, and may be eager too."""
    with training(1, max_in_flight=0, prefetch=20) as trained:
        trained.warm_up(2)
        trained.run("f|(f)|b|(b)")
        trained.check()


def test_a_backward_of_captured_passes_may_be_eager() -> None:
    with training(1, max_in_flight=1) as trained:
        trained.warm_up(1)
        trained.run("f|(b)")
        trained.check()


@pytest.mark.parametrize("forwards", [0, -1, True, 1.5])
def test_the_number_of_captured_forwards_is_checked(forwards: Any) -> None:
    with training(0) as trained, pytest.raises(ConfigError, match="forwards is"):
        trained.offload.prepare_capture(forwards)


def waits(self: StreamEvent, *memory: Tensor) -> None:
    self.wait()


def test_memory_of_an_eager_step_may_be_freed_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph was dropped, and is noticed in the capture: which cannot wait for its copies, but may hold for them."""

    def run() -> None:
        with training(0, max_in_flight=50) as trained:
            trained.warm_up(2)
            trained.model(torch.randn(2, 7, 16)).sum()
            trained.run("f|b")
            trained.check()

    run()
    monkeypatch.setattr(StreamEvent, "before_free", waits)
    with pytest.raises((UnsupportedError, UserWarning), match="outside that graph"):  # torch may silence it in a hook
        run()


def test_what_is_captured_is_not_timed() -> None:
    with training(0, **POLICIES["by cost"]) as trained:
        trained.warm_up(3)
        trained.offload._book._read_timings()
        trained.run("f|b|fb")
        assert trained.offload._book is not None
        assert not trained.offload._book._unread
        trained.run("(fb)")
        assert trained.offload._book._unread
