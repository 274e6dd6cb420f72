"""What ``rayzero.stats`` says of a prepared model: every value is fed, and those that must agree do."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from clock import Clock
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rayzero
from rayzero import Stats, ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.stats import ModelParameterStats, measured_link
from rayzero.engine.step_clock import PassTimes, StepClock
from rayzero.engine.units.param_unit import UnitState
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.store.inprocess import LocalConnection, LocalOwners
from rayzero.store.rank.rank_store import RankStore
from rayzero.telemetry.recorder import MemoryRecorder, NullRecorder
from rayzero.telemetry.spans import Spans
from rayzero.testing import run_ranks

from .models import Net, prepared_copy, seeded, tight, token_loss, tokens


def prepared(
    config: ZeroConfig | None = None, base: nn.Module | None = None
) -> tuple[nn.Module, rayzero.ZeroOptimizer]:
    return prepared_copy(base or seeded(Net), torch.optim.AdamW, config, lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int = 0) -> None:
    for step in range(steps):
        batch = tokens(step, rank)
        rayzero.count_tokens(model, batch[0].numel(), len(batch[0]))
        token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def leaves(found: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(found, dict):
        for name, value in found.items():
            yield from leaves(value, f"{at}.{name}".lstrip("."))
    else:
        yield at, found


NOT_HERE = {
    "memory.device_used": "CUDA",
    "memory.device_peak": "CUDA",
    "memory.host_parameters": "no unit was written",
    "memory.host_bytes": "gradients take memory until their update: tests/engine/test_scattered.py",
    "prefetch.queued": "a moment's",
    "prefetch.in_flight": "a moment's",
    "prefetch.ready": "a moment's",
    "prefetch.pending_bytes": "a moment's",
    "prefetch.hits": "as fast as the owners are",
    "prefetch.late": "as fast as the owners are",
    "prefetch.late_seconds": "as fast as the owners are",
    "prefetch.misses": "prefetched",
    "prefetch.wasted": "used",
    "prefetch.cancelled": "used",
    "phases.norm": "no norm was asked for",
    "phases.checkpoint": "none was saved",
    "phases.fetch_wait": "as fast as the owners are",
    "waits": "as fast as the owners are",
    "exposed_seconds": "as fast as the owners are",
    "strategy.stalled_some": "nobody waits for memory",
    "strategy.stalled_full": "nobody waits for memory",
    "strategy.resources.shm.now": "/dev/shm may be empty",
    "strategy.resources.shm.peak": "/dev/shm may be empty",
    "strategy.changes": "no pressure: tests/engine/test_memory_strategy.py",
    "strategy.collecting": "no pressure",
    "strategy.residency_given_up": "no pressure",
    "strategy.offloading_all": "no pressure",
    "strategy.freed.garbage.bytes": "other threads take memory meanwhile",
    "strategy.freed.malloc.bytes": "malloc may keep nothing",
}


def test_every_value_is_fed_by_training(alone: RankContext) -> None:
    model, optimizer = prepared(tight(Net()))
    engine = optimizer.engine
    before = dict(leaves(rayzero.stats(model, reset=True).to_json()))
    train(model, optimizer, 3)
    measured_link(engine)
    engine.memory.free(engine.cache, engine.activations)
    model(tokens(9)[0])
    found = dict(leaves(rayzero.stats(model).to_json()))
    assert set(before) <= set(found)
    still = {name for name, value in found.items() if not value}
    assert {re.sub(r"^waits\..*", "waits", name) for name in still} <= set(NOT_HERE)
    assert found["waits.push.count"] == 3


def test_phases_add_up_to_the_time_and_steps_to_theirs(alone: RankContext) -> None:
    model, optimizer = prepared(ZeroConfig(overlap="none"))
    train(model, optimizer, 3)
    model(tokens(9)[0])  # a step that is still open counts in the phases
    found = rayzero.stats(model)
    assert sum(found.phases.values()) == pytest.approx(found.seconds, rel=1e-9)
    assert found.steps.count == found.version == 3
    assert 0 < found.steps.total < found.seconds
    assert found.steps.shortest <= found.steps.mean <= found.steps.longest
    layers = found.layers.values()
    assert sum(layer.forward.total for layer in layers) <= found.phases["forward"]
    assert found.waits["optimizer"].total <= found.phases["optimizer"]
    assert 0 < found.exposed_seconds <= found.update_seconds


@pytest.mark.promise("observable", "precisions")
@pytest.mark.usefixtures("full_depth")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_are_what_the_layout_says(precision: Any, alone: RankContext) -> None:
    model, optimizer = prepared(ZeroConfig(precision=precision))
    units = optimizer.engine.layout.units
    train(model, optimizer, 3)
    optimizer.engine.cache.fence()  # nothing is on its way
    found = rayzero.stats(model)
    size = sum(unit.size_bytes for unit in units)
    for link in (found.to_device, found.to_host):
        assert link.copies.bytes == link.copies.timed_bytes == 3 * size
        assert link.copies.count == 3 * len(units)
        assert link.copies.peak >= link.copies.bandwidth > 0
        assert link.stored_ratio == 1.0
    assert found.to_host.sent_bytes == 3 * size
    assert found.to_device.sent_bytes >= 3 * size  # and what was prefetched for the fourth step
    memory = found.memory
    assert memory.parameters == sum(p.numel() for p in model.parameters())
    elements = sum(unit.numel for unit in units)  # each has two moments, and a master that is published or half so
    assert memory.owner_bytes == pytest.approx(12 * elements, rel=0.02)
    assert (memory.owner_original_bytes, memory.kept_ratio) == (memory.owner_bytes, 1.0)
    assert memory.gathered_peak == sum(-(-unit.size_bytes // 512) * 512 for unit in units)


def test_uses_of_units_are_hits_late_or_misses(alone: RankContext) -> None:
    model, optimizer = prepared(tight(Net()))
    train(model, optimizer, 3)
    found = rayzero.stats(model)
    prefetch = found.prefetch
    assert prefetch.hits + prefetch.late + prefetch.misses == found.to_device.copies.count > 3 * 4
    assert found.strategy.evictions > 0
    off, off_optimizer = prepared(tight(Net(), async_prefetch=False))
    train(off, off_optimizer, 1)
    none = rayzero.stats(off).prefetch
    assert (none.limit, none.hits, none.late, none.hit_ratio) == (0, 0, 0, 0.0)
    assert none.misses > 0


def test_a_cpu_rank_computes_in_the_owners_memory_and_fetches_nothing(
    alone: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYZERO_DEBUG", "0")
    model, optimizer = prepared()
    train(model, optimizer, 2)
    found = rayzero.stats(model)
    assert (found.to_device.copies.count, found.to_device.sent_bytes, found.memory.device_bytes) == (0, 0, 0)
    assert found.to_host.copies.bytes == found.to_host.sent_bytes > 0


class HeldStore(RankStore):
    """A store whose versions and fetches end when the test says so."""

    def __init__(self, owners: LocalOwners, recorder: MemoryRecorder) -> None:
        super().__init__(LocalConnection(0, owners, recorder=recorder))
        self.versions: list[tuple[Future[int], Future[int]]] | None = None
        self.bytes: list[tuple[Future[None], Future[None]]] | None = None

    def mapped(self, unit: int) -> Tensor | None:
        return None

    def published(self, unit: int, version: int) -> Future[int]:
        known = super().published(unit, version)
        return known if self.versions is None else self._hold(self.versions, known)

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        coming = super().fetch(unit, version, kind, out)
        return coming if self.bytes is None else self._hold(self.bytes, coming)

    def _hold(self, held: list[Any], known: Future[Any]) -> Future[Any]:
        held.append((known, Future()))
        return held[-1][1]

    def let(self, held: list[Any]) -> None:
        while held:
            known, waiting = held.pop()
            waiting.set_result(known.result())


@pytest.fixture
def held() -> Iterator[HeldStore]:
    owners, recorder = LocalOwners(1), MemoryRecorder()
    store = HeldStore(owners, recorder)
    with running_in(RankContext(connect=lambda _: store, recorder=recorder)):
        yield store
    owners.close()


@pytest.mark.usefixtures("full_depth")
def test_a_prefetch_is_queued_then_in_flight_then_ready_and_wasted_if_dropped(held: HeldStore) -> None:
    model, optimizer = prepared(ZeroConfig())
    train(model, optimizer, 1)
    held.versions, held.bytes = [], []
    rayzero.stats(model, reset=True)
    train(model, optimizer, 0)
    engine, count = optimizer.engine, len(optimizer.engine.units)
    engine.cache.fence()
    engine.cache._publications.clear()
    engine.cache.prefetch_first()

    def states() -> tuple[int, int, int]:
        found = rayzero.stats(model).prefetch
        return found.queued, found.in_flight, found.ready

    assert states() == (count, 0, 0)
    assert rayzero.stats(model).prefetch.pending_bytes == sum(unit.size_bytes for unit in engine.units)
    held.let(held.versions)
    assert states() == (0, count, 0)
    held.let(held.bytes)
    assert states() == (0, 0, count)
    before = rayzero.stats(model).prefetch.wasted
    engine.cache.release_idle()
    assert rayzero.stats(model).prefetch.wasted - before == count
    assert all(unit.state is UnitState.SHARDED for unit in engine.units)


@pytest.mark.usefixtures("full_depth")
def test_a_prefetch_dropped_on_its_way_is_cancelled(held: HeldStore) -> None:
    model, optimizer = prepared(ZeroConfig())
    train(model, optimizer, 1)
    engine = optimizer.engine
    engine.cache.fence()
    held.bytes = []
    rayzero.stats(model, reset=True)
    engine.cache.prefetch_first()
    engine.cache.release_idle()
    found = rayzero.stats(model).prefetch
    assert (found.cancelled, found.wasted) == (len(engine.units), 0)


def test_layers_count_passes_and_not_recomputation(alone: RankContext) -> None:
    base = seeded(lambda: Net(wrap=lambda layer, x: checkpoint(layer, x, use_reentrant=False)))
    base.layers[1].requires_grad_(False)
    model, optimizer = prepared(tight(base), base)
    train(model, optimizer, 2)
    with torch.no_grad():
        model(tokens(0)[0])
    found = rayzero.stats(model)
    assert (found.forwards, found.backwards, found.steps.count) == (3, 2, 2)
    counts = {name: (layer.forward.count, layer.backward.count) for name, layer in found.layers.items()}
    assert counts == {"root": (3, 2), "layers.0": (3, 2), "layers.1:frozen": (3, 0), "layers.2": (3, 2)}


class Checkpointed(nn.Module):
    """Has no parameter outside of its checkpoints: autograd meets the first inside a backward of a checkpoint's own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("budget", ["all up", "tight"])
