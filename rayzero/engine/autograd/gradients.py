"""Finds out when a unit's gradients are complete, so that they can leave the Parameters.

[Note: completion] A hook after each parameter's AccumulateGrad node runs after the user's own hooks, even if no
gradient came. At a unit's first gradient in a graph task we ask autograd which of its parameters this backward will
reach; when the last of those has its gradient, the unit is complete. Units that are still open at the end of the graph
task are completed there. A reentrant checkpoint runs graph tasks inside graph tasks, so one backward may complete a
unit several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rayzero.engine.private_torch import at_end_of_backward, graph_task_id, will_execute
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.modes import outside_modes
from rayzero.tensor_metadata import plain

Trained = Sequence[tuple[ParamUnit, Sequence[int]]]  # each unit, with its slots that an optimizer trains


class GradientCollector:
    """Watches gradients arrive and reports when a unit has all that this backward brings.

    Knows AccumulateGrad nodes and graph tasks; not what becomes of gradients, nor steps. Graph tasks may run in
    autograd's own threads, one at a time for a rank."""

    def __init__(self, complete: Callable[[ParamUnit], None], over: Callable[[bool], None]) -> None:
        """``complete(unit)``: all its gradients are on the Parameters. ``over(nested)``: a graph task has ended without
        an exception; ``nested``: inside another one."""
        self._complete = complete
        self._over = over
        self._nodes: dict[ParamUnit, dict[int, Any]] = {}  # by slot; kept: autograd would make new ones, not hooked
        self._tasks: dict[int, dict[ParamUnit, set[int]]] = {}  # graph task -> unit -> slots still to come

    def watch(self, trained: Trained) -> None:
        """Put the hooks on, once for a slot, after the Parameters have their final dtype and storage."""
        for unit, slots in trained:
            nodes = self._nodes.setdefault(unit, {})
            for slot in slots:
                node = nodes[slot] = _accumulate_node(unit.params[slot])
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
                self._complete(unit)

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
            self._complete(unit)
        self._over(bool(self._tasks))

    def drain(self) -> None:
        """Forget graph tasks that an exception ended: autograd does not report their end."""
        self._tasks.clear()


def _accumulate_node(param: nn.Parameter) -> Any:
    with torch.enable_grad(), plain():
        return torch.autograd.graph.get_gradient_edge(param).node
