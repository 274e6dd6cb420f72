"""Decides which units are up: prefetches them ahead of use and keeps them while the budget has room.

[Note: eviction] A unit stays up after its use until another one needs its bytes. Then the unit whose next use is
farthest away goes first (Belady's rule, with the recorded schedule as the prediction), so what forward used last is
still there when backward begins. A prefetch never evicts the root's units, the unit in use, or a unit prefetched for a
nearer use. A model that fits the budget stays up from its first use to the step.

[Note: versions] The step makes trained units' parameters out of date. Their memory is kept until others need it, and
the next version is fetched into it only if the owners changed the content (not after a skipped step, nor for a unit
without gradients). Frozen units stay up over the step, which does not change them.

[Note: pinned units] A unit that views or graphs hold cannot be resharded at the step. The next version is fetched into
its memory at once, because the views must read it. If that fetch fails, the unit is *behind*: its bytes are of no
version, and nothing computes with them, writes them back or keeps them until a fetch succeeds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Protocol

import torch
from torch import Tensor

from rayzero.codecs.record import codec_of
from rayzero.config import ZeroConfig
from rayzero.engine.step_clock import StepClock
from rayzero.engine.units.param_unit import ParamUnit, UnitState
from rayzero.engine.units.residency import Fetching, Residency
from rayzero.engine.units.schedule import Phase, PrefetchPace, UnitSchedule, UseTimes
from rayzero.engine.units.transfers import UnitTransfers
from rayzero.engine.units.written_units import WrittenUnits
from rayzero.errors import MemoryPlanError, UnsupportedError
from rayzero.layout.model_layout import layer_groups
from rayzero.memory.pool import buffer_bytes
from rayzero.protocol.messages import COMPUTE, Write, digest_of, same_bits
from rayzero.telemetry.names import (
    MAX_GROUPS,
    PINNED_UNITS,
    PREFETCH_DEPTH,
    PREFETCH_DROPPED,
    PREFETCH_INFLIGHT_BYTES,
    PREFETCH_WINDOW_BYTES,
    PREFETCH_WINDOW_LIMIT_BYTES,
    VERSION_LAG,
)
from rayzero.telemetry.recorder import Reading, Recorder
from rayzero.telemetry.spans import nothing

log = logging.getLogger(__name__)

Observer = Callable[[str, str], None]  # verb, unit name: what happens, in order


class OpenStep(Protocol):
    """The rank's open step, as far as its units need it."""

    step: int  # its number, which is the published version that units are read at
    clock: StepClock
    transfers: UnitTransfers

    def raise_if_failed(self) -> None:
        """Raise the error of the step before if it has failed by now."""
        ...


