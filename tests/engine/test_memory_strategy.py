"""Memory pressure is acted on between steps: what is freed is freed, and no bit of the training changes."""

from __future__ import annotations

import gc
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from weakref import ref

import pytest
import torch
from torch import nn

import rayzero
from rayzero import ZeroConfig
from rayzero.config import AutoMemoryStrategy
from rayzero.engine.context import RankContext
from rayzero.engine.engine import Engine
from rayzero.engine.engine_memory import MemoryStrategy, Relief
from rayzero.memory.pressure import Pressure, Resource
from rayzero.memory.process_memory import Stalls
from rayzero.telemetry.names import (
    MEMORY_ACTION_SECONDS,
    MEMORY_ACTIONS,
    MEMORY_FREED_BYTES,
    MEMORY_PRESSURE_RATIO,
    MEMORY_STALL_RATIO,
)
from rayzero.telemetry.recorder import MemoryRecorder

from .models import Net, fit, prepared_copy, same_bits, seeded, tight, token_loss, tokens

A = AutoMemoryStrategy
EVERYWHERE = Relief(residency=frozenset({Resource.HOST}), activations=frozenset({Resource.HOST}))


@pytest.fixture
def own_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gathers into buffers of its own, as on CUDA or over gRPC, and keeps them from step to step."""
    monkeypatch.setenv("RAYZERO_DEBUG", "0")
    monkeypatch.setattr(sys.modules["rayzero.engine.prepare"], "mapped_units", lambda store, units: {})


class Pressed:
    """A strategy under the pressure that the test says; each look at a clock is ten seconds after the one before."""

    def __init__(
        self, patch: pytest.MonkeyPatch, engine: Engine, strategy: AutoMemoryStrategy, share: Callable[[], float]
    ) -> None:
        self.share = share
        self.now = 0.0
        self.recorder = MemoryRecorder()
        for module in ("memory.pressure", "engine.engine_memory"):
            patch.setattr(f"rayzero.{module}.monotonic", self._clock)
        patch.setattr("rayzero.memory.pressure.read_pressure", lambda device, limits: self._read())
        config = engine.config.replace(auto_memory_management=strategy)
        engine.strategy = MemoryStrategy(config, engine.memory, engine.cache, self.recorder, gathers=True)
        engine.strategy._relief = EVERYWHERE if not engine.resident else Relief(activations=EVERYWHERE.activations)

    def _read(self) -> Pressure:
        return Pressure(shares={Resource.HOST: self.share(), Resource.SHM: 0.0}, stalls=Stalls(some=0.5, full=0.25))

    def _clock(self) -> float:
        self.now += 10.0
        return self.now


Press = Callable[[Engine, AutoMemoryStrategy, Callable[[], float]], Pressed]


@pytest.fixture
def press(monkeypatch: pytest.MonkeyPatch) -> Press:
    return partial(Pressed, monkeypatch)


def prepared(base: nn.Module, config: ZeroConfig | None = None) -> tuple[nn.Module, rayzero.ZeroOptimizer, Engine]:
    model, optimizer = prepared_copy(base, torch.optim.AdamW, config, lr=1e-3)
    return model, optimizer, optimizer.engine


CONFIGS = {
    "all up": ZeroConfig(),
    "tight": tight(Net()),
    "half offloaded": tight(Net(), offload_activations=("layers.*",), activation_fraction=0.4, activation_min_bytes=64),
}


@pytest.mark.parametrize("strategy", [A.BALANCED, A.EXTREME])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("memory", ["the owners'", "poisoned buffers", "buffers"])
def test_forced_at_random_steps_the_training_keeps_its_bits(
    strategy: AutoMemoryStrategy,
    config: str,
    memory: str,
    alone: RankContext,
    press: Press,
    request: pytest.FixtureRequest,
) -> None:
    request.getfixturevalue("monkeypatch").setenv("RAYZERO_DEBUG", "1" if memory.startswith("poisoned") else "0")
    if memory == "buffers":
        request.getfixturevalue("own_buffers")
    base, chance = seeded(Net), random.Random(7)
    model, optimizer, _ = prepared(base, CONFIGS[config])
    expected, weights = fit(model, optimizer, range(20)), rayzero.full_state_dict(model)
    model, optimizer, engine = prepared(base, CONFIGS[config])
    pressed = press(engine, strategy, chance.random)
    assert all(torch.equal(a, b) for a, b in zip(fit(model, optimizer, range(20)), expected, strict=True))
    assert same_bits(rayzero.full_state_dict(model), weights)
    found = rayzero.stats(model).strategy
    assert found.changes > 4
    assert found.freed["garbage"].count > 2
    assert ("units" in found.freed) is not engine.resident
    assert ("activations" in found.freed) is (config == "half offloaded")
    assert pressed.now > 0


def test_idle_units_leave_under_pressure_and_may_stay_again_afterwards(
    alone: RankContext, press: Press, own_buffers: None
) -> None:
    base = seeded(lambda: Net(num_layers=12))
    config = tight(base, spare=6, prefetch_buffer_size=2)
    model, optimizer, engine = prepared(base, config)
    level = 0.0
    press(engine, A.AGGRESSIVE, lambda: level)
    fit(model, optimizer, range(3))
    budget, free = engine.config.gpu_param_memory_budget, engine.residency.budget.peak
    level = 0.95
    fit(model, optimizer, range(1))
    before = rayzero.stats(model, reset=True).strategy
    assert before.residency_given_up == pytest.approx(0.9)
    assert before.freed["units"].bytes > 0
    fit(model, optimizer, range(3))
    found = rayzero.stats(model)
    assert engine.residency.target < budget
    assert engine.residency.budget.peak <= engine.residency.target < free
    assert engine.residency.allocated <= engine.residency.target
    assert found.strategy.evictions > 0
    assert found.strategy.depth_allowed < 2 == engine.cache.most_ahead
    level = 0.0
    fit(model, optimizer, range(1))
    assert engine.residency.target == budget
    rayzero.stats(model, reset=True)
    fit(model, optimizer, range(3))
    assert engine.residency.budget.peak == free
    assert rayzero.stats(model).strategy.residency_given_up == 0


def test_what_is_in_use_gets_memory_beyond_the_target(alone: RankContext, press: Press, own_buffers: None) -> None:
    """Most layers are held by views, far more than a tenth of the budget."""
    base = seeded(lambda: Net(num_layers=8))
    model, optimizer, engine = prepared(base, tight(base, spare=7, prefetch_buffer_size=1))
    press(engine, A.EXTREME, lambda: 1.0)
    fit(model, optimizer, range(2))
    views = [layer.up.weight[:1] for layer in model.layers[:5]]
    assert engine.residency.budget.used > engine.residency.target
    fit(model, optimizer, range(2))
    assert all(torch.equal(view, layer.up.weight[:1]) for view, layer in zip(views, model.layers[:5], strict=True))


def test_a_model_that_stays_up_as_a_whole_is_left_up(alone: RankContext, own_buffers: None) -> None:
    """Autograd has saved its very Parameters, so that no unit can leave before the backward."""
    model, optimizer, engine = prepared(seeded(Net))
    assert engine.resident
    assert engine.strategy._relief.residency == frozenset()
    assert Relief.of_rank(cuda=False, own_buffers=True).residency
    fit(model, optimizer, range(1))


def test_nothing_is_done_before_the_step(alone: RankContext, press: Press, own_buffers: None) -> None:
    base = seeded(Net)
    model, optimizer, engine = prepared(base, tight(base))
    pressed = press(engine, A.EXTREME, lambda: 1.0)
    token_loss(model, tokens(0)).backward()
    with torch.no_grad():
        model(tokens(0)[0])
    assert engine.strategy.gauge.taken == 2
    assert engine.memory.freed == {}
    assert pressed.recorder.gauge(MEMORY_PRESSURE_RATIO, resource="host") == 1.0
    optimizer.step()
    assert set(engine.memory.freed) == {"garbage", "buffers", "malloc", "prefetch", "units"}


def test_without_a_new_reading_a_step_does_nothing(alone: RankContext, press: Press, own_buffers: None) -> None:
    base = seeded(Net)
    model, optimizer, engine = prepared(base, tight(base))
    pressed = press(engine, A.EXTREME, lambda: 1.0)
    fit(model, optimizer, range(1))
    engine.strategy.gauge._due = math.inf
    before = dict(engine.memory.freed)
    pressed.now += 1000.0  # long enough to collect again, if there were a reading
    fit(model, optimizer, range(3))
    assert engine.memory.freed == before


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_a_loop_that_makes_cycles_gets_their_tensors_back(alone: RankContext, press: Press, no_collector: None) -> None:
    model, optimizer, engine = prepared(seeded(Net))
    press(engine, A.CONSERVATIVE, lambda: 0.8)

    class Cycle:
        def __init__(self) -> None:
            self.me, self.tensor = self, torch.ones(1 << 20)

    kept = ref(Cycle().tensor)
    assert kept() is not None
    fit(model, optimizer, range(1))
    assert kept() is None
    assert engine.memory.freed["garbage"].bytes >= 4 << 20


def test_all_activations_leave_under_pressure_and_their_fraction_afterwards(alone: RankContext, press: Press) -> None:
    model, optimizer, engine = prepared(seeded(Net), CONFIGS["half offloaded"])
    level, left = 0.0, []
    press(engine, A.BALANCED, lambda: level)
    assert engine.activations is not None

    def offloaded() -> int:
        return engine.activations.summary().offloaded_bytes

    for level in (0.0, 0.0, 0.9, 0.0, 0.0):  # noqa: B007, level is read by the gauge; it acts on the step after
        before = offloaded()
        fit(model, optimizer, range(1))
        left.append(offloaded() - before)
    assert left[1] == left[2] == left[4]
    assert left[3] > 2 * left[1]
    assert engine.memory.freed["activations"].count == 2


def test_each_change_is_one_line_and_every_action_is_counted(
    alone: RankContext, press: Press, own_buffers: None, caplog: pytest.LogCaptureFixture
) -> None:
    base = seeded(lambda: Net(num_layers=8))
    model, optimizer, engine = prepared(base, tight(base, spare=4))
    level = 0.3
    pressed = press(engine, A.BALANCED, lambda: level)
    caplog.set_level(logging.INFO, "rayzero.engine.engine_memory")
    for level in (0.3, 0.3, 0.63, 0.63, 0.9, 0.9, 0.9, 0.3, 0.3):  # noqa: B007, level is read by the gauge
        fit(model, optimizer, range(1))
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["WARNING", "WARNING", "INFO"]
    assert "host is 63 % full; strategy balanced: garbage is collected; freed: garbage" in lines[0][1]
    assert "host is 90 % full" in lines[1][1]
    assert "prefetch depth 12 of 16, gathered units keep 30% of their budget; freed:" in lines[1][1]
    assert "nothing is held back any more" in lines[2][1]
    recorder, found = alone.recorder, rayzero.stats(model).strategy
    for action, one in found.freed.items():
        assert recorder.total(MEMORY_ACTIONS, action=action) == one.count > 0
        assert recorder.total(MEMORY_FREED_BYTES, action=action) == (one.bytes or 0)
        assert recorder.total(MEMORY_ACTION_SECONDS, action=action) == pytest.approx(one.seconds)
    assert set(found.freed) == {"garbage", "buffers", "malloc", "prefetch", "units"}
    assert (found.changes, found.readings, found.pressure, found.pressure_peak) == (3, 9, 0.3, 0.9)
    assert (found.fullest, found.resources["host"].now, found.resources["host"].peak) == ("host", 0.3, 0.9)
    assert (found.stalled_some, found.stalled_full) == (0.5, 0.25)
    assert pressed.recorder.gauge(MEMORY_STALL_RATIO, kind="full") == 0.25
    engine.memory.freed.clear()
    assert recorder.total(MEMORY_ACTIONS) > 0, "counters never fall"
