"""Parameters that a model uses on several streams: there on each before it reads them, and left alone until it has."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import rayzero
from rayzero.engine.context import RankContext
from tests.support import simulated_autograd
from tests.support.simulated_lane import SimulatedLane, device_behind

from .models import WIDTH, Block, Net, oracle, same_bits, seeded, tight, token_loss, tokens
from .test_simulated_device import adamw

STEPS = 3
CONFIGS = {
    "one ahead": {"prefetch_buffer_size": 1, "spare": 0},
    "two ahead": {"prefetch_buffer_size": 2, "spare": 1},
    "none ahead": {"async_prefetch": False, "spare": 1},
}


class OnStream(Block):
    """A block that changes to a stream inside its forward, and leaves it to others to wait for that."""

    stream = "compute"
    lane: SimulatedLane | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.lane is None:
            return super().forward(x)
        caller = str(self.lane.stream())
        with self.lane.on(self.stream):
            self.lane.wait_stream(caller)
            return super().forward(x)


class Towers(Net):
    """Two towers of blocks that take turns, each on a stream of its own. They begin with the same block, unless blocks
    change streams themselves. What the streams share is ordered and held, as a model on CUDA has to do without any
    engine."""

    streams: tuple[str, str] = ("compute", "compute")
    lane: SimulatedLane | None = None  # None: on one stream
    inside = False  # whether blocks change streams themselves

    def __init__(self, num_layers: int = 7) -> None:
        super().__init__(num_layers)
        self.layers = torch.nn.ModuleList(OnStream(WIDTH) for _ in range(num_layers))

    def place(self, lane: SimulatedLane, streams: tuple[str, str]) -> None:
        self.lane, self.streams = lane, streams
        for at, layer in enumerate(self.layers if self.inside else ()):
            layer.lane, layer.stream = lane, streams[at % 2]

    def forward(self, tokens: Tensor) -> Tensor:
        towers = [self.embed(tokens)] * 2
        for stream in self.streams if self.lane else ():
            with self.lane.on(stream):
                self.lane.wait_stream("compute")
                self.lane.used(towers[0])
        for at, layer in enumerate(self.layers if self.inside else [self.layers[0], *self.layers]):
            with nullcontext() if self.lane is None or self.inside else self.lane.on(self.streams[at % 2]):
                towers[at % 2] = layer(towers[at % 2])
        for stream, tower in zip(self.streams, towers, strict=True) if self.lane else ():
            self.lane.wait_stream(stream)
            self.lane.used(tower)
        return self.head(self.norm(towers[0] + towers[1]))


def train(seed: int, config: str, streams: tuple[str, str], *, inside: bool, trims: bool = False) -> bool:
    """Train on the device; returns whether the weights have the bits of plain torch. ``trims``: on another stream, free
    the memory that is not in use."""
    lane = SimulatedLane(seed)
    base = seeded(Towers)
    base.inside = inside
    expected, _ = oracle(base, adamw, world_size=1, steps=STEPS)
    base.place(lane, streams)
    with device_behind(lane):
        model, optimizer = rayzero.prepare(base, adamw(base.parameters()), tight(base, **CONFIGS[config]))
    engine = optimizer.engine

    def trim(*_: object) -> None:
        with lane.on("far side"):
            engine.cache.release_idle()
            engine.residency.trim()

    if trims:
        base.layers[3].register_forward_hook(trim)
    with lane.watching():
        for step in range(STEPS):
            simulated_autograd.backward(lane, token_loss(model, tokens(step)))
            optimizer.step()
            optimizer.zero_grad()
    return same_bits(rayzero.full_state_dict(model), expected)


@pytest.mark.parametrize("inside", [False, True], ids=["blocks", "inside blocks"])
@pytest.mark.parametrize("poisoned", ["0", "1"])
@pytest.mark.parametrize("streams", [("compute", "compute"), ("side", "compute"), ("side", "far side")], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(2))
def test_units_come_and_go_in_order_on_every_stream(
    seed: int,
    config: str,
    streams: tuple[str, str],
    poisoned: str,
    inside: bool,
    alone: RankContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAYZERO_DEBUG", poisoned)
    assert train(seed, config, streams, inside=inside)


@pytest.mark.parametrize("seed", range(2))
def test_memory_that_is_freed_is_held_for_every_stream(
    seed: int, alone: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYZERO_DEBUG", "0")
    assert train(seed, "one ahead", ("side", "compute"), inside=False, trims=True)
