"""When a unit's gradients are complete: they are taken off the Parameters and leave.

[Note: completion] A hook after the AccumulateGrad node of each parameter runs after the user's own hooks, also where
no gradient came. At a unit's first gradient in a graph task autograd is asked which of its parameters this backward
will reach; when the last of those has come, the unit is complete. What is still open at the end of the graph task
is completed there. A reentrant checkpoint runs graph tasks inside graph tasks, so one backward may complete a unit
several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rayzero.engine.private_torch import at_end_of_backward, graph_task_id, will_execute
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.tensor_metadata import plain

Trained = Sequence[tuple[ParamUnit, Sequence[int]]]  # units and their slots that an optimizer trains


class GradientCollector:
    """Sees gradients arrive and says when a unit has all it gets.

    Knows AccumulateGrad nodes and graph tasks; not what becomes of gradients, nor steps. Graph tasks may run in
    autograd's own threads, one at a time for a rank."""

    def __init__(self, complete: Callable[[ParamUnit], None], over: Callable[[bool], None]) -> None:
        """``complete(unit)``: its gradients are on the Parameters. ``over(nested)``: a graph task has
        ended well; nested in another, or not."""
        self._complete = complete
        self._over = over
        self._nodes: dict[ParamUnit, dict[int, Any]] = {}  # by slot; held, else autograd makes new ones, not hooked
        self._tasks: dict[int, dict[ParamUnit, set[int]]] = {}  # graph task -> unit -> slots still to come

    def watch(self, trained: Trained) -> None:
        """Put the hooks on, once for a slot, after the Parameters have their final dtype and storage."""
        for unit, slots in trained:
            nodes = self._nodes.setdefault(unit, {})
            for slot in slots:
                node = nodes[slot] = _accumulate_node(unit.params[slot])
                node.register_hook(self._hook(unit, slot, nodes))

    def _hook(self, unit: ParamUnit, slot: int, nodes: dict[int, Any]) -> Callable[..., None]:
        def after_accumulate(*_: Any) -> None:
            task = graph_task_id()
            units = self._tasks.get(task) or self.join(task)
            coming = units.get(unit)
            if coming is None:
                coming = units[unit] = {other for other, node in nodes.items() if will_execute(node)}
            coming.discard(slot)
            if not coming:
                del units[unit]
                self._complete(unit)

        return after_accumulate

    def join(self, task: int) -> dict[ParamUnit, set[int]]:
        """Be told of the end of the graph task, which is running; returns what it still waits for."""
        units = self._tasks.get(task)
        if units is None:
            units = self._tasks[task] = {}
            at_end_of_backward(lambda: self._end(task))
        return units

    def _end(self, task: int) -> None:
        for unit in self._tasks.pop(task, {}):
            self._complete(unit)
        self._over(bool(self._tasks))

    def drain(self) -> None:
        """Forget graph tasks that an exception ended: their end is never called."""
        self._tasks.clear()


def _accumulate_node(param: nn.Parameter) -> Any:
    with torch.enable_grad(), plain():
        return torch.autograd.graph.get_gradient_edge(param).node
