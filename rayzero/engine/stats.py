"""``rayzero.stats``: what a rank has measured of a prepared model, read where its engine has it.

Nothing is measured twice for it: phases, waits and passes by unit are in ``step_clock.py``, copies in
``units/unit_cache.py`` and ``rank_step.py``, readings and advice in ``memory/pressure.py`` and
``engine/engine_memory.py``.
"""

from __future__ import annotations

import operator
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, SupportsIndex, cast

import torch
from torch import nn

from rayzero.engine.engine import Engine
from rayzero.engine.prepare import engine_of
from rayzero.engine.units.param_unit import ParamUnit, UnitState
from rayzero.errors import ConfigError
from rayzero.lanes.lane import LinkSpeed, measure_link
from rayzero.memory.process_memory import peak_resident, resident_bytes
from rayzero.telemetry.names import (
    BUILD_INFO,
    MEMORY_BYTES,
    MEMORY_ORIGINAL_BYTES,
    PREFETCH_DROPPED,
    PREFETCH_LATE_SECONDS,
    PREFETCH_REQUESTS,
    TRANSFER_BYTES,
    TRANSFER_RAW_BYTES,
)
from rayzero.telemetry.recorder import Counts
from rayzero.telemetry.stats import (
    LayerStats,
    LinkStats,
    MemoryStats,
    PrefetchStats,
    ResourceStats,
    Stats,
    StrategyStats,
    TokenStats,
)

_RANKS = ("grad", "staging")  # kinds of MEMORY_BYTES that a rank holds beside parameters
_NO_OWNERS = ("param", "process", "other", "unused", *_RANKS)


def stats(model: nn.Module, *, reset: bool = False) -> Stats:
    """What this rank has measured of a prepared model since ``prepare()``, or since the last call with ``reset``.

    ::

        before = rayzero.stats(model, reset=True)      # what follows counts from zero
        train(model)
        print(rayzero.stats(model))                    # a table; .to_json() for programs

    Works in any loop, with or without an exporter, and waits for nobody. Ranks' values come together with
    ``mine.merged(*others)``. Call it from the thread that trains. Bytes on the way and prefetch results are the rank's:
    where a rank has prepared several models, they include the others'. Raises UnsupportedError for a model that was not
    prepared."""
    engine = engine_of(model)
    engine.cache.times.count()
    found = read_stats(engine)
    if reset:
        restart_stats(engine)
    return found


def count_tokens(model: nn.Module, tokens: SupportsIndex, samples: SupportsIndex = 0) -> None:
    """Count ``tokens`` (and ``samples``, sequences) that the open step trains on; call it before ``optimizer.step()``.

    Both are ints or tensors of one integer, as ``mask.sum()`` is. From these come the tokens per second of
    ``rayzero.stats`` and of the dashboards. Raises ConfigError for anything but whole numbers >= 0, UnsupportedError
    for a model that was not prepared."""
    clock, found = engine_of(model).clock, (as_count(tokens), as_count(samples))
    if None in found:
        raise ConfigError(f"count_tokens() takes whole numbers >= 0, got tokens={tokens!r} and samples={samples!r}")
    clock.count(*cast(tuple[int, int], found))


def as_count(value: object) -> int | None:
    """``value`` as an int; None if it is no whole number >= 0."""
    try:
        count = operator.index(cast(SupportsIndex, value))
    except TypeError:
        return None
    return count if count >= 0 else None


def read_stats(engine: Engine) -> Stats:
    """The values of one engine now."""
    seconds, phases = engine.clock.read()
    clock, passes, counts = engine.clock, engine.passes, engine.since.read()
    return Stats(
        seconds=seconds,
        version=engine.version,
        forwards=passes.forwards,
        backwards=passes.backwards,
        steps=clock.steps.value,
        phases=phases,
        waits={cause: tally.value for cause, tally in clock.waits.items()},
        layers={
            unit.name: LayerStats(forward=passes.forward[i].value, backward=passes.backward[i].value)
            for i, unit in enumerate(engine.units)
        },
        tokens=_tokens(engine),
        to_device=_link(engine, counts, "fetch"),
        to_host=_link(engine, counts, "push"),
        prefetch=_prefetch(engine, counts),
        update_seconds=clock.update_seconds,
        exposed_seconds=clock.exposed_seconds,
        memory=_memory(engine),
        strategy=_strategy(engine),
    )


def restart_stats(engine: Engine) -> None:
    """Measure from now on. The peaks of the process and of torch's allocator go on."""
    engine.clock.restart()
    engine.passes.restart()
    engine.since.restart()
    engine.cache.times.arrived.restart()
    engine.cache.evictions = 0
    engine.step_state.sent.restart()
    engine.residency.budget.restart_peak()
    engine.strategy.restart()
    engine.memory.freed.clear()


def measured_link(engine: Engine) -> LinkSpeed | None:
    """The speed of the link between host and device, measured by the first call; None for a CPU rank with owners on
    other hosts, whose link is the network."""
    transfers, built = engine.transfers, engine.since.recorder.gauges().get(BUILD_INFO, {})
    far = any("grpc" in dict(labels)["transport"] for labels in built)
    if transfers.link is None and (engine.device.type == "cuda" or not far):
        transfers.link = measure_link(engine.device)  # tens of milliseconds
    return transfers.link


def _tokens(engine: Engine) -> TokenStats:
    rate = engine.clock.rate
    return TokenStats(
        tokens=rate.tokens,
        tokens_per_second=rate.tokens / rate.seconds if rate.seconds else None,
        average=rate.average,
        peak=rate.peak,
    )


