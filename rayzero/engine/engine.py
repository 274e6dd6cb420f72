"""The rank side, tied together: units come up before they are used, go down after, and their gradients leave.

Four calls carry everything: ``open_units`` and ``close_units`` (a module's forward), ``use`` (autograd wants a saved
weight) and ``touched`` (any other operation). They run on the thread that computes; lanes only complete futures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from rayzero.config import ZeroConfig
from rayzero.engine.gradients import GradientCollector
from rayzero.engine.handles import SavedWeights
from rayzero.engine.hooks import UnitCalls
from rayzero.engine.lane import Lane
from rayzero.engine.param_unit import Fetching, ParamUnit, UnitState
from rayzero.engine.private_torch import graph_task_id, saved_tensor_hooks_allowed
from rayzero.engine.rank_step import RankStep
from rayzero.engine.registered import Registered
from rayzero.engine.residency import Residency, UnitBuffer, stays_up
from rayzero.engine.schedule import Phase, UnitSchedule
from rayzero.errors import MemoryPlanError, UnsupportedError
from rayzero.layout.model_layout import ModelLayout
from rayzero.memory.pool import buffer_bytes
from rayzero.memory.pressure import read_memory, scaled_depth
from rayzero.messages import COMPUTE, CheckpointInfo, FileEntry, Hyper
from rayzero.store.protocol import ParameterStore
from rayzero.telemetry.names import (
    EXPOSED_WAIT_SECONDS,
    PINNED_UNITS,
    PREFETCH_LATE_SECONDS,
    PREFETCH_REQUESTS,
)
from rayzero.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

Observer = Callable[[str, str], None]  # verb, unit name: what happens, in order


class Engine:
    """One rank's parameters and gradients, from prepare() to close().

    Knows units, the schedule and what is up; not how bytes travel (lanes), what a step is made of (RankStep), nor
    which module is which (hooks). ``version`` is the published version its units are read at: the steps committed.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        *,
        rank: int,
        store: ParameterStore,
        lane: Lane,
        step: RankStep,
        config: ZeroConfig,
        device: torch.device,
        recorder: Recorder,
        version: int,
        poison: bool = False,
    ) -> None:
        self.model = model
        self.layout = layout
        self.rank = rank
        self.store = store
        self.step_state = step
        self.config = config
        self.device = device
        self.version = version
        self.observers: list[Observer] = []
        self._lane = lane
        self._recorder = recorder
        self.residency = Residency(layout.units, budget=config.gpu_param_memory_budget, device=device, poison=poison)
        self.schedule = UnitSchedule(len(layout.units))  # replaced by adopt(), which knows the root
        self.collector = GradientCollector(self._completed, self._backward_over)
        self.units: list[ParamUnit] = []
        self.calls: list[UnitCalls] = []
        self._root: frozenset[int] = frozenset()
        self._trained: dict[int, Sequence[int]] = {}
        self._sums: dict[int, list[Tensor | None]] = {}  # offload_grads=False: fp32 sums per slot, on the device
        self._dropped: list[Fetching] = []  # fetches nobody wants, still writing. freed by: _reap, _fence
        self._up = 0  # units that are not SHARDED
        self._current: int | None = None  # the unit last used
        self._backwards = 0  # graph tasks that pushed since the last step
        self._depth = 0
        self._closed = False
        self._resident = False
        self.saved: SavedWeights | None = None
        self.registered: Registered | None = None

    def adopt(self, units: Sequence[ParamUnit], root: Sequence[int], trained: dict[int, Sequence[int]]) -> None:
        """Take the units over. ``root``: units of the root module; ``trained``: per unit, slots an optimizer trains."""
        self.units = list(units)
        self._root = frozenset(root)
        self.schedule = UnitSchedule(len(self.units), always=root)
        self._trained = trained
        weights = {key: (unit, i) for unit in units for i, key in enumerate(unit.keys)}
        self.saved = SavedWeights(weights, self.use, lambda: self.version)
        self.registered = Registered(self.model, units)
        self.collector.watch([(self.units[i], slots) for i, slots in trained.items()])
        self._depth = self._base_depth
        self._resident = stays_up(self.layout, self.config)  # once: a recomputation must save what its forward saved

    @property
    def _base_depth(self) -> int:
        prefetches = self.config.async_prefetch and self.config.overlap_computation
        return self.config.prefetch_buffer_size if prefetches else 0

    def _note(self, verb: str, unit: str = "") -> None:
        for observer in self.observers:
            observer(verb, unit)

    # ---- the four calls

    def open_units(self, units: Sequence[ParamUnit]) -> bool:
        """A module's forward starts: have its units up, and plain Parameters. Returns whether saved-tensor hooks were
        pushed, in any grad mode: the forward may change it. All or nothing."""
        opened: list[ParamUnit] = []
        try:
            for unit in units:
                unit.open_calls += 1
                opened.append(unit)
                self._use(unit)
            pushed_hooks = self._push_hooks()
        except BaseException:
            for unit in opened:
                unit.open_calls -= 1
            raise
        for unit in units:
            unit.set_guard(False)
        return pushed_hooks

    def _push_hooks(self) -> bool:
        """No hooks where everything stays up until the step: weights that autograd saves are simply there."""
        if self._resident:
            return False
        if not saved_tensor_hooks_allowed():
            raise UnsupportedError(
                "torch.func.grad and vjp allow no saved-tensor hooks, which a model needs that is not up as a whole; "
                "raise prefetch_buffer_size and gpu_param_memory_budget until it is, or use torch.autograd"
            )
        assert self.saved is not None
        self.saved.push()
        return True

    def close_units(self, units: Sequence[ParamUnit], pushed_hooks: bool) -> None:
        """That forward has ended, well or not."""
        if pushed_hooks:
            assert self.saved is not None
            self.saved.pop()
        for unit in units:
            unit.open_calls -= 1
            if not unit.open_calls:
                unit.set_guard(True)
        if graph_task_id() < 0:  # in a recomputation its backward follows at once
            self._settle()

    def use(self, unit: ParamUnit) -> None:
        """Autograd wants a saved weight of ``unit``: have it up.

        Under create_graph the node that wants it saves it again: hooks pushed here see that, and autograd, which
        restores its thread's state after every node, takes them off."""
        if graph_task_id() >= 0:
            self.collector.join()
            if torch.is_grad_enabled():
                self._push_hooks()
        self._use(unit)

    @contextmanager
    def touched(self, units: Sequence[ParamUnit]) -> Iterator[None]:
        """Some operation wants Parameters of ``units``: have them up and plain inside the context."""
        pushed_hooks = self.open_units(units)
        try:
            yield
        finally:
            self.close_units(units, pushed_hooks)
        for unit in units:
            self._refuse_writes(unit)

    def name_of(self, param: nn.Parameter, unit: ParamUnit) -> str:
        """The name of one of a unit's Parameters."""
        return next(s.name for s, p in zip(unit.layout.slots, unit.params, strict=True) if p is param)

    def sent_gradient(self, param: nn.Parameter, unit: ParamUnit) -> str | None:
        """The name of ``param`` where its gradient has left this rank in the present step."""
        if not self.step_state.counts[unit.index] and unit.index not in self._sums:
            return None
        return self.name_of(param, unit)

    # ---- up

    def _use(self, unit: ParamUnit) -> None:
        if unit.index != self._current and unit.index not in self._root:
            self._current = unit.index
            self.schedule.used(Phase.BACKWARD if graph_task_id() >= 0 else Phase.FORWARD, unit.index)
            if self._up < len(self.units) or not self._resident:
                self._settle(wanted=unit)
        if unit.state is not UnitState.UNSHARDED:
            self._bring_up(unit)

    def _bring_up(self, unit: ParamUnit) -> None:
        if unit.state is UnitState.SHARDED:
            self._fetch(unit, ahead=False)
        fetching = unit.fetching
        assert fetching is not None
        there = fetching.done.done()
        try:
            waited = unit.wait_unsharded()
        except BaseException:
            self._drop(unit)
            raise
        self._note("unshard", unit.name)
        self._count_use(fetching, there, waited)

    def _count_use(self, fetching: Fetching, there: bool, waited: float) -> None:
        result = "miss" if not fetching.ahead else "hit" if there else "late"
        self._recorder.add(PREFETCH_REQUESTS, 1, result=result)
        if result == "late":
            self._recorder.observe(PREFETCH_LATE_SECONDS, waited)
        if waited:
            self._recorder.add(EXPOSED_WAIT_SECONDS, waited, cause="fetch")

    def _fetch(self, unit: ParamUnit, *, ahead: bool) -> bool:
        """Ask for a unit; a prefetch (``ahead``) only where there is room: returns whether it was asked for."""
        self.step_state.raise_if_failed()
        buffer = self.residency.acquire(unit.index)
        while buffer is None:
            if ahead:
                return False
            self._make_room(unit)
            buffer = self.residency.acquire(unit.index)
        unit.unshard(self._lane.fetch(unit.layout, self.version, buffer, ahead=ahead))
        self._up += 1
        self._note("prefetch" if ahead else "fetch", unit.name)
        return True

    # ---- down

    def _settle(self, wanted: ParamUnit | None = None) -> None:
        """Bring what is up in line with the window: reshard what fell out of it, ask for what is coming.

        ``wanted``: the unit in use, asked for before any prefetch. [Note: the window]"""
        if not self._resident:
            ahead = self.schedule.upcoming(self._depth, wrap=True)
            keep = self._root.union(ahead, () if self._current is None else (self._current,))
            for unit in self.units:
                if unit.index not in keep and unit.state is not UnitState.SHARDED:
                    self._let_go(unit)
        if wanted is not None and wanted.state is UnitState.SHARDED:
            self._fetch(wanted, ahead=False)
        self._prefetch(self.schedule.upcoming(self._depth, wrap=self._more_backwards))

    def _prefetch(self, units: Sequence[int]) -> None:
        for index in units:
            unit = self.units[index]
            if unit.state is UnitState.SHARDED and not self._fetch(unit, ahead=True):
                return

    @property
    def _more_backwards(self) -> bool:
        """Whether another forward follows before the step."""
        return self._backwards < self.config.gradient_accumulation_steps - 1

    def _let_go(self, unit: ParamUnit) -> bool:
        """Take a unit down if it can be: returns whether it is."""
        if unit.state is UnitState.UNSHARDING:
            self._drop(unit)
            return True
        if not unit.can_reshard():
            return False
        self._refuse_writes(unit)
        if unit.state is UnitState.UNSHARDED:
            self._reshard(unit)
        return True

    def _reshard(self, unit: ParamUnit) -> None:
        self._give_back(unit.reshard())
        self._up -= 1
        self._note("reshard", unit.name)

    def _give_back(self, buffer: UnitBuffer) -> None:
        self.residency.release(buffer)

    def _drop(self, unit: ParamUnit) -> None:
        """Give up a unit's fetch; its buffer is free once nobody writes to it."""
        fetching = unit.abandon()
        self._up -= 1
        self._note("cancel", unit.name)
        if fetching.cancel():
            self._give_back(fetching.buffer)
        else:
            self._dropped.append(fetching)

    def _refuse_writes(self, unit: ParamUnit) -> None:
        """Raise where the user wrote into the unit; what was written is thrown away, also under views of it."""
        try:
            unit.refuse_writes()
        except UnsupportedError:
            if unit.can_reshard():
                self._reshard(unit)
            else:
                self._refresh(unit)
            raise

    def _refresh(self, unit: ParamUnit) -> None:
        """Put the present version under a unit that somebody holds."""
        assert unit.buffer is not None
        self._lane.fetch(unit.layout, self.version, unit.buffer, ahead=False).wait()
        unit.refreshed(self.version)
        self._note("refresh", unit.name)

    def _make_room(self, wanted: ParamUnit) -> None:
        """Free some memory for ``wanted``, the least needed first; raises MemoryPlanError where nothing is left.

        A unit that is needed now may take the budget of prefetches."""
        order = {unit: i for i, unit in enumerate(self.schedule.upcoming(len(self.units), wrap=True))}
        never, at_once = len(order), -1
        far_first = sorted(
            self.units,
            key=lambda unit: at_once if unit.index in self._root else order.get(unit.index, never),
            reverse=True,
        )
        for unit in far_first:
            if unit is not wanted and unit.state is UnitState.UNSHARDING:
                self._drop(unit)
                self._reap(wait=True)
                return
        if self._dropped:
            self._reap(wait=True)
            return
        for unit in far_first:
            if unit is not wanted and unit.state is UnitState.UNSHARDED and self._let_go(unit):
                return
        raise MemoryPlanError(self._no_room(wanted))

    def _no_room(self, wanted: ParamUnit) -> str:
        held = [
            f"{unit.name} ({unit.size_bytes:,} bytes, {'in use' if unit.open_calls else 'held by views or graphs'})"
            for unit in self.units
            if unit.state is UnitState.UNSHARDED
        ]
        budget, needed = self.config.gpu_param_memory_budget, self.residency.used + buffer_bytes(wanted.size_bytes)
        return (
            f"gpu_param_memory_budget={budget:,} bytes has no room for unit {wanted.name!r} "
            f"({wanted.size_bytes:,} bytes) beside {', '.join(held)}; set it to at least {needed:,}"
        )

    def _reap(self, *, wait: bool) -> None:
        """Free the buffers of dropped fetches that are over."""
        if wait:
            wait_for([fetching.done for fetching in self._dropped])
        over = [fetching for fetching in self._dropped if fetching.done.done()]
        self._dropped = [fetching for fetching in self._dropped if fetching not in over]
        for fetching in over:
            if fetching.ready is not None and not fetching.done.cancelled() and fetching.done.exception() is None:
                fetching.ready.synchronize()
            self._give_back(fetching.buffer)

    # ---- passes

    def begin_forward(self) -> None:
        """The model's own forward starts."""
        self.collector.drain()
        self.step_state.raise_if_failed()
        if self.registered is not None:
            self.registered.check()
        self.schedule.begin_pass()
        self._current = None
        if self._dropped:
            self._reap(wait=False)
        if self._base_depth:
            reading = read_memory(self.device)
            pressure = reading.pressure(
                max_cpu_memory_mb=self.config.max_cpu_memory_mb, max_gpu_memory_mb=self.config.max_gpu_memory_mb
            )
            self._depth = scaled_depth(self._base_depth, pressure, self.config.auto_memory_management)
            self._prefetch(self.schedule.first(self._depth))

    def end_forward(self) -> None:
        """The model's own forward has ended, well or not."""
        self._settle()

    def _backward_over(self, nested: bool) -> None:
        """A graph task has ended well; ``nested``: inside another one."""
        if not nested:
            self._backwards += 1
            self._settle()

    def drain(self) -> None:
        """End what an exception left open: graph tasks and forwards whose end nobody announced."""
        self.collector.drain()
        for calls in self.calls:
            calls.drain()

    # ---- gradients

    def _completed(self, unit: ParamUnit) -> None:
        """All gradients this graph task brings for ``unit`` are on its Parameters: they leave."""
        grads = unit.take_grads(self._trained[unit.index])
        if all(grad is None for grad in grads):
            return
        self.step_state.refuse_backward()
        self._note("push", unit.name)
        if self.config.offload_grads:
            self.step_state.push(unit.layout, grads, wait=not self.config.overlap_computation)
        else:
            self._add_up(unit, grads)
        if not self._resident:
            self._settle()

    def _add_up(self, unit: ParamUnit, grads: Sequence[Tensor | None]) -> None:
        sums = self._sums.setdefault(unit.index, [None] * len(grads))
        for i, grad in enumerate(grads):
            if grad is not None:
                held = sums[i]
                sums[i] = grad.float() if held is None else held.add_(grad)

    def _push_rest(self) -> None:
        """Push what is still on the device: sums, and gradients no hook saw (set by hand, left by an exception)."""
        for index, slots in self._trained.items():
            unit = self.units[index]
            grads = unit.take_grads(slots)
            if index in self._sums or any(grad is not None for grad in grads):
                if not self.config.offload_grads:
                    self._add_up(unit, grads)
                    grads = [s if s is None else s.to(unit.layout.dtype) for s in self._sums.pop(index)]
                self.step_state.push(unit.layout, grads, wait=False)

    # ---- steps

    def clip(self, max_norm: float) -> float:
        """Finish the step's gradients and clip them; see RankStep.clip."""
        self.drain()
        self._finish_gradients()
        return self.step_state.clip(max_norm)

    def _finish_gradients(self) -> None:
        if not self.step_state.clipped:
            self._push_rest()
            self.step_state.landed()

    def step(self, hyper: tuple[Hyper, ...]) -> None:
        """Commit the step; units are of the next version afterwards."""
        self.drain()
        self._finish_gradients()
        if self.config.nonfinite == "raise":
            self.step_state.norm()  # raises before anything is committed: zero_grad() starts over
        self._fence()
        self.step_state.commit(hyper, self.config.max_grad_norm)
        self._note("finish")
        self.version += 1
        self._backwards = 0
        self.schedule.begin_pass()
        self._current = None
        self._refresh_pinned()
        self._after_step()

    def _fence(self) -> None:
        """No fetch of this version is left, and no unit is up that could be taken down."""
        for unit in self.units:
            if unit.state is not UnitState.SHARDED and not self._let_go(unit):
                self._refuse_writes(unit)
        self._reap(wait=True)

    def _refresh_pinned(self) -> None:
        """Put the new version under units that somebody still holds: their views must read it."""
        for unit in self.units:
            if unit.state is UnitState.UNSHARDED:
                self._recorder.add(PINNED_UNITS, 1, unit=unit.name)
                log.debug("unit %s is pinned over step %d: refreshed in place", unit.name, self.version)
                self._refresh(unit)

    def _after_step(self) -> None:
        if not self.config.offload_params:
            self._prefetch(range(len(self.units)))
        elif self._base_depth:
            self._prefetch(self.schedule.first(self._depth))
        if self.config.overlap == "none" or not self.config.overlap_computation:
            self._wait_published()

    def _wait_published(self) -> None:
        """Block until the step is decided and every unit of the new version is published."""
        self.step_state.wait_decided()
        scratch = [unit for unit in self.units if unit.state is UnitState.SHARDED]
        for unit in self.units:
            if unit.fetching is not None:
                unit.fetching.done.result()
        for unit in scratch:
            buffer = torch.empty(unit.layout.numel, dtype=unit.layout.dtype)
            self.store.fetch(unit.index, self.version, COMPUTE, buffer).result()

    def discard(self) -> None:
        """Take back the step's gradients, wherever they are."""
        self.drain()
        self._sums.clear()
        for index, slots in self._trained.items():
            self.units[index].take_grads(slots)
        self.step_state.discard()
        self._backwards = 0

    def save(self, directory: Path, files: tuple[FileEntry, ...]) -> CheckpointInfo:
        """Write the present version as a checkpoint; every rank calls it. Waits until it is complete."""
        return self.store.save(self.version, directory, files).result()

    def close(self, reason: str = "closed") -> None:
        """Leave the run: lanes and store end. Parameters that are not up can no longer be read. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for unit in self.units:
            if unit.fetching is not None:
                unit.fetching.request.cancel()
        self.store.close(reason)
        self._lane.close()
