"""The rank's engine: unshards units before use, reshards them after it, and sends their gradients.

Events become three calls: ``open_units`` and ``close_units`` (a module's forward), and ``touched`` (any other
operation). What autograd has saved asks for its unit by itself (handles.py). They run on the computing thread;
transfers only complete futures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread

import torch
from torch import Tensor, nn

from rayzero.activations.offload import ActivationOffload
from rayzero.config import ZeroConfig
from rayzero.engine.autograd.gradients import GradientCollector, GradientSums, TrainedSlots
from rayzero.engine.autograd.handles import SavedWeights
from rayzero.engine.autograd.hooks import UnitCalls
from rayzero.engine.autograd.touch import Unfrozen, guard_for
from rayzero.engine.engine_memory import HEAP_STEPS, EngineMemory, MemoryStrategy
from rayzero.engine.private_torch import graph_task_id, is_proxied, is_tracing
from rayzero.engine.rank_products import RankProducts
from rayzero.engine.rank_step import RankStep
from rayzero.engine.step_clock import LoopMoments, PassTimes
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.engine.units.partition import UnitPlan
from rayzero.engine.units.residency import Residency, stays_up
from rayzero.engine.units.schedule import Phase
from rayzero.engine.units.unit_cache import UnitCache
from rayzero.engine.values import Registered, StateDictLoad, UnitValues
from rayzero.errors import GradientAccessError, UnsupportedError
from rayzero.modes import NO_CAPTURE, outside_modes
from rayzero.protocol.messages import GROUP, CheckpointInfo, FileEntry, Hyper, MeanInput, group_number
from rayzero.telemetry.names import LEARNING_RATE
from rayzero.telemetry.recorder import Recorder, Since


class Engine:
    """One rank's parameters and gradients, from prepare() to close().

    Knows units, and what each module and autograd event means for them; not which of them are up (UnitCache) or trained
    (TrainedSlots), what the owners have of them (UnitValues), how bytes travel (UnitTransfers), what a step is made of
    (RankStep), nor which module is which (hooks)."""

    def __init__(
        self,
        model: nn.Module,
        plan: UnitPlan,
        units: Sequence[ParamUnit],
        groups: Sequence[Sequence[int]],
        *,
        step: RankStep,
        residency: Residency,
        config: ZeroConfig,
        recorder: Recorder,
        number: int = 0,
    ) -> None:
        """``units``: at the version that is the open step's number. ``groups``: [unit][slot] -> parameter group, < 0
        for none. ``recorder``: of this model. ``number``: the prepared model's in its run."""
        self.model = model
        self.layout = plan.layout
        self.units = list(units)
        self.rank = step.rank
        self.number = number
        self.transfers = step.transfers
        self.store = self.transfers.store
        self.step_state = step
        self.config = config
        self.residency = residency
        self.device = residency.device
        self.made_at = time.monotonic()
        self.stepped_at = 0.0  # on the same clock; 0.0: not yet
        self._recorder = recorder
        self.since = Since(recorder.process)  # for stats()
        self.clock = step.clock
        self.passes = PassTimes(self.layout.units, step.clock, recorder.spans)
        self._overlaps = (
            config.overlap == "forward"
            and config.overlap_computation
            and not self.transfers.owners_are_here  # they would take the next forward's cores
        )
        self._updating = False  # the last step's update may not be over
        self.calls: list[UnitCalls] = []
        self._sums = GradientSums()  # offload_grads=False
        self._backwards = 0  # graph tasks that pushed since the last step
        self._closed = False
        self._in_forward = False
        self._trains_in = current_thread()  # the last thread that began a forward or a step
        self.loading = StateDictLoad()
        self.resident = stays_up(self.layout, config)  # decided once: a recomputation must save what its forward saved
        self._heap_until = step.step + HEAP_STEPS if self.device.type == "cpu" and not number else 0
        self.activations: ActivationOffload | None = None  # set by prepare if the config asks for it
        self.products: RankProducts | None = None  # freed by: close()
        self.loop: LoopMoments | None = None  # of the model whose steps are the loop's
        self.trained = TrainedSlots(self.units, groups)
        self.cache = UnitCache(
            self.units,
            plan.root,
            self.trained.of_unit,
            step=step,
            residency=residency,
            config=config,
            recorder=recorder,
        )
        weights = {key: (unit, i) for unit in units for i, key in enumerate(unit.keys)}
        for unit in units:
            unit.slots = weights
            guard_for(unit, self)
        self.values = UnitValues(self.store, self.cache)
        self.collector = GradientCollector(self)
        self.saved = SavedWeights(weights, self.collector, self.passes, self.cache, resident=self.resident)
        self.unfrozen = Unfrozen(units)
        self.registered = Registered(model, units)
        self.memory = EngineMemory(residency, self.transfers, recorder)
        gathers = residency.has_buffers and not self.resident  # else autograd saves the Parameters themselves
        self.strategy = MemoryStrategy(config, self.memory, self.cache, recorder, gathers=gathers)
        self._unwatch = [recorder.watch(source) for source in (self.cache.readings, self.memory.readings)]
        self.collector.watch([(self.units[i], slots) for i, slots in self.trained.of_unit.items()])

    @property
    def version(self) -> int:
        """The published version that units are read at; it equals the number of committed steps."""
        return self.step_state.step

    # ---- the three calls

    @outside_modes
    def open_units(self, units: Sequence[ParamUnit], *, forward: bool = True) -> bool:
        """A module's forward starts (or ``touched``): bring its units up and make their Parameters plain. Returns
        whether saved-tensor hooks were pushed, which does not depend on the grad mode: the forward may change it. All
        or nothing."""
        opened: list[ParamUnit] = []
        phase = Phase.BACKWARD if self.collector.in_backward() else Phase.FORWARD
        try:
            for unit in units:
                unit.open_calls += 1
                opened.append(unit)
                self.cache.use(unit, phase)
            pushed_hooks = self.saved.push()
        except BaseException:
            for unit in opened:
                unit.open_calls -= 1
            raise
        for unit in units:
            unit.set_guard(False)
        if self.unfrozen.slots:
            self.unfrozen.watch(units)
        self.passes.opened(forward=forward)
        return pushed_hooks

    @outside_modes
    def close_units(self, units: Sequence[ParamUnit], pushed_hooks: bool) -> None:
        self.passes.closed([unit.index for unit in units], self._in_forward)
        if pushed_hooks:
            self.saved.pop()
        for unit in units:
            unit.open_calls -= 1
            if not unit.open_calls:
                unit.set_guard(True)
        if graph_task_id() < 0:  # after a recomputation its backward follows at once
            self.cache.prefetch()

    @contextmanager
    def touched(self, units: Sequence[ParamUnit]) -> Iterator[None]:
        pushed_hooks = self.open_units(units, forward=False)
        try:
            yield
        finally:
            self.close_units(units, pushed_hooks)
        if not self._in_forward and graph_task_id() < 0:
            self._lend(units)

    @outside_modes
    def _lend(self, units: Sequence[ParamUnit]) -> None:
        for unit in units:
            self.cache.writes.lend(unit)

    def set_flag(self, param: nn.Parameter, unit: ParamUnit, on: bool) -> None:
        self.unfrozen.note(unit, unit.slot_of(param), on)

    @outside_modes
    def gone_gradient(self, param: nn.Parameter, unit: ParamUnit, *, read: bool) -> str | None:
        """See ``Toucher``."""
        slot = unit.slot_of(param)
        if self._has_sent(unit) or (read and self.step_state.is_spent(unit.index, slot)):
            return unit.layout.slots[slot].name
        if not read:
            self.step_state.drop(unit.index, slot)
        return None

    def _has_sent(self, unit: ParamUnit) -> bool:
        """Whether gradients of the unit have left their Parameters in this step."""
        return bool(self.step_state.counts[unit.index]) or unit.index in self._sums

    # ---- passes

    @outside_modes
    def begin_forward(self) -> None:
        if self.loop is not None:
            self.loop.begin_forward()
        self._in_forward = True
        self.clock.enter("forward")
        if self._updating and self.transfers.owners_share_cores(self.trained.of_unit):
            self._updating = False
            self.cache.wait_published()
        if graph_task_id() < 0:  # in a backward the whole model is recomputed, and that task goes on
            self._trains_in = current_thread()
            self.collector.drain()
        self.step_state.raise_if_failed()
        if torch.compiler.is_exporting() or is_proxied() or (is_tracing() and not self.resident):
            raise UnsupportedError(NO_CAPTURE)
        self.registered.check()
        if torch.is_grad_enabled():
            self.unfrozen.look()
        self.cache.begin_pass(self._more_backwards, self.strategy.depth)

    @property
    def _more_backwards(self) -> bool:
        """Whether another forward follows before the step."""
        return self._backwards < self.config.gradient_accumulation_steps - 1

    @outside_modes
    def end_forward(self) -> None:
        self._in_forward = False
        self.passes.end_forward()
        self._sample_heap()
        self.strategy.look()
        self.cache.prefetch()
        if not torch.is_grad_enabled():
            self.clock.enter("data")

    def _sample_heap(self) -> None:
        """Memory is high at the end of a forward, and when a unit's gradients are complete."""
        if self.step_state.step < self._heap_until:
            self.memory.sample_heap()

    def backward_over(self) -> None:
        """See ``GradientEvents``."""
        self.passes.end_backward()
        self._backwards += 1
        self.cache.backward_over(self._more_backwards)

    def drain(self) -> None:
        """End what an exception left open: graph tasks and forwards whose end torch did not report."""
        self.collector.drain()
        for calls in self.calls:
            calls.drain()
        self.loading.abandon()

    # ---- gradients

    def completed(self, unit: ParamUnit) -> None:
        """See ``GradientEvents``: push the unit's gradients, or sum them on the device."""
        self.passes.completed(unit.index)
        self._sample_heap()
        grads = unit.take_grads(self.trained.of_unit[unit.index])
        if all(grad is None for grad in grads):
            return
        self.step_state.refuse_backward()
        self.cache.note("push", unit.name)
        if not self.config.offload_grads:
            self._sums.add(unit, grads)
        else:
            if self.config.gradient_accumulation_steps == 1:  # zeros of their own would be a second push
                self._add_zeros(unit, grads)
            self.step_state.push(unit.layout, grads, wait=not self.config.overlap_computation)
        self.cache.prefetch()

    def _push_rest(self) -> None:
        """Push what is still on the device: sums, zeros, and gradients that no hook saw (set by hand, left by an
        exception)."""
        for index, slots in self.trained.of_unit.items():
            unit = self.units[index]
            grads = unit.take_grads(slots)
            if not self.config.offload_grads and (index in self._sums or any(grad is not None for grad in grads)):
                self._sums.add(unit, grads)
                grads = self._sums.take(unit)
            self._add_zeros(unit, grads)
            if any(grad is not None for grad in grads):
                self.step_state.push(unit.layout, grads, wait=False)

    def _add_zeros(self, unit: ParamUnit, grads: list[torch.Tensor | None]) -> None:
        """Give the slots that zero_grad(set_to_none=False) made zero, and that have no gradient since, a zero one."""
        for slot in self.step_state.zeroed(unit.index):
            if grads[slot] is None:
                shape = unit.layout.slots[slot].shape
                grads[slot] = torch.zeros(shape, dtype=unit.layout.dtype, device=self.device)

    # ---- steps

    @outside_modes
    def clip_norm(self, max_norm: float) -> float:
        """Finish the step's gradients and clip their norm; see RankStep.clip_norm."""
        with self._finishing():
            return self.step_state.clip_norm(max_norm)

    @outside_modes
    def clip_value(self, limit: float) -> None:
        """Finish the step's gradients and clamp their elements."""
        with self._finishing():
            self.step_state.clip_value(limit)

    @outside_modes
    def unscale(self, factor: float) -> bool:
        """Finish the step's gradients and unscale them; returns whether those of all ranks are finite."""
        with self._finishing():
            return self.step_state.unscale(factor)

    @contextmanager
    def _finishing(self) -> Iterator[None]:
        """Finish the step's gradients, then clip or unscale them inside the context; the time counts as the
        optimizer's."""
        self.clock.enter("optimizer")
        self._finish_gradients()
        yield
        self.clock.enter("data")

    def _finish_gradients(self) -> None:
        self.drain()
        self._refuse_spent()
        self.cache.write_back()
        if not self.step_state.edited:
            self._push_rest()
            self.step_state.landed()

    def _refuse_spent(self) -> None:
        """Raise GradientAccessError if a gradient that a step applied was not zeroed. Checked only here, because a loop
        may run a backward over gradients that it zeroes later (a GAN's generator step)."""
        if self.step_state.spent is not None:
            unit, slot = self.step_state.spent
            raise GradientAccessError(
                f"{self.layout.units[unit].slots[slot].name!r} was not zeroed after the last step(), which applied "
                f"its gradient. Plain PyTorch would add the new gradient to it, or apply it again; RayZero cannot, "
                f"because the gradient has left this rank. Call optimizer.zero_grad() between step() and the next "
                f"backward"
            )

    @outside_modes
    def step(self, hyper: tuple[Hyper, ...]) -> None:
        """Commit the step. Afterwards units are read at the next version."""
        self._trains_in = current_thread()
        self.clock.enter("optimizer")
        for group, options in enumerate(hyper):
            if isinstance(lr := options.get("lr"), int | float):
                self._recorder.set(LEARNING_RATE, lr, param_group=str(group))
        self._finish_gradients()
        if self.config.nonfinite == "raise":
            self.step_state.averaged_norm()  # raises before anything is committed: zero_grad() starts over
        self.cache.fence()
        if self.loop is not None:
            self.loop.committing(self.step_state.step)
        self.clock.committing()
        self.step_state.commit(hyper, self.config.max_grad_norm)
        if self.products is not None:
            self.products.begin(self.step_state.step, self.step_state.deciding)
        self.stepped_at = time.monotonic()
        self.cache.note("finish")
        self._backwards = 0
        self.cache.advance()
        self.strategy.act(self.activations)
        if self.config.offload_params:
            self.cache.prefetch_first()
        else:
            self.cache.prefetch_all()
        self._updating = self._overlaps
        if not self._overlaps:
            self.step_state.wait_decided()
            self.cache.wait_published()
        self.clock.step_over(self.step_state.step)

    @outside_modes
    def discard(self, *, set_to_none: bool = True) -> None:
        """Drop the step's gradients, pushed or not; see RankStep.discard."""
        self.drain()
        unpushed = {}
        for index, slots in self.trained.of_unit.items():
            held = {slot for slot, grad in enumerate(self.units[index].take_grads(slots)) if grad is not None}
            unpushed[index] = sum(1 << slot for slot in held | self._sums.slots(index))
        self._sums.clear()
        if self.loop is not None and self.step_state.is_known_to_others:
            self.loop.dropping()
        self.step_state.discard(unpushed, set_to_none=set_to_none)
        self._backwards = 0

    @outside_modes
    def zero_grad(self, params: Sequence[nn.Parameter], *, set_to_none: bool) -> None:
        """Drop the gradients of the trained Parameters among ``params``, for ``zero_grad()`` of a module that holds
        them.

        Raises GradientAccessError for a part of the model if gradients of it have left in this step: a step's gradients
        can only be dropped together."""
        given = {id(param) for param in params}
        trained = [(self.units[i], slot) for i, slots in self.trained.of_unit.items() for slot in slots]
        if all(id(unit.params[slot]) in given for unit, slot in trained):
            self.discard(set_to_none=set_to_none)
            return
        ours = [(unit, slot) for unit, slot in trained if id(unit.params[slot]) in given]
        for unit, slot in ours:
            if self._has_sent(unit):
                raise GradientAccessError(
                    f"zero_grad() was called on a part of the model, but the gradient of "
                    f"{unit.layout.slots[slot].name!r} has already gone to the optimizer owners, together with those "
                    f"of other parameters; call zero_grad() of the optimizer or of the whole model"
                )
        for unit, slot in ours:
            self.step_state.drop(unit.index, slot, set_to_none=set_to_none)

    @outside_modes
    def save(self, directory: Path, files: tuple[FileEntry, ...]) -> CheckpointInfo:
        """Write the present version as a checkpoint; every rank calls it. Waits until it is complete."""
        with self._saving():
            return self.store.save(self.version, directory, files).result()

    @outside_modes
    def begin_save(self, directory: Path, files: tuple[FileEntry, ...]) -> Future[CheckpointInfo]:
        """Begin to write the present version as a checkpoint; every rank calls it. Waits until all have; the future is
        done when it is complete."""
        with self._saving():
            self.store.begin_save(self.version, directory, files).result()
            return self.store.save(self.version, directory, files, begun=True)

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self.clock.enter("checkpoint")
        try:
            self.drain()
            self.cache.write_back()
            yield
        finally:
            self.clock.enter("data")

    @outside_modes
    def mean(self, given: MeanInput) -> tuple[float, ...]:
        """The mean over all ranks; see ``ParameterStore.mean``. Waits for all ranks, and leaves the step as it is."""
        start = time.perf_counter()
        mean = self.store.mean(given).result() if self.loop is None else self.loop.mean(given)
        self.clock.waited("mean", time.perf_counter() - start)
        return mean

    # ---- what the user adds and changes

    @outside_modes
    def train(self, params: Sequence[nn.Parameter], group: int, like: int) -> None:
        """Make the owners train parameters that were in no group as part of ``group``; every rank calls it. ``like``:
        see [Note: group numbers].

        Raises UnsupportedError for a parameter that was not in the model at prepare, or frozen there, or is frozen
        now."""
        self.registered.refuse_added()
        number = group_number(group, like)
        for index, slots in self.trained.find(params).items():
            unit = self.units[index]
            self.values.write(unit, GROUP, self.trained.with_added(unit, slots, group, number))
            self.trained.add(index, slots, group)
            self.collector.watch([(unit, slots)])
            self.cache.train(index)

    @contextmanager
    def complete(self, *, modify: bool) -> Iterator[None]:
        """Keep every unit up inside the context. ``modify``: any write there counts, even one that torch does not
        count."""
        with self.touched(self.units):
            yield
            for unit in self.units if modify else ():
                self.cache.writes.mark(unit)

    @outside_modes
    def take_loaded(self, param: nn.Parameter, unit: ParamUnit, value: Tensor) -> bool:
        return self.loading.take(param, unit, value)

    @outside_modes
    def end_load(self, module: nn.Module) -> None:
        """A module's load_state_dict() has ended without an exception: send its values to the owners, unit by unit.
        Every rank calls it with equal values."""
        values = self.loading.end(module)
        if values is None:
            return
        self.drain()
        self.cache.write_back()
        for index in sorted(values):
            self.values.load(self.units[index], values[index])

    @outside_modes
    def release(self) -> None:
        """See ``rayzero.release``."""
        if current_thread() is not self._trains_in:
            raise UnsupportedError(
                f"rayzero.release() was called from thread {current_thread().name!r}, which is not the one that trains "
                f"({self._trains_in.name!r}) and may begin a forward meanwhile: call it there, between two steps"
            )
        within = self._in_forward or graph_task_id() >= 0
        if within or self.passes.may_have_graph or self.step_state.pushed or self.step_state.edited:
            why = "it was called in a forward or backward" if within else "the open step has a graph or gradients"
            raise UnsupportedError(
                f"rayzero.release() gives back what no step needs, but {why}: call it between optimizer.step() and the "
                "next forward (one under torch.no_grad() is allowed)"
            )
        self.cache.wait_published()  # until then owners read gradients
        self.cache.fence(saved=False)
        self.memory.free(self.cache, self.activations)
        self.store.release()

    def close(self, reason: str = "closed") -> None:
        """Leave the run: close transfers and store. Parameters that are not up can no longer be read. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for end in self._unwatch:
            end()
        self.cache.cancel()
        try:
            self.transfers.drain()  # it frees the store's memory
        finally:
            self.store.close(reason)
            self.transfers.close()
            if self.products is not None:
                self.products.close()  # after the store, which ends its waits
