"""A rank's memory: what metrics show of it (what the engine holds, the heap's peak, torch's allocator on CUDA), giving
back what nothing uses, and doing so between steps when memory is full.

[Note: when] Pressure is measured at the end of a forward, when the activations are there. Nothing is done before the
step: only then does no graph need a unit, and is no gradient on its way. Values never change, because units are fetched
again and activations leave without loss.

[Note: hysteresis] Decisions follow a pressure that is *held*: it rises with each reading at once and falls only when
readings are more than ``MARGIN`` below it, and then stays that far above them. So what begins above x ends below x -
``MARGIN``, and readings that swing within the margin change nothing after their first peak.

[Note: relief] An action can only help where it frees something. Garbage and pools free host and device memory. What a
rank gathers lies on its device, or on a CPU rank in host memory, unless it reads the owners' own pages. Activations
leave a CUDA device for the host. Nothing that a rank does empties the slabs in shared memory: a full ``shm`` is
measured and alerted, no more. The config's ``max_*_memory_mb`` collect garbage and shorten the prefetch. They are no
bounds of the machine, so nothing dearer follows from them.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic, perf_counter

import torch

from rayzero.activations.offload import ActivationOffload
from rayzero.config import AutoMemoryStrategy, ZeroConfig
from rayzero.engine.units.residency import Residency
from rayzero.engine.units.transfers import UnitTransfers
from rayzero.engine.units.unit_cache import UnitCache
from rayzero.memory.mapping import locked_bytes
from rayzero.memory.pressure import Pressure, PressureGauge, PressureLimits, Resource
from rayzero.memory.process_memory import give_back_freed, heap_use, resident_bytes
from rayzero.quantities import format_bytes
from rayzero.telemetry.names import (
    GPU_ALLOC_RETRIES,
    GPU_MEMORY_BYTES,
    GPU_OOMS,
    HEAP_BYTES,
    MEMORY_ACTION_SECONDS,
    MEMORY_ACTIONS,
    MEMORY_BYTES,
    MEMORY_FREED_BYTES,
    MEMORY_PRESSURE_RATIO,
    MEMORY_STALL_RATIO,
    PINNED_BYTES,
)
from rayzero.telemetry.recorder import Reading, Recorder
from rayzero.telemetry.stats import Freed

log = logging.getLogger(__name__)

MARGIN = 0.05
_LEAST_RISE = 0.02  # of pressure, before an action that was just done is tried again
_REPEAT_S = 60.0  # after which it is tried again in any case, twice as late each time that it did not help
_LATEST_S = 3840.0

_HOST = frozenset({Resource.HOST, Resource.CGROUP})
_LIMITS = frozenset({Resource.MAX_CPU, Resource.MAX_GPU})


def fullest(shares: Mapping[Resource, float], of: frozenset[Resource]) -> float:
    """The largest share of these resources; 0.0 if there is none of them."""
    return max((share for resource, share in shares.items() if resource in of), default=0.0)


def held_pressure(held: float, reading: float) -> float:
    """The pressure to decide by after a reading; ``held``: that before it. [Note: hysteresis]"""
    return min(max(held, reading), reading + MARGIN)


def held_pressures(held: Mapping[Resource, float], readings: Mapping[Resource, float]) -> dict[Resource, float]:
    """``held_pressure`` of each resource that was read."""
    return {resource: held_pressure(held.get(resource, 0.0), share) for resource, share in readings.items()}


def scaled_depth(depth: int, pressure: float, strategy: AutoMemoryStrategy) -> int:
    """The prefetch depth to use: ``depth`` up to the strategy's threshold of pressure, and then less in proportion.

    At full pressure, the depth falls by the strategy's ``aggressiveness``, a share of it. The result is rounded up, so
    only ``extreme`` ever reaches 0. One factor for all pressures above the threshold would shorten it by half at once,
    where a unit or two less may do."""
    above = min(1.0, pressure) - strategy.pressure_threshold
    if above <= 0:
        return depth
    given_up = strategy.aggressiveness * above / (1 - strategy.pressure_threshold)
    return math.ceil(round(depth * (1 - given_up), 9))  # 8.000000001 is 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """The resources that each action can empty on this rank. [Note: relief]"""

    collect: frozenset[Resource] = _HOST | _LIMITS | {Resource.DEVICE}
    prefetch: frozenset[Resource] = _HOST | _LIMITS | {Resource.DEVICE}
    residency: frozenset[Resource] = frozenset()
    activations: frozenset[Resource] = frozenset()

    @classmethod
    def of_rank(cls, *, cuda: bool, own_buffers: bool) -> Relief:
        """``own_buffers``: some units are gathered into memory of the rank, and may be resharded at any time."""
        device = frozenset({Resource.DEVICE})
        return cls(
            residency=(device if cuda else _HOST) if own_buffers else frozenset(),
            activations=device if cuda else frozenset(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What a strategy asks for at some pressure."""

    collect: bool = False  # collect garbage; give freed memory back to the kernel and the device
    depth: int = 0  # units to prefetch ahead, at most
    residency: float = 1.0  # share of gpu_param_memory_budget that gathered units may keep
    activations: bool = False  # offload all that an attached activation offload may, not only its fraction


