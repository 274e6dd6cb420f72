"""Which parameters get gradients, when those of a unit are complete, and their sums where they stay on the device.

[Note: completion] A hook after each parameter's AccumulateGrad node runs after the user's own hooks, even if no
gradient came. At a unit's first gradient in a graph task we ask autograd which of its parameters this backward will
reach; when the last of those has its gradient, the unit is complete. Units that are still open at the end of the graph
task are completed there. A reentrant checkpoint runs graph tasks inside graph tasks, so one backward may complete a
unit several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rayzero.engine.private_torch import at_end_of_backward, graph_task_id, will_execute
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.errors import UnsupportedError
from rayzero.modes import outside_modes
from rayzero.tensor_metadata import plain

Trained = Sequence[tuple[ParamUnit, Sequence[int]]]  # each unit, with its slots that an optimizer trains


Added = dict[int, list[int]]  # unit -> slots


class TrainedSlots:
    """Each slot's parameter group, unit by unit.

    Knows places and groups; not gradients or values."""

    def __init__(self, units: Sequence[ParamUnit], groups: Iterable[Sequence[int]]) -> None:
        """``groups``: [unit][slot] -> parameter group; < 0: no optimizer trains it."""
        self._units = units
        self._groups = [list(its) for its in groups]
        self._numbers: dict[int, int] = {}  # of later groups, as owners know them
        self.of_unit: dict[int, list[int]] = {}  # unit -> its trained slots, for units that have some
        for unit in units:
            self._note(unit.index)

    def groups_of(self, unit: int) -> dict[int, int]:
        """A unit's trained slots, each with its group."""
        return {slot: group for slot, group in enumerate(self._groups[unit]) if group >= 0}

    def find(self, params: Sequence[nn.Parameter]) -> Added:
        """The slots of parameters that were in no group, in unit order.

        Raises UnsupportedError for a parameter that is not in the model, was frozen at prepare, or is frozen now."""
        places = {id(param): (unit, slot) for unit in self._units for slot, param in enumerate(unit.params)}
        found: Added = {}
        for i, param in enumerate(params):
            if id(param) not in places:
                raise UnsupportedError(
                    f"parameter {i} of the added group (shape {tuple(param.shape)}) is not in the model"
                )
            unit, slot = places[id(param)]
            if not unit.layout.trainable or not param.requires_grad:
                raise UnsupportedError(
                    f"parameter {unit.layout.slots[slot].name!r} of the added group is frozen; a parameter that is "
                    f"trained later must have requires_grad=True at rayzero.prepare() and when its group is added"
                )
            found.setdefault(unit.index, []).append(slot)
        return dict(sorted(found.items()))

    def with_added(self, unit: ParamUnit, slots: Sequence[int], group: int, number: int) -> Tensor:
        """Each element's group number ([Note: group numbers]) once ``group``, whose is ``number``, has these slots: 1D,
        unit.numel elements, fp32."""
        self._numbers[group] = number
        flat = torch.full((unit.layout.numel,), -1.0, dtype=torch.float32, device="cpu")
        for slot, its in {**self.groups_of(unit.index), **dict.fromkeys(slots, group)}.items():
            place = unit.layout.slots[slot]
            flat[place.start : place.stop] = self._numbers.get(its, its)
        return flat

    def add(self, unit: int, slots: Sequence[int], group: int) -> None:
        """``group`` has these slots from now on."""
        for slot in slots:
            self._groups[unit][slot] = group
        self._note(unit)

    def _note(self, unit: int) -> None:
        slots = list(self.groups_of(unit))
        if slots:
            self.of_unit[unit] = slots


class GradientEvents(Protocol):
    """What a collector reports, to the engine."""

    def completed(self, unit: ParamUnit) -> None:
        """All gradients that this graph task brings for ``unit`` are on its Parameters."""
        ...

    def backward_over(self) -> None:
        """A graph task that is in no other one has ended without an exception."""
        ...