def _link(engine: Engine, counts: Counts, direction: str) -> LinkStats:
    link, fetch = engine.transfers.link, direction == "fetch"
    return LinkStats(
        copies=(engine.cache.times.arrived if fetch else engine.step_state.sent).value,
        sent_bytes=int(counts.total(TRANSFER_BYTES, direction=direction)),
        original_bytes=int(counts.total(TRANSFER_RAW_BYTES, direction=direction)),
        limit=None if link is None else link.to_device if fetch else link.to_host,
    )


def _prefetch(engine: Engine, counts: Counts) -> PrefetchStats:
    def requests(result: str) -> int:
        return int(counts.total(PREFETCH_REQUESTS, result=result))

    def dropped(result: str) -> int:
        return int(counts.total(PREFETCH_DROPPED, result=result))

    coming = [(unit, unit.fetching) for unit in engine.units if unit.state is UnitState.UNSHARDING]
    states = Counter(
        "ready" if fetching.done.done() else "in_flight" if fetching.published.done() else "queued"
        for _, fetching in coming
        if fetching is not None
    )
    return PrefetchStats(
        depth=engine.cache.depth,
        limit=engine.cache.most_ahead,
        queued=states["queued"],
        in_flight=states["in_flight"],
        ready=states["ready"],
        pending_bytes=sum(unit.size_bytes for unit, _ in coming),
        hits=requests("hit"),
        late=requests("late"),
        misses=requests("miss"),
        wasted=dropped("wasted"),
        cancelled=dropped("cancelled"),
        late_seconds=counts.total(PREFETCH_LATE_SECONDS),
    )


def _memory(engine: Engine) -> MemoryStats:
    up = [unit for unit in engine.units if unit.state is UnitState.UNSHARDED]
    aside = [engine.units[index] for index in engine.cache.writes.aside()]
    held = engine.since.recorder.gauges()
    by_kind = Counter[str]()
    for labels, size in held.get(MEMORY_BYTES, {}).items():
        by_kind[dict(labels)["kind"]] += int(size)
    on_gpu = engine.device.type == "cuda"
    return MemoryStats(
        parameters=_elements(engine.units),
        device_parameters=_elements(up),
        device_bytes=engine.residency.allocated,
        host_parameters=_elements(aside),
        host_bytes=sum(by_kind[kind] for kind in _RANKS) + sum(unit.size_bytes for unit in aside),
        owner_bytes=_owners(engine, by_kind),
        owner_original_bytes=int(sum(held.get(MEMORY_ORIGINAL_BYTES, {}).values())) or None,
        gathered_limit=engine.config.gpu_param_memory_budget,
        gathered_peak=engine.residency.budget.peak,
        device_used=torch.cuda.memory_allocated(engine.device) if on_gpu else None,
        device_peak=torch.cuda.max_memory_allocated(engine.device) if on_gpu else None,
        host_used=resident_bytes(),
        host_peak=peak_resident(),
    )


def _elements(units: Iterable[ParamUnit]) -> int:
    return sum(slot.numel for unit in units for slot in unit.layout.slots)


def _owners(engine: Engine, by_kind: Counter[str]) -> int | None:
    """Bytes of the owners' parameters and states where they are in this process; None where they are in others."""
    states = {kind: size for kind, size in by_kind.items() if kind not in _NO_OWNERS}
    return sum(states.values()) + by_kind["param"] - engine.residency.allocated if states else None


def _strategy(engine: Engine) -> StrategyStats:
    strategy, acting = engine.config.auto_memory_management, engine.strategy
    gauge, readings = acting.gauge, acting.gauge.readings.value
    now = gauge.pressure
    stalls = None if now is None else now.stalls
    return StrategyStats(
        strategy=strategy.value,
        threshold=strategy.pressure_threshold,
        pressure=None if now is None else now.share,
        fullest="" if now is None else now.fullest.value,
        resources={
            resource.value: ResourceStats(now=now.shares.get(resource), peak=tally.value.longest)
            for resource, tally in gauge.resources.items()
            if now is not None
        },
        stalled_some=None if stalls is None else stalls.some,
        stalled_full=None if stalls is None else stalls.full,
        readings=readings.count,
        pressure_peak=readings.longest,
        pressure_sum=readings.total,
        reading_seconds=gauge.seconds.value.total,
        changes=acting.changes,
        collecting=int(acting.now.collect),
        depth_allowed=engine.cache.allowed,
        residency_given_up=1 - acting.now.residency,
        offloading_all=int(acting.now.activations),
        evictions=engine.cache.evictions,
        freed=dict(engine.memory.freed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameterStats:
    """Sizes are elements; all zero for a model without parameters."""

    total_parameters: int = 0  # names
    total_elements: int = 0
    mean_parameter_size: float = 0.0
    median_parameter_size: float = 0.0  # the mean of the middle two if the count is even
    min_parameter_size: int = 0
    max_parameter_size: int = 0
    total_memory_bytes: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Of all parameters of ``model``; a tied one counts once."""
        found = list(model.parameters())
        sizes = [parameter.numel() for parameter in found]
        if not sizes:
            return cls()
        return cls(
            total_parameters=len(sizes),
            total_elements=sum(sizes),
            mean_parameter_size=sum(sizes) / len(sizes),
            median_parameter_size=float(statistics.median(sizes)),
            min_parameter_size=min(sizes),
            max_parameter_size=max(sizes),
            total_memory_bytes=sum(parameter.numel() * parameter.element_size() for parameter in found),
        )
