"""Decides what to do about memory pressure: a pure function of pressure and strategy, with hysteresis.

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

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rayzero.config import AutoMemoryStrategy
from rayzero.memory.pressure import Pressure, Resource

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


@dataclass(slots=True)
class HeldPressures:
    """Held pressures by resource, from reading to reading."""

    shares: dict[Resource, float] = field(default_factory=dict)

    def read(self, pressure: Pressure) -> None:
        """Take a reading."""
        self.shares = {
            resource: held_pressure(self.shares.get(resource, 0.0), share)
            for resource, share in pressure.shares.items()
        }


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
