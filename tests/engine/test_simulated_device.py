"""The engine on a simulated device: copies as late as CUDA may make them, every access ordered, the same bits."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.units.residency import mapped_units
from rayzero.engine.units.transfers import DeviceTransfers, UnitTransfers
from rayzero.errors import UnsupportedError
from rayzero.lanes import Direction, Event
from rayzero.layout.model_layout import UnitLayout
from rayzero.memory.pool import BufferPool, MemoryBudget, buffer_bytes
from rayzero.protocol.store import ParameterStore
from tests.mutated_lane import FOUND, MutatedLane, in_at_once, not_held, out_at_once, unchanged
from tests.support.simulated_lane import SimulatedEvent, SimulatedLane, device_behind

from .models import Net, fit, oracle, same_bits, seeded, tight, token_loss, tokens


def adamw(params) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


CONFIGS = {
    "all up": lambda model: ZeroConfig(),
    "one ahead": lambda model: tight(model, prefetch_buffer_size=1),
    "none ahead": lambda model: tight(model, async_prefetch=False),
    "tight": lambda model: tight(model, prefetch_buffer_size=1, spare=0),
}

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
        fit(model, optimizer, range(STEPS))
    return same_bits(rayzero.full_state_dict(model), expected)


@pytest.mark.promise("hidden", "optimizers")
@pytest.mark.parametrize("lands", [True, False], ids=["landing", "staging"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_of_copies_gives_the_bits_of_plain_torch(
    seed: int, config: str, lands: bool, alone: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(SimulatedLane(seed), config, monkeypatch, lands=lands)


@pytest.mark.parametrize("seed", range(6))
def test_at_every_operation_parameters_are_in_their_budget_and_gradients_of_two_units_on_their_way(
    seed: int, alone: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a link that is slower than the backward."""
    lane, most = SimulatedLane(seed), 0

    def check() -> None:
        nonlocal most
        most = max(most, lane.held("out"))
        assert optimizer.engine.residency.budget.used <= config.gpu_param_memory_budget

    join = lane._join
    monkeypatch.setattr(lane, "_join", lambda event: (time.sleep(0.02), join(event)))
    base = seeded(lambda: Net(num_layers=6))
    config = tight(base, prefetch_buffer_size=1)
    with device_behind(lane):
        model, optimizer = rayzero.prepare(base, adamw(base.parameters()), config)
    with lane.watching(each=check):
        fit(model, optimizer, range(STEPS))
    assert most <= 2 * max(buffer_bytes(unit.size_bytes) for unit in optimizer.engine.units)


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


@pytest.mark.parametrize("steps", [False, True], ids=["after a backward", "after a step"])
@pytest.mark.parametrize("seed", range(3))
def test_no_copy_is_in_flight_when_the_store_frees_its_memory(
    seed: int, steps: bool, alone: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies to the device read the owners' page-locked parameters, those from it write into the rank's gradients."""
    lane, left = SimulatedLane(seed), list[int]()
    join = lane._join

    base = seeded(lambda: Net(num_layers=3))
    with device_behind(lane):
        model, optimizer = rayzero.prepare(base, adamw(base.parameters()), CONFIGS["one ahead"](base))
    engine = optimizer.engine
    close = engine.store.close
    monkeypatch.setattr(engine.store, "close", lambda reason: (left.append(lane.waiting), close(reason)))
    monkeypatch.setattr(lane, "_join", lambda event: (time.sleep(0.05), join(event)))  # gradients are waited for late
    token_loss(model, tokens(0)).backward()
    if steps:
        optimizer.step()
        engine.cache.prefetch_all()
        engine.cache.wait_published()
    assert lane.waiting or seed, "the first seed makes all copies at the last moment"
    engine.close()
    assert left == [0]


class HostWaits(SimulatedLane):
    """Knows the copies that the thread itself has not waited for: on CUDA, what a stream waits for may still run."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.open: dict[str, list[Event]] = {"out": [], "in": []}

    def issue(self, direction: Direction, copy: Callable[[], object], **options: Any) -> Event:
        self.open[direction].append(event := super().issue(direction, copy, **options))
        return event

    def drain(self, direction: Direction) -> None:
        super().drain(direction)
        self.open[direction].clear()

    def _join(self, event: SimulatedEvent) -> None:
        super()._join(event)
        for events in self.open.values():
            events[:] = [each for each in events if each is not event]


@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_finished_once_the_thread_has_waited_for_all_copies(
    seed: int, alone: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that, owners overwrite the parameters that copies to the device read. No gradient on its way out comes
    after those of a forward without gradients."""
    lane, left = HostWaits(seed), list[tuple[int, int]]()
    base = seeded(lambda: Net(num_layers=3))
    with device_behind(lane):
        model, optimizer = rayzero.prepare(base, adamw(base.parameters()), CONFIGS["one ahead"](base))
    engine = optimizer.engine
    assert mapped_units(engine.store, [unit.layout for unit in engine.units]), "copies read the owners' memory"
    commit = engine.step_state.commit

    def committed(*of: Any) -> None:
        left.append((len(lane.open["out"]), len(lane.open["in"])))
        commit(*of)

    monkeypatch.setattr(engine.step_state, "commit", committed)
    for step in range(2):
        token_loss(model, tokens(step)).backward()
        with torch.no_grad():
            model(tokens(step)[0])
        assert lane.open["in"], "its parameters were copied"
        optimizer.step()
        optimizer.zero_grad()
    assert left == [(0, 0), (0, 0)]


@pytest.mark.parametrize("steps", [0, 1], ids=["before it", "then"])
def test_a_step_that_is_captured_into_a_cuda_graph_is_refused(steps: int, alone: RankContext) -> None:
    lane = SimulatedLane(0)
    base = seeded(lambda: Net(num_layers=3))
    with device_behind(lane):
        model, optimizer = rayzero.prepare(base, adamw(base.parameters()), tight(base, spare=4))
    fit(model, optimizer, range(steps))
    with lane.captured(), pytest.raises(UnsupportedError, match="used while a CUDA graph is captured"):
        model(tokens(steps))