@dataclass(frozen=True, slots=True)
class _Row:
    """One strategy's thresholds of pressure."""

    collect: float
    some: float  # above it, ``some_up`` of the residency is given up
    some_up: float
    most: float  # above it, ``most_up`` of it, and activations leave
    most_up: float


_NEVER = 2.0  # no pressure is higher than 1
_ROWS = {
    AutoMemoryStrategy.OFF: _Row(_NEVER, _NEVER, 0.0, _NEVER, 0.0),
    AutoMemoryStrategy.CONSERVATIVE: _Row(0.75, 0.85, 0.3, _NEVER, 0.3),
    AutoMemoryStrategy.BALANCED: _Row(0.6, 0.65, 0.4, 0.8, 0.7),
    AutoMemoryStrategy.AGGRESSIVE: _Row(0.5, 0.5, 0.6, 0.7, 0.9),
    AutoMemoryStrategy.EXTREME: _Row(0.3, 0.3, 0.8, 0.5, 0.95),
}


def measures(strategy: AutoMemoryStrategy, held: Mapping[Resource, float], depth: int, relief: Relief) -> Measures:
    """What ``strategy`` asks for. Each action follows the fullest resource that it can empty.

    held: by resource, see ``held_pressure``. depth: the prefetch depth without pressure. A higher pressure never asks
    for less."""

    row, gathered = _ROWS[strategy], fullest(held, relief.residency)
    given_up = row.most_up if gathered > row.most else row.some_up if gathered > row.some else 0.0
    return Measures(
        collect=fullest(held, relief.collect) > row.collect,
        depth=scaled_depth(depth, fullest(held, relief.prefetch), strategy),
        residency=1.0 - given_up,
        activations=fullest(held, relief.activations) > row.most,
    )


class Retry:
    """When an action that was done may be done again: once a fifth of the room that was left is used up, or after a
    minute; after two, four and up to 64 minutes if it did not help. So a pressure that stays or swings costs little,
    and one that climbs is met ever more often.

    The room is that at the lowest reading since the action, because the action itself lowers them."""

    def __init__(self) -> None:
        self._again = -math.inf  # seconds
        self._wait = _REPEAT_S
        self._lowest = 0.0  # reading since the action

    def due(self, now: float, pressure: float) -> bool:
        """Whether to act at this reading of ``pressure``; ``now`` in seconds."""
        self._lowest = min(self._lowest, pressure)
        return now >= self._again or pressure >= self._lowest + max(_LEAST_RISE, (1 - self._lowest) / 5)

    def done(self, now: float, *, helped: bool) -> None:
        """The action was done. ``helped``: it freed something worth its time."""
        wait = _REPEAT_S if helped else self._wait
        self._again, self._lowest = now + wait, math.inf
        self._wait = _REPEAT_S if helped else min(2 * wait, _LATEST_S)