def test_backwards_of_checkpoints_are_a_part_of_the_loops(budget: str, reentrant: bool, alone: RankContext) -> None:
    base = seeded(lambda: Checkpointed(reentrant))
    config = (
        ZeroConfig(gradient_accumulation_steps=2) if budget == "all up" else tight(base, gradient_accumulation_steps=2)
    )
    model, optimizer = prepared(config, base)
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = rayzero.stats(model)
    assert (found.forwards, found.backwards, found.steps.count) == (4, 4, 2)
    assert {layer.backward.count for layer in found.layers.values()} == {4}


def test_a_whole_model_that_is_recomputed_has_one_forward(alone: RankContext) -> None:
    model, _ = prepared(tight(Net()))
    inputs, targets = tokens(0)
    output = checkpoint(model, inputs, use_reentrant=False)
    torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten()).backward()
    found = rayzero.stats(model)
    assert (found.forwards, found.backwards) == (1, 1)
    assert {layer.forward.count for layer in found.layers.values()} == {1}


def test_a_layers_time_leaves_out_waits_and_the_layers_inside(
    alone: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = prepared()
    root, inner = optimizer.engine.units[:2]
    monkeypatch.setattr("rayzero.engine.step_clock.perf_counter", now := Clock())
    waits = StepClock(MemoryRecorder())
    times = PassTimes(optimizer.engine.layout.units, waits, Spans())
    times.opened(forward=True)
    now.now += 1
    times.opened(forward=True)
    now.now += 5
    waits.waited("fetch", 2.0)
    times.closed([inner.index], True)
    now.now += 10
    times.closed([root.index], True)
    assert times.forward[root.index].value.total == 11
    assert times.forward[inner.index].value.total == 3
    times.end_forward()
    now.now += 100  # the loss
    times.begin_backward()
    now.now += 7
    waits.waited("push", 3.0)
    times.completed(inner.index)
    now.now += 4
    times.completed(root.index)
    times.end_backward()
    assert times.backward[inner.index].value.total == 4
    assert times.backward[root.index].value.total == 4
    assert (times.forwards, times.backwards) == (1, 1)


def test_tokens_per_second_with_peak_and_moving_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented vector, 1000 tokens in 1 s and again, then a faster step."""
    monkeypatch.setattr("rayzero.engine.step_clock.perf_counter", now := Clock())
    clock = StepClock(MemoryRecorder())

    def step(tokens: int, seconds: float) -> None:
        clock.count(tokens, 0)
        now.now += seconds
        clock.step_over(1)

    step(1000, 1.0)
    rate = clock.rate
    assert (rate.tokens, rate.seconds, rate.average, rate.peak) == (1000, 1.0, 1000, 1000)
    step(1000, 1.0)
    assert (rate.tokens / rate.seconds, rate.average, rate.peak) == (1000, 1000, 1000)
    step(4000, 2.0)
    assert (rate.average, rate.peak) == (1100, 2000)
    step(0, 5.0)  # an evaluation's, say: no tokens, no rate
    assert (rate.tokens, rate.seconds, rate.average) == (6000, 4.0, 1100)


def test_compute_and_waits_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented vector: 0.8 s of compute, 0.2 s of communication."""
    monkeypatch.setattr("rayzero.engine.step_clock.perf_counter", now := Clock())
    clock = StepClock(MemoryRecorder())
    clock.enter("forward")
    now.now += 1.0
    clock.waited("fetch", 0.2)
    seconds, phases = clock.read()
    assert (phases["forward"] / seconds, phases["fetch_wait"] / seconds) == (pytest.approx(0.8), pytest.approx(0.2))


def test_a_reset_counts_from_zero_in_the_middle_of_a_step_too(alone: RankContext) -> None:
    model, optimizer = prepared(tight(Net()))
    train(model, optimizer, 2)
    rayzero.count_tokens(model, 7)
    loss = token_loss(model, tokens(0))
    whole = rayzero.stats(model, reset=True)
    now = rayzero.stats(model)
    assert whole.forwards == 3
    assert (now.forwards, now.steps.count, now.tokens.tokens, now.to_host.copies.count) == (0, 0, 0, 0)
    assert now.seconds < whole.seconds
    assert sum(now.phases.values()) == pytest.approx(now.seconds, rel=1e-6)
    assert (now.prefetch.hits, now.strategy.evictions, now.strategy.readings) == (0, 0, 0)
    assert now.version == 2
    loss.backward()
    optimizer.step()
    after = rayzero.stats(model)
    assert (after.backwards, after.steps.count, after.version) == (1, 1, 3)
    assert after.to_host.copies.count == len(optimizer.engine.units)


def _rank(context: RankContext, base: nn.Module) -> dict[str, Any]:
    model, optimizer = prepared_copy(base, torch.optim.AdamW)
    train(model, optimizer, 2, context.rank)
    optimizer.clip_grad_norm_(1.0)
    return rayzero.stats(model).to_json()


def test_ranks_of_a_run_have_stats_without_an_exporter_and_merge() -> None:
    base = seeded(Net)
    ranks = [Stats.from_json(found) for found in run_ranks(lambda context: _rank(context, base), 2, 2)]
    merged = ranks[0].merged(ranks[1])
    assert (merged.ranks, merged.version, merged.forwards, merged.steps.count) == (2, 2, 4, 4)
    assert merged.to_host.copies.bytes == 2 * ranks[0].to_host.copies.bytes
    assert merged.memory.parameters == ranks[0].memory.parameters
    assert merged.memory.owner_bytes is None, "the owners are elsewhere"
    assert merged.waits["norm"].count == 2
    assert sum(merged.phases.values()) == pytest.approx(merged.seconds, rel=1e-9)
    assert merged.steps.longest == max(rank.steps.longest for rank in ranks)


@pytest.mark.promise("observable", "hosts")
def test_over_a_network_bytes_are_measured_and_the_links_limit_is_not() -> None:
    base = seeded(Net)

    def rank(context: RankContext) -> tuple[Stats, Any]:
        model, optimizer = prepared(base=base)
        train(model, optimizer, 2)
        optimizer.clip_grad_norm_(1.0)
        return rayzero.stats(model), measured_link(optimizer.engine)

    ((found, link),) = run_ranks(rank, 1, 1, "grpc", config=ZeroConfig(transport="grpc"))
    assert found.to_host.copies.bytes == found.to_host.original_bytes == found.to_host.sent_bytes > 0
    assert found.to_host.stored_ratio == found.to_device.stored_ratio == 1.0
    assert link is found.to_host.limit_share is None


def test_a_model_that_was_not_prepared_and_wrong_counts_are_refused(alone: RankContext) -> None:
    with pytest.raises(UnsupportedError, match="was not prepared"):
        rayzero.stats(Net())
    model, optimizer = prepared()
    wrong: list[tuple[Any, Any]] = [
        (-1, 0),
        (1, -2),
        (2.5, 0),
        (math.nan, 0),
        ("many", 0),
        (None, 0),
        (torch.ones(2), 0),
    ]
    for tokens_, samples in wrong:
        with pytest.raises(ConfigError, match=r"count_tokens\(\) takes whole numbers >= 0, got ") as found:
            rayzero.count_tokens(model, tokens_, samples)
        assert "\n" not in str(found.value)
    rayzero.count_tokens(model, torch.tensor([True, True]).sum())  # as a mask's sum is
    model(tokens(0)[0]).sum().backward()
    optimizer.step()
    assert repr(rayzero.stats(model).tokens.tokens) == "2"


def test_a_rank_that_records_nothing_still_knows_its_own_clock() -> None:
    with running_in(RankContext(recorder=NullRecorder())):
        model, optimizer = prepared()
        train(model, optimizer, 1)
        found = rayzero.stats(model)
    assert (found.forwards, found.steps.count) == (1, 1)
    assert found.prefetch.hits + found.prefetch.late == 0


# ---- statistics of a model's parameters


def model_of(*shapes: tuple[int, ...]) -> nn.Module:
    return nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)


def test_documented_vectors_of_modules() -> None:
    assert ModelParameterStats.of(nn.Linear(10, 5, bias=True)).total_elements == 55
    found = ModelParameterStats.of(model_of((512, 1024), (1024,)))
    assert (found.total_parameters, found.total_elements) == (2, 525_312)


def test_a_scalar_counts_one_element_and_an_empty_model_is_all_zero() -> None:
    assert ModelParameterStats.of(nn.ReLU()) == ModelParameterStats()
    found = ModelParameterStats.of(model_of((), (0, 4)))
    assert (found.total_elements, found.total_memory_bytes, found.median_parameter_size) == (1, 4, 0.5)


def test_a_module_is_counted_with_tied_parameters_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2).to(torch.bfloat16))
    model[1].weight = model[0].weight
    found = ModelParameterStats.of(model)
    assert (found.total_parameters, found.total_memory_bytes) == (3, 9 * 4 + 8 * 2)
