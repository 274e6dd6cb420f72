"""What one rank does in a step, in order: recorded from the engine's own UnitCache, run without bytes.

The cache decides what is fetched ahead, what waits, and what is resharded for room, by the real budget and schedule.
Its fetches end at once here, so what it decides by time is left out: an adaptive prefetch depth stays at its limit, and
no prefetch is dropped in flight.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor

from rayzero.concurrency.futures import settled
from rayzero.config import ZeroConfig
from rayzero.engine.rank_step import RankStep
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.engine.units.residency import Residency, UnitBuffer
from rayzero.engine.units.schedule import Phase, PrefetchPace
from rayzero.engine.units.transfers import UnitTransfers
from rayzero.engine.units.unit_cache import UnitCache
from rayzero.layout.model_layout import ModelLayout
from rayzero.memory.pool import BufferPool, buffer_bytes
from rayzero.protocol.store import ParameterStore
from rayzero.telemetry.recorder import NullRecorder

__all__ = ["Op", "Verb", "record_steps"]


class Verb(Enum):
    """What a rank does."""

    FETCH = auto()  # request a unit
    WAIT = auto()  # until the unit is there
    FORWARD = auto()  # compute
    BACKWARD = auto()
    PUSH = auto()  # the unit's gradients
    STEP = auto()  # wait for pushes, finish, commit
    END = auto()  # the step has returned


@dataclass(frozen=True, slots=True)
class Op:
    """One of them; ``unit``: an index, -1 for none."""

    verb: Verb
    unit: int = -1


class _Bytes(Residency):
    """Leases bytes of the budget, and no memory."""

    def acquire(self, unit: int, *, beyond: bool = False) -> UnitBuffer | None:
        """See ``Residency``."""
        if self.target < self._limit and not self._fits(unit, beyond):
            return None
        lease = self.budget.reserve(buffer_bytes(self._layouts[unit].size_bytes))
        return None if lease is None else UnitBuffer(flat=_NOTHING, slices=(), lease=lease)


class _Unit(ParamUnit):
    """A unit without Parameters."""

    def _swap(self, buffer: UnitBuffer) -> None:
        """There are no bytes."""

    def pinned_slots(self) -> list[int]:
        """See ``ParamUnit``: nobody holds views."""
        return []


class _FullDepth(PrefetchPace):
    """Nothing takes time here: prefetches go as far as the setting says."""

    def depth(self, limit: int) -> int:
        """See ``PrefetchPace``."""
        return limit


class _Store:
    """Has every version at once. Only what a cache asks for."""

    in_process = False

    def published(self, unit: int, version: int) -> Future[int]:
        """See ``ParameterStore``: the content is new in each version."""
        return settled(version)

    def fetch(self, unit: int, version: int, kind: str, out: Tensor) -> Future[None]:
        """See ``ParameterStore``."""
        return settled(None)


_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")
_VERBS = {"fetch": Verb.FETCH, "prefetch": Verb.FETCH, "unshard": Verb.WAIT, "refresh": Verb.WAIT}


def record_steps(
    layout: ModelLayout,
    root: Collection[int],
    config: ZeroConfig,
    steps: int = 3,
    *,
    unread: Collection[int] = (),
) -> tuple[tuple[Op, ...], ...]:
    """What a rank does in each of its first steps: it uses the units in forward order and then in reverse, once a
    micro-batch. ``root``: units of the root module. ``unread``: units whose parameters no backward reads, as an
    embedding's. The last step is what all later ones do. Raises MemoryPlanError if the budget has no room."""
    with_order: list[Op] = []
    names = {unit.name: unit.index for unit in layout.units}

    def note(verb: str, unit: str) -> None:
        if verb in _VERBS:
            with_order.append(Op(_VERBS[verb], names[unit]))

    transfers = UnitTransfers(cast(ParameterStore, _Store()), BufferPool())
    units = [_Unit(unit, [], []) for unit in layout.units]
    recorder: Any = NullRecorder()
    step = RankStep(transfers, recorder, rank=0, world_size=1, num_units=len(units))
    cache = UnitCache(
        units,
        root,
        {unit.index for unit in layout.units if unit.trainable},
        step=step,
        residency=_Bytes(layout.units, budget=config.gpu_param_memory_budget, device=torch.device("cpu"), poison=False),
        config=config,
        recorder=recorder,
    )
    cache.observers.append(note)
    cache.times.pace = _FullDepth()
    found = []
    try:
        for _ in range(steps):
            _play(cache, step, units, root, unread, with_order, config)
            found.append(tuple(with_order))
            with_order.clear()
    finally:
        transfers.close()
    return tuple(found)


def _play(
    cache: UnitCache,
    step: RankStep,
    units: list[_Unit],
    root: Collection[int],
    unread: Collection[int],
    ops: list[Op],
    config: ZeroConfig,
) -> None:
    """One step, as the engine's hooks drive a cache (engine.py, autograd/)."""
    passes = config.gradient_accumulation_steps
    others = [unit for unit in units if unit.index not in root]
    always = [unit for unit in units if unit.index in root]
    for number in range(passes):
        more = number < passes - 1
        cache.begin_pass(more, cache.most_ahead)
        for unit in always:
            _open(cache, unit, Phase.FORWARD)
        for unit in others:
            _open(cache, unit, Phase.FORWARD)
            ops.append(Op(Verb.FORWARD, unit.index))
            unit.open_calls -= 1
            cache.prefetch()
        ops += [Op(Verb.FORWARD, unit.index) for unit in always]
        for unit in always:
            unit.open_calls -= 1
        cache.prefetch()
        ops += [Op(Verb.BACKWARD, unit.index) for unit in always]
        for unit in reversed(others):
            if unit.index not in unread:
                cache.use(unit, Phase.BACKWARD)
            ops.append(Op(Verb.BACKWARD, unit.index))
            _push(ops, unit, config, last=not more)
            cache.prefetch()
        for unit in always:
            _push(ops, unit, config, last=not more)
        cache.backward_over(more)
    ops.append(Op(Verb.STEP))
    cache.fence()
    step.step += 1  # it is committed
    cache.advance()
    if config.offload_params:
        cache.prefetch_first()
    else:
        cache.prefetch_all()
    ops.append(Op(Verb.END))


def _open(cache: UnitCache, unit: _Unit, phase: Phase) -> None:
    unit.open_calls += 1
    cache.use(unit, phase)


def _push(ops: list[Op], unit: _Unit, config: ZeroConfig, *, last: bool) -> None:
    if unit.layout.trainable and (config.offload_grads or last):
        ops.append(Op(Verb.PUSH, unit.index))