ACTIONS = ("garbage", "units", "buffers", "malloc", "device", "prefetch", "activations")
"""What can be done about memory: see ``EngineMemory.free`` for the first five; the prefetch gets shorter, and more
activations leave the device."""

_WORTH = 0.01  # of a process's resident bytes: freeing less is not worth a collection, which takes 0.2 to 0.8 s
HEAP_STEPS = 3  # in which the heap is sampled: later ones are like them, and it takes up to a millisecond
_ALLOCATOR = {
    "allocated": "allocated_bytes.all.current",
    "reserved": "reserved_bytes.all.current",
    "peak_active": "active_bytes.all.peak",
}


class EngineMemory:
    """One rank's memory, read from any thread, freed from the one that trains.

    Knows who holds memory; not what for."""

    def __init__(self, residency: Residency, transfers: UnitTransfers, recorder: Recorder) -> None:
        self.device = residency.device
        self._residency, self._transfers, self._recorder = residency, transfers, recorder
        self._heap_peak = 0  # bytes; 0: not sampled yet
        self.freed: dict[str, Freed] = {}  # by action, since the start or the last reset of stats
        for action in ACTIONS:
            self._record(action, Freed(bytes=0))

    def sample_heap(self) -> None:
        """Memory is high: read malloc's statistics."""
        self._heap_peak = max(self._heap_peak, _heap_used() or 0)

    def readings(self) -> Iterator[Reading]:
        """Bytes of gathered parameters and of gradients in flight, and what the device's allocator reports."""
        on_gpu = self.device.type == "cuda"
        held = {("param", "gpu" if on_gpu else "ram"): self._residency.allocated, **self._transfers.allocated()}
        for (kind, tier), size in held.items():
            yield Reading(MEMORY_BYTES, size, {"kind": kind, "tier": tier})
        if self._heap_peak:
            yield Reading(HEAP_BYTES, self._heap_peak, {"kind": "peak"})
        if on_gpu:
            yield Reading(PINNED_BYTES, locked_bytes(), {})
            yield from _allocator(self.device)

    def free(self, cache: UnitCache | None, activations: ActivationOffload | None) -> dict[str, Freed]:
        """Free what nothing uses; returns what each action gave back and took, in this order:

        - ``garbage``: Python's cycles are collected. Bytes that malloc has out less; None without glibc.
        - ``units``: idle units are resharded (None for ``cache``: not). Room in ``gpu_param_memory_budget``; a CPU rank
          on the owners' host computes in their memory, so that nothing but room is freed.
        - ``buffers``: pools drop buffers that are not in use. Bytes of these.
        - ``malloc``: freed memory goes back to the kernel. Bytes that are resident less.
        - ``device``: on CUDA, torch's allocator gives back what it keeps. Bytes that it has reserved less."""
        done = {"garbage": _freeing(gc.collect, _heap_used)}
        if cache is not None:
            done["units"] = _freeing(cache.release_idle, lambda: self._residency.budget.used)
        done |= self._give_back(activations)
        self._count(done)
        return done

    def shrink(self, cache: UnitCache, share: float) -> Freed:
        """Let gathered units keep at most ``share`` of their budget from now on; idle ones beyond it are resharded, and
        their buffers dropped. Bytes of units and buffers."""
        before, start = self._residency.budget.used + self._residency.allocated, perf_counter()
        cache.shrink(share)
        after = self._residency.budget.used + self._residency.allocated
        done = Freed(count=1, bytes=max(0, before - after), seconds=perf_counter() - start)
        self._count({"units": done})
        return done

    def count(self, action: str) -> None:
        """An action was done that frees nothing by itself."""
        self._count({action: Freed(count=1)})

    def _give_back(self, activations: ActivationOffload | None) -> dict[str, Freed]:
        residency, transfers = self._residency, self._transfers
        before = perf_counter()
        dropped = residency.trim() + transfers.trim() + (activations.trim() if activations is not None else 0)
        done = {"buffers": Freed(count=1, bytes=dropped, seconds=perf_counter() - before)}
        done["malloc"] = _freeing(give_back_freed, resident_bytes)
        if self.device.type == "cuda":
            done["device"] = _freeing(torch.cuda.empty_cache, lambda: torch.cuda.memory_reserved(self.device))
        return done

    def _count(self, done: dict[str, Freed]) -> None:
        for action, freed in done.items():
            self.freed[action] = self.freed.get(action, Freed()).merged(freed)
            self._record(action, freed)

    def _record(self, action: str, freed: Freed) -> None:
        self._recorder.add(MEMORY_ACTIONS, freed.count, action=action)
        self._recorder.add(MEMORY_FREED_BYTES, freed.bytes or 0, action=action)
        self._recorder.add(MEMORY_ACTION_SECONDS, freed.seconds, action=action)


