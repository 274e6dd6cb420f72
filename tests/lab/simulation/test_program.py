"""The recorded program of a rank is what the real engine does."""

from __future__ import annotations

import pytest
import torch

import rayzero
from lab.simulation.program import Verb, record_steps
from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.prepare import plan_units
from rayzero.engine.units.schedule import PrefetchPace
from rayzero.errors import MemoryPlanError
from rayzero.memory.pool import buffer_bytes

from .runs import layout_of

LAYERS = 5
SHOWN = {"fetch": Verb.FETCH, "prefetch": Verb.FETCH, "unshard": Verb.WAIT, "push": Verb.PUSH}


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(LAYERS)))


@pytest.mark.parametrize("units_up", [2, 3, LAYERS])
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_the_program_is_that_of_the_engine(units_up: int, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefetchPace, "depth", lambda _, limit: limit)  # whatever was measured
    units = ZeroConfig(min_unit_bytes="1KiB", units=("Linear",))
    size = buffer_bytes(plan_units(model(), units).layout.units[0].size_bytes)
    config = units.replace(
        gpu_param_memory_budget=units_up * size,
        prefetch_buffer_size=max(1, ahead),
        async_prefetch=ahead > 0,
        auto_memory_management="off",
    )
    seen: list[tuple[Verb, str]] = []
    with running_in(RankContext()):
        net = model()
        net, optimizer = rayzero.prepare(net, torch.optim.Adam(net.parameters()), config)
        observers = optimizer.engine.cache.observers
        observers.append(lambda verb, unit: seen.append((SHOWN[verb], unit)) if verb in SHOWN else None)
        for _ in range(3):
            seen.clear()
            net(torch.ones(2, 64, requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        layout = optimizer.engine.layout
    ops = record_steps(layout, frozenset(), config)[-1]
    recorded = [(op.verb, layout.units[op.unit].name) for op in ops if op.verb in SHOWN.values()]
    assert recorded == seen


def test_a_model_that_fits_is_fetched_once_a_step() -> None:
    for ops in record_steps(layout_of([64] * 4), frozenset({0}), ZeroConfig())[1:]:
        assert sorted(op.unit for op in ops if op.verb is Verb.FETCH) == [0, 1, 2, 3]


def test_what_does_not_fit_is_fetched_again_in_each_pass() -> None:
    layout = layout_of([1 << 12] * 4)
    size = buffer_bytes(layout.units[0].size_bytes)
    config = ZeroConfig(gpu_param_memory_budget=3 * size, gradient_accumulation_steps=2, prefetch_buffer_size=1)
    ops = record_steps(layout, frozenset(), config)[-1]
    assert sum(op.verb is Verb.FETCH for op in ops) == 4 + 3, "one unit of four, in three of four passes"
    assert sum(op.verb is Verb.PUSH for op in ops) == 8
    summed = record_steps(layout, frozenset(), config.replace(offload_grads=False))[-1]
    assert sum(op.verb is Verb.PUSH for op in summed) == 4


def test_a_budget_without_room_is_refused_as_in_a_run() -> None:
    layout = layout_of([1 << 12] * 3)
    with pytest.raises(MemoryPlanError, match="gpu_param_memory_budget"):
        record_steps(layout, frozenset({0, 1}), ZeroConfig(gpu_param_memory_budget=1 << 12))