class GradientCollector:
    """Watches gradients arrive and reports when a unit has all that this backward brings.

    Knows AccumulateGrad nodes and graph tasks; not what becomes of gradients, nor steps. Graph tasks may run in
    autograd's own threads, one at a time for a rank."""

    def __init__(self, events: GradientEvents) -> None:
        self._events = events
        self._nodes: dict[ParamUnit, dict[int, Any]] = {}  # by slot; kept: autograd would make new ones, not hooked
        self._tasks: dict[int, dict[ParamUnit, set[int]]] = {}  # graph task -> unit -> slots still to come

    def watch(self, trained: Trained) -> None:
        """Put the hooks on, once for a slot, after the Parameters have their final dtype and storage."""
        for unit, slots in trained:
            nodes = self._nodes.setdefault(unit, {})
            for slot in slots:
                node = nodes[slot] = _accumulate_node(unit.params[slot])
                unit.keeps_node(slot)
                node.register_hook(self._hook(unit, slot, nodes))

    def _hook(self, unit: ParamUnit, slot: int, nodes: dict[int, Any]) -> Callable[..., None]:
        @outside_modes
        def after_accumulate(*_: Any) -> None:
            task = graph_task_id()
            units = self._tasks.get(task) or self._join(task)
            coming = units.get(unit)
            if coming is None:
                coming = units[unit] = {other for other, node in nodes.items() if will_execute(node)}
            coming.discard(slot)
            if not coming:
                del units[unit]
                self._events.completed(unit)

        return after_accumulate

    def in_backward(self) -> bool:
        """Whether a graph task runs; if so, autograd will report its end.

        A recomputation has to ask too: a reentrant checkpoint runs a graph task of its own inside the one that
        recomputes, and only a task that is known here makes that one nested."""
        task = graph_task_id()
        if task >= 0:
            self._join(task)
        return task >= 0

    def _join(self, task: int) -> dict[ParamUnit, set[int]]:
        """Ask autograd to report the end of the running graph task; returns the slots it still waits for, by unit."""
        units = self._tasks.get(task)
        if units is None:
            units = self._tasks[task] = {}
            at_end_of_backward(lambda: self._end(task))
        return units

    @outside_modes
    def _end(self, task: int) -> None:
        for unit in self._tasks.pop(task, {}):
            self._events.completed(unit)
        if not self._tasks:
            self._events.backward_over()

    def drain(self) -> None:
        """Forget graph tasks that an exception ended: autograd does not report their end."""
        self._tasks.clear()


def _accumulate_node(param: nn.Parameter) -> Any:
    with torch.enable_grad(), plain():
        return torch.autograd.graph.get_gradient_edge(param).node


class GradientSums:
    """fp32 sums of each unit's gradients, slot by slot.

    Knows the sums since the last step; not when gradients come, nor where they go."""

    def __init__(self) -> None:
        self._sums: dict[int, list[Tensor | None]] = {}  # by unit. freed by: take(), clear()

    def __contains__(self, unit: int) -> bool:
        """Whether the unit has a sum."""
        return unit in self._sums

    def slots(self, unit: int) -> set[int]:
        """The unit's slots that have a sum."""
        return {slot for slot, held in enumerate(self._sums.get(unit, ())) if held is not None}

    def add(self, unit: ParamUnit, grads: Sequence[Tensor | None]) -> None:
        """Add one backward's gradients: one per slot in the parameter's shape, of any dtype; None adds nothing."""
        sums = self._sums.setdefault(unit.index, [None] * len(grads))
        for i, grad in enumerate(grads):
            if grad is not None:
                held = sums[i]
                sums[i] = grad.float() if held is None else held.add_(grad)

    def take(self, unit: ParamUnit) -> list[Tensor | None]:
        """Remove and return a unit's sums, one per slot, in the unit's dtype. The unit must have some."""
        return [s if s is None else s.to(unit.layout.dtype) for s in self._sums.pop(unit.index)]

    def clear(self) -> None:
        self._sums.clear()