def _freeing(act: Callable[[], object], held: Callable[[], int | None]) -> Freed:
    """Act; the bytes are what ``held`` has become less by, 0 if other threads took more meanwhile."""
    before, start = held(), perf_counter()
    act()
    seconds, after = perf_counter() - start, held()
    size = None if before is None or after is None else max(0, before - after)
    return Freed(count=1, bytes=size, seconds=seconds)


def _heap_used() -> int | None:
    use = heap_use()
    return None if use is None else use.used


def _allocator(device: torch.device) -> Iterator[Reading]:
    """Torch's allocator on a CUDA device, now."""
    stats = torch.cuda.memory_stats(device)
    for kind, name in _ALLOCATOR.items():
        yield Reading(GPU_MEMORY_BYTES, stats.get(name, 0), {"kind": kind})
    yield Reading(GPU_MEMORY_BYTES, torch.cuda.get_device_properties(device).total_memory, {"kind": "total"})
    yield Reading(GPU_ALLOC_RETRIES, stats.get("num_alloc_retries", 0), {})
    yield Reading(GPU_OOMS, stats.get("num_ooms", 0), {})


# ---- under pressure ----------------------------------------------------------------------------------------------


class MemoryStrategy:
    """One rank's reaction to memory pressure, on the training thread.

    Knows pressures, and which measures are in force; not how to free anything (``EngineMemory``), nor what is worth
    keeping (``UnitCache``)."""

    def __init__(
        self,
        config: ZeroConfig,
        memory: EngineMemory,
        cache: UnitCache,
        recorder: Recorder,
        *,
        gathers: bool,
    ) -> None:
        """``gathers``: some units are gathered into memory of the rank, and may be resharded at any time."""
        limits = PressureLimits(
            max_cpu_memory_mb=config.max_cpu_memory_mb,
            max_gpu_memory_mb=config.max_gpu_memory_mb,
            slab_dir=config.shared_directory,
        )
        self.gauge = PressureGauge(memory.device, limits)
        self.changes = 0  # of the measures in force, since the start or the last reset of stats
        self._strategy = config.auto_memory_management
        self._relief = Relief.of_rank(cuda=memory.device.type == "cuda", own_buffers=gathers)
        self._memory = memory
        self._cache = cache
        self._recorder = recorder
        self._held: dict[Resource, float] = {}  # pressures; see ``held_pressure``
        self._retry = Retry()
        self._seen = 0  # readings that were acted on
        self.now = Measures(depth=cache.most_ahead)

    def look(self) -> Pressure:
        """Measure, unless the last reading is less than a second old."""
        before = self.gauge.taken
        pressure = self.gauge.read()
        if self.gauge.taken != before:
            self._take(pressure)
        return pressure

    def measure(self) -> Pressure:
        """Measure in any case."""
        pressure = self.gauge.measure()
        self._take(pressure)
        return pressure

    def _take(self, pressure: Pressure) -> None:
        self._held = held_pressures(self._held, pressure.shares)
        for resource, share in pressure.shares.items():
            self._recorder.set(MEMORY_PRESSURE_RATIO, share, resource=resource.value)
        if pressure.stalls is not None:
            self._recorder.set(MEMORY_STALL_RATIO, pressure.stalls.some, kind="some")
            self._recorder.set(MEMORY_STALL_RATIO, pressure.stalls.full, kind="full")

    def act(self, activations: ActivationOffload | None) -> None:
        """A step is committed: do what the readings since the last one ask for. Without a reading it costs a
        comparison."""
        if self._seen == self.gauge.taken or self.gauge.pressure is None:
            return
        self._seen = self.gauge.taken
        wanted, before = self._measures(), self.now
        if activations is None:
            wanted = replace(wanted, activations=False)
        due = self._retry.due(monotonic(), fullest(self.gauge.pressure.shares, self._relief.collect))
        done: dict[str, Freed] = {}
        if wanted.collect and due:
            done |= self._memory.free(None, activations)
            gained = sum(one.bytes or 0 for one in done.values())
            self._retry.done(monotonic(), helped=gained >= _WORTH * resident_bytes())
        if wanted.depth < before.depth:
            self._memory.count("prefetch")
        if wanted.residency != before.residency:
            self._cache.adapt(wanted.depth)  # the window that shrink() keeps follows the depth
            freed = self._memory.shrink(self._cache, wanted.residency)
            done |= {"units": freed} if wanted.residency < before.residency else {}
        if activations is not None and wanted.activations != before.activations:
            activations.offload_all(wanted.activations)
            self._memory.count("activations")
        self.now = wanted
        if self._state(wanted) != self._state(before):
            self.changes += 1
            self._tell(self.gauge.pressure, wanted, before, done)

    @property
    def depth(self) -> int:
        """The prefetch depth that the held pressure leaves."""
        return self._measures().depth

    def _measures(self) -> Measures:
        return measures(self._strategy, self._held, self._cache.most_ahead, self._relief)

    def restart(self) -> None:
        """Forget readings and counts; measures stay in force."""
        self.gauge.restart()
        self.changes = self._seen = 0

    def _state(self, wanted: Measures) -> tuple[bool, float, bool, bool]:
        """What a change of is worth a line: larger under more pressure. A depth follows pressure in small steps."""
        shortened = wanted.depth < self._cache.most_ahead
        return (wanted.activations, 1 - wanted.residency, shortened, wanted.collect)

    def _tell(self, pressure: Pressure, wanted: Measures, before: Measures, done: Mapping[str, Freed]) -> None:
        freed = ", ".join(
            f"{action} {'-' if one.bytes is None else format_bytes(one.bytes)} in {one.seconds * 1e3:.0f} ms"
            for action, one in done.items()
        )
        log.log(
            logging.WARNING if self._state(wanted) > self._state(before) else logging.INFO,
            "memory pressure: %s is %.0f %% full; strategy %s: %s%s",
            pressure.fullest.value,
            100 * pressure.share,
            self._strategy.value,
            _described(wanted, self._cache.most_ahead),
            f"; freed: {freed}" if freed else "",
        )


def _described(wanted: Measures, depth: int) -> str:
    """The measures in force, for people."""
    parts = [
        "garbage is collected" if wanted.collect else "",
        f"prefetch depth {wanted.depth} of {depth}" if wanted.depth < depth else "",
        f"gathered units keep {wanted.residency:.0%} of their budget" if wanted.residency < 1 else "",
        "all activations of offload_activations leave" if wanted.activations else "",
    ]
    return ", ".join(part for part in parts if part) or "nothing is held back any more"