class UnitCache:
    """One rank's gathered units, at one published version.

    Knows units' states, the schedule and the budget; not modules, gradients or what a step is made of. Methods run on
    the computing thread unless they say otherwise."""

    def __init__(
        self,
        units: Sequence[ParamUnit],
        root: Collection[int],
        trained: Collection[int],
        *,
        step: OpenStep,
        residency: Residency,
        config: ZeroConfig,
        recorder: Recorder,
    ) -> None:
        """``root``: units of the root module. ``trained``: units that an optimizer trains, now and later on; steps
        change no others."""
        self._first = step.step
        self.schedule = UnitSchedule(len(units), always=root)
        self.writes = WrittenUnits()
        self._units = units
        self._root = frozenset(root)
        self._trained = trained
        self._step = step
        self._transfers = step.transfers
        self._store = self._transfers.store
        self._residency = residency
        self._recorder = recorder
        self._clock = step.clock
        self._budget = config.gpu_param_memory_budget
        self._groups = layer_groups([unit.layout for unit in units], MAX_GROUPS)
        self.observers: list[Observer] = []
        prefetches = config.async_prefetch and config.overlap_computation
        self.most_ahead = config.prefetch_buffer_size if prefetches else 0  # units; a depth's bound
        self.times = UseTimes(self._transfers.lane, self._clock, recorder, self._groups)
        self._publications: dict[int, Future[int]] = {}  # of the present version; frozen units': of any
        self._behind: set[int] = set()  # units that are up, not yet at this version. [Note: pinned units]
        self._dropped: list[Fetching] = []  # dropped fetches that still write. freed by: _reap
        self._up = 0  # units that are not SHARDED
        self._current: int | None = None  # the last unit used
        self._wraps = False  # whether another forward follows before the step
        self.evictions = 0  # units resharded because others needed their room
        self.depth = 0
        self.allowed = self.most_ahead  # depth that memory pressure leaves
        self._set_depth(self.most_ahead)

    @property
    def version(self) -> int:
        """The published version that units are read at; it equals the number of committed steps."""
        return self._step.step

    def note(self, verb: str, unit: str = "") -> None:
        """Something happens: tell the observers."""
        for observer in self.observers:
            observer(verb, unit)

    # ---- up

    def use(self, unit: ParamUnit, phase: Phase) -> None:
        """Something is about to compute with the unit: bring it up and prefetch what comes next. Raises
        UnsupportedError while a CUDA graph is captured."""
        if self._transfers.lane.capturing():
            raise UnsupportedError(
                f"{unit.name} is used while a CUDA graph is captured, but its parameters move from step to step, and "
                "the graph would read their old place: train it without graphs, or capture only what is not prepared"
            )
        if unit.index == self._current and unit.state is UnitState.UNSHARDED and not self._behind:
            self.used(unit)
            return
        if unit.index != self._current and unit.index not in self._root:
            self._current = unit.index
            self.schedule.used(phase, unit.index)
            self.times.used(phase)
            if self._up < len(self._units):
                if unit.state is UnitState.SHARDED:
                    self._fetch(unit, ahead=False)  # before any prefetch
                self.prefetch()
        if unit.state is not UnitState.UNSHARDED:
            self._bring_up(unit)
        elif unit.index in self._behind:
            self._refresh(unit)
        self.used(unit)

    def used(self, unit: ParamUnit) -> None:
        """The caller's stream computes with the unit, which is up."""
        if unit.buffer is not None:
            self._transfers.use(unit.buffer)

    def _bring_up(self, unit: ParamUnit) -> None:
        if unit.state is UnitState.SHARDED:
            self._fetch(unit, ahead=False)
        fetching = unit.fetching
        assert fetching is not None
        there, began = fetching.done.done(), self.times.now()
        try:
            waited = unit.wait_unsharded()
        except BaseException:
            self._drop(unit)
            raise
        self.writes.put_back(unit)
        self.note("unshard", unit.name)
        self.times.waited(unit.layout, fetching, there, waited, began)

    def _fetch(self, unit: ParamUnit, *, ahead: bool) -> bool:
        """Request a unit; a prefetch (``ahead``) only if there is room. Returns whether it was requested."""
        self._step.raise_if_failed()
        buffer = unit.take_kept()
        held = None if buffer is None else unit.version
        if buffer is None:
            buffer = self._residency.acquire(unit.index)
        while buffer is None:
            if self._make_room(unit, ahead):
                buffer = self._residency.acquire(unit.index)
            elif ahead:
                return False
            elif (buffer := self._residency.acquire(unit.index, beyond=True)) is None:
                raise MemoryPlanError(self._no_room(unit))
        arrived = self._recorder.spans.begin("fetch", unit.name, self.version)
        published = self._published(unit.index)
        fetching = self._transfers.fetch(unit.layout, self.version, buffer, published=published, held=held, ahead=ahead)
        if arrived is not nothing:
            fetching.follow(arrived)
        unit.unshard(fetching)
        self._up += 1
        self.note("prefetch" if ahead else "fetch", unit.name)
        return True

    def _published(self, unit: int) -> Future[int]:
        """The unit's ``published`` future, requested once per version."""
        known = self._publications.get(unit)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            known = self._publications[unit] = self._store.published(unit, self.version)
            if unit in self._trained:
                known.add_done_callback(lambda _: self._clock.published())
        return known

    def prefetch(self) -> None:
        """Prefetch the next units, as far as the depth and the budget allow."""
        if self._up < len(self._units):
            self._prefetch(self.schedule.upcoming(self.depth, wrap=self._wraps))

    def prefetch_first(self) -> None:
        """Prefetch the units that the next forward begins with."""
        if self.most_ahead:
            self._prefetch(self.schedule.first(self.depth))

    def prefetch_all(self) -> None:
        """Prefetch every unit, whatever the depth."""
        self._prefetch(range(len(self._units)))

    def _prefetch(self, units: Sequence[int]) -> None:
        if self._transfers.lane.capturing():
            return  # ``use`` refuses it
        for index in units:
            unit = self._units[index]
            if unit.state is UnitState.SHARDED and not self._fetch(unit, ahead=True):
                return

    def _set_depth(self, depth: int) -> None:
        self._recorder.set(PREFETCH_DEPTH, depth)
        self.depth = depth

    def train(self, unit: int) -> None:
        """An optimizer trains the unit from now on."""
        self._publications.pop(unit, None)

    # ---- down

    def _make_room(self, wanted: ParamUnit, ahead: bool) -> bool:
        """Evict another unit, the least needed first; False if none may go. [Note: eviction]"""
        if self._dropped and self._reap(wait=False):
            return True
        distances = self._distances()
        for unit in sorted(self._units, key=lambda unit: distances[unit.index], reverse=True):
            if ahead and distances[unit.index] <= distances[wanted.index]:
                return False
            up = unit.state is UnitState.UNSHARDED
            if unit is not wanted and self._release(unit, ahead):
                self.evictions += up
                return True
        return self._reap(wait=True) if self._dropped else False

    def _distances(self) -> list[int]:
        """Per unit, how far away its next use is. Out-of-date memory counts as farthest, then units that the step makes
        out of date before their next use."""
        count = len(self._units)
        soon = {unit: i for i, unit in enumerate(self.schedule.upcoming(count, wrap=self._wraps))}
        later = {unit: i for i, unit in enumerate(self.schedule.upcoming(count, wrap=True))}

        def distance(unit: ParamUnit) -> int:
            index = unit.index
            if index in self._root:
                return -2
            if index == self._current:
                return -1
            if unit.kept is None and index in soon:
                return soon[index]
            lost = 3 if unit.kept is not None else 2 if index in self._trained else 1
            return lost * count + later.get(index, count)

        return [distance(unit) for unit in self._units]

    def _release(self, unit: ParamUnit, ahead: bool) -> bool:
        """Take a unit's memory if possible; returns whether some is free now."""
        kept = unit.take_kept()
        if kept is not None:
            self._residency.release(kept)
            return True
        if unit.state is UnitState.UNSHARDING:
            free = self._drop(unit)
            return free or self._reap(wait=not ahead)
        if unit.state is UnitState.SHARDED or not unit.can_reshard():
            return False
        self._reshard(unit, keep=False)
        return True

    def _reshard(self, unit: ParamUnit, *, keep: bool) -> None:
        if unit.index in self._behind:  # the bytes are neither the user's nor any version's
            self._behind.remove(unit.index)
            self.writes.settle(unit)
            keep = False
        self.writes.set_aside(unit)
        buffer = unit.reshard()
        if buffer.mapped:  # an unnoticed write too: one through numpy in forward would hide the owners' pages for ever
            self._store.revert(unit.index)
        if keep and not (self._residency.poisons or buffer.mapped):
            unit.kept = buffer
        else:
            self._residency.release(buffer)
        self._up -= 1
        self.note("reshard", unit.name)

    def _drop(self, unit: ParamUnit) -> bool:
        """Drop a unit's fetch; returns whether its buffer is free already. Else it is once the fetch stops writing."""
        fetching = unit.abandon()
        if fetching.ahead:
            self._recorder.add(PREFETCH_DROPPED, 1, result="wasted" if fetching.done.done() else "cancelled")
        self._up -= 1
        self.note("cancel", unit.name)
        if not fetching.cancel():
            self._dropped.append(fetching)
            return False
        self._residency.release(fetching.buffer)
        return True

    def _reap(self, *, wait: bool) -> bool:
        """Free the buffers of dropped fetches that have ended; returns whether there were any."""
        if wait:
            wait_for([fetching.done for fetching in self._dropped])
        over = [fetching for fetching in self._dropped if fetching.done.done()]
        self._dropped = [fetching for fetching in self._dropped if fetching not in over]
        for fetching in over:
            fetching.join()
            self._residency.release(fetching.buffer)
        return bool(over)

    def release_idle(self) -> None:
        """Reshard every unit that nothing uses, and drop prefetches and kept memory; uses fetch again."""
        for unit in self._units:
            if not unit.is_saved():
                self._release(unit, ahead=True)

    def shrink(self, share: float) -> None:
        """Aim at ``share`` of the budget, but at no less than the window that is in use and prefetched, so that uses do
        not begin to wait. Idle units beyond it are resharded, those with the farthest next use first."""
        target = max(int(share * self._budget), self._residency.window(self._root, 1 + self.depth))
        for _, unit in sorted(zip(self._distances(), self._units, strict=True), key=lambda pair: pair[0], reverse=True):
            if self._residency.budget.used > target:
                self._release(unit, ahead=True)
        self._residency.shrink(target)

    def _no_room(self, wanted: ParamUnit) -> str:
        held = [
            f"{unit.name} ({unit.size_bytes:,} bytes, {'in use' if unit.open_calls else 'held by views or graphs'})"
            for unit in self._units
            if unit.state is UnitState.UNSHARDED
        ]
        needed = self._residency.budget.used + buffer_bytes(wanted.size_bytes)
        return (
            f"gpu_param_memory_budget={self._budget:,} bytes has no room for unit {wanted.name!r} "
            f"({wanted.size_bytes:,} bytes) beside {', '.join(held)}; set it to at least {needed:,}"
        )

    # ---- writes

    def write_back(self) -> None:
        """Send the owners what the user wrote; every rank calls it before its finish. [Note: writes]"""
        for unit in self._units:
            if unit.index in self._behind:
                self._refresh(unit)
            values = self.writes.values(unit)
            if values is None:
                continue
            if self._is_published(unit, values):
                if self.writes.came_back_at == self.version:
                    write = Write(version=self.version, unit=unit.index, kind=COMPUTE, digest=digest_of(values))
                    self._store.made(write).result()
            else:
                sent = self._write(unit, COMPUTE, values)
                if (not sent or codec_of(unit.layout).lossy) and unit.state is UnitState.UNSHARDED:
                    self._refresh(unit)  # what was written, as the owners keep it
            if unit.buffer is not None and unit.buffer.mapped and self._store.mapped(unit.index) is not None:
                self._store.revert(unit.index)
            self.writes.settle(unit)

    def rewrite(self, written: Mapping[int, Tensor]) -> None:
        """Forget what was written and not sent. ``written``: unit -> values that were written to it instead."""
        for unit in self._units:
            if unit.state is UnitState.UNSHARDED and self.writes.has(unit):
                self._refresh(unit)
            self.writes.settle(unit)
            if unit.index in written:
                self.writes.restore(unit.index, written[unit.index])
                if unit.state is UnitState.UNSHARDED:
                    self.writes.put_back(unit)

    def overwrite(self, unit: ParamUnit, kind: str, values: Tensor) -> None:
        """Replace a unit's values of ``kind`` by ``values`` (1D, unit.numel elements, host memory; see
        ``ParameterStore.write``). Every rank calls it, after ``write_back``."""
        self._write(unit, kind, values)
        if unit.state is UnitState.UNSHARDED:
            self._refresh(unit)

    def fetch_flat(self, unit: ParamUnit, kind: str) -> Tensor:
        """Fetch what the owners have of ``kind``: 1D, unit.numel elements, host memory; the unit's dtype for COMPUTE,
        else fp32."""
        with torch.inference_mode(False):
            out = torch.empty(
                unit.layout.numel, dtype=unit.layout.dtype if kind == COMPUTE else torch.float32, device="cpu"
            )
        self._store.fetch(unit.index, self.version, kind, out).result()
        return out

    def _is_published(self, unit: ParamUnit, values: Tensor) -> bool:
        return bool(same_bits(values, self.fetch_flat(unit, COMPUTE)).all())

    def _write(self, unit: ParamUnit, kind: str, values: Tensor) -> bool:
        """Send a write, and drop fetches and kept memory of the unit that are older. Returns whether it was sent: see
        ``LoopMoments``."""
        sends = self.writes.sending(unit, kind, values)
        if unit.state is UnitState.UNSHARDING:
            self._drop(unit)
        self._reap(wait=True)
        kept = unit.take_kept()
        if kept is not None:
            self._residency.release(kept)
        if sends:
            self._store.write(unit.index, self.version, kind, values).result()
            self.note("write", unit.name)
        return sends

    def _refresh(self, unit: ParamUnit) -> None:
        """Fetch the present version into the memory of a pinned unit."""
        buffer = unit.buffer
        assert buffer is not None
        self._behind.add(unit.index)
        published = self._published(unit.index)
        if buffer.mapped:
            self._store.revert(unit.index)
        self._transfers.fetch(unit.layout, self.version, buffer, published=published, held=None, ahead=False).wait()
        unit.refreshed(self.version)
        self.writes.settle(unit)
        self._behind.remove(unit.index)
        self.note("refresh", unit.name)

    # ---- passes and steps

    def begin_pass(self, wraps: bool, allowed: int) -> None:
        """A root forward starts. ``wraps``: another one follows before the step. ``allowed``: the prefetch depth that
        memory pressure leaves, at most ``most_ahead``."""
        self._wraps = wraps
        self.schedule.begin_pass()
        self._current = None
        if self._dropped:
            self._reap(wait=False)
        self.adapt(allowed)
        self.prefetch_first()
        self.times.pause()

    def adapt(self, allowed: int) -> None:
        """Set the prefetch depth by memory pressure and the measured pace; see ``begin_pass``."""
        self.allowed = allowed
        self._set_depth(self.times.pace.depth(allowed))

    def forget(self) -> None:
        """Predict uses and times from scratch, as before the first pass."""
        self.schedule = UnitSchedule(len(self._units), always=self._root)
        self.times.pace = PrefetchPace()
        self.allowed = self.most_ahead
        self._set_depth(self.most_ahead)

    def backward_over(self, wraps: bool) -> None:
        """A backward has ended. ``wraps``: a forward follows before the step."""
        self._wraps = wraps
        self.prefetch()

    def fence(self, *, saved: bool = True) -> None:
        """End the reads of this version: cancel or await its fetches and reshard every trained unit that is not pinned;
        ``saved``: also where a graph has saved a Parameter. Afterwards only views (and graphs) read the owners'
        memory."""
        for unit in self._units:
            if unit.state is UnitState.UNSHARDING:
                self._drop(unit)
            elif unit.index in self._trained and unit.can_reshard() and (saved or not unit.is_saved()):
                self._reshard(unit, keep=True)
        self._reap(wait=True)
        self._transfers.drain()

    def advance(self) -> None:
        """The step's finish is sent: read units at the next version."""
        self.times.count()
        self._wraps = False
        self.schedule.begin_pass()
        self._current = None
        trained = [unit for unit in self._units if unit.index in self._trained]
        for unit in trained:
            self._publications.pop(unit.index, None)
        pinned = [unit for unit in trained if unit.state is UnitState.UNSHARDED]
        self._behind.update(unit.index for unit in pinned)
        for unit in pinned:
            self._recorder.add(PINNED_UNITS, 1, group=self._groups[unit.index])
            log.debug("unit %s is pinned over step %d: refreshed in place", unit.name, self.version)
            self._refresh(unit)

    def wait_published(self) -> None:
        """Block until every unit of this version is published."""
        start = time.perf_counter()
        for unit in self._units:
            self._published(unit.index).result()
        self._clock.waited("optimizer", time.perf_counter() - start)

    def readings(self) -> Iterator[Reading]:
        """Measurements of units that are up, in flight and waited for now. Any thread may call it."""
        coming = [unit.size_bytes for unit in self._units if unit.state is UnitState.UNSHARDING]
        yield Reading(PREFETCH_INFLIGHT_BYTES, sum(coming), {})
        yield Reading(PREFETCH_WINDOW_BYTES, self._residency.budget.used, {})
        yield Reading(PREFETCH_WINDOW_LIMIT_BYTES, self._budget, {})
        publications = [self._publications.get(unit) for unit in list(self._trained)]
        lags = any(known is None or not known.done() for known in publications)
        yield Reading(VERSION_LAG, lags and self.version > self._first, {})

    def cancel(self) -> None:
        """Cancel the fetches in flight. Any thread may call it."""
        for unit in self._units:
            fetching = unit.fetching
            if fetching is not None:
                fetching.cancel()
