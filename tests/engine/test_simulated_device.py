"""The engine on a simulated device: copies as late as CUDA may make them, every access ordered, the same bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import rayzero
from rayzero.engine.context import RankContext
from rayzero.engine.units.transfers import DeviceTransfers, UnitTransfers
from rayzero.layout.model_layout import UnitLayout
from rayzero.memory.budget import MemoryBudget
from rayzero.memory.pool import BufferPool, buffer_bytes
from rayzero.protocol.store import ParameterStore
from rayzero.testing.simulated_lane import SimulatedLane
from tests.mutated_lane import FOUND, MutatedLane, in_at_once, not_held, out_at_once, unchanged

from .models import Net, oracle, same_bits, seeded, token_loss, tokens
from .test_transfers import CONFIGS, adamw

STEPS = 4


def train(lane: SimulatedLane, config: str, monkeypatch: pytest.MonkeyPatch, *, lands: bool = True) -> bool:
    """Train on the lane's device; returns whether the weights have the bits of plain torch."""

    def transfers(
        store: ParameterStore, device: torch.device, units: Sequence[UnitLayout], *, pinned: bool
    ) -> UnitTransfers:
        staging = BufferPool(budget=MemoryBudget(2 * max(buffer_bytes(unit.size_bytes) for unit in units)), poison=True)
        if not lands:
            monkeypatch.setattr(store, "landing", lambda contribution: None)
        return DeviceTransfers(store, staging, lane, {})

    monkeypatch.setattr(importlib.import_module("rayzero.engine.prepare"), "make_transfers", transfers)
    base = seeded(lambda: Net(num_layers=3))
    expected, _ = oracle(base, adamw, world_size=1, steps=STEPS)
    model, optimizer = rayzero.prepare(base, adamw(base.parameters()), CONFIGS[config](base))
    with lane.watching():
        for step in range(STEPS):
            token_loss(model, tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return same_bits(rayzero.full_state_dict(model), expected)


@pytest.mark.parametrize("lands", [True, False], ids=["landing", "staging"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_copies_gives_the_bits_of_plain_torch(
    seed: int, config: str, lands: bool, alone: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(SimulatedLane(seed), config, monkeypatch, lands=lands)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("change", "waits"), [(not_held, True), (in_at_once, True), (out_at_once, True), (unchanged, False)]
)
def test_a_missing_wait_or_hold_is_found_with_every_seed(
    change: Callable[[str, dict[str, Any]], dict[str, Any]],
    waits: bool,
    seed: int,
    alone: RankContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = MutatedLane(seed, change, waits)
    with pytest.raises(FOUND):
        train(lane, "one ahead", monkeypatch)
    lane.run_out()
