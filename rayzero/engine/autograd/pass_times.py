"""Times a rank's forward and backward by unit: always as sums, and as spans while a trace is wanted.

[Note: backward by unit] Torch does not report when autograd begins with a unit. A unit's time runs from the completion
of the unit before it (for the first one: from the end of the forward, or from the first weight that autograd unpacked)
to its own completion. In a chain of layers that is its backward; where branches meet, it includes some of theirs.

[Note: time by layer] Sums leave out what a layer waited for, and the time of unit modules inside it, so layers do not
count a second twice. A module with several units counts under the first of them. These are the host's seconds: on CUDA
they are what issuing the kernels took, and whatever the host waited for in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from rayzero.engine.private_torch import graph_task_id
from rayzero.engine.step_clock import StepClock
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.telemetry.spans import Spans
from rayzero.telemetry.stats import Tally


class PassTimes:
    """Times a rank's passes, on the computing thread.

    Knows when modules' forwards began and units' gradients were complete; not what they compute."""

    def __init__(self, num_units: int, waits: StepClock, spans: Spans) -> None:
        """``waits``: has the open step's number, and the seconds that the rank has waited."""
        self._waits = waits
        self._spans = spans
        self._opened: list[list[float]] = []  # running calls, outermost first: [began, waited before, time of others]
        self._since = perf_counter()  # backward has been working on the next unit
        self._waited = waits.waiting  # until then
        self._in_backward = False
        self._graph_in = -1  # the last step in which a module's forward ran with grad
        self.forward = [Tally() for _ in range(num_units)]
        self.backward = [Tally() for _ in range(num_units)]
        self.forwards = self.backwards = 0

    def restart(self) -> None:
        """Add up from now on."""
        for tally in (*self.forward, *self.backward):
            tally.restart()
        self.forwards = self.backwards = 0

    def opened(self, *, forward: bool) -> None:
        """Units are up, and something begins to compute. ``forward``: a module's; else an operation on parameters."""
        if forward and torch.is_grad_enabled():
            self._graph_in = self._waits.step
        self._opened.append([perf_counter(), self._waits.waiting, 0.0])

    @property
    def may_have_graph(self) -> bool:
        """Whether autograd may have saved something in a module's forward of the open step."""
        return self._graph_in == self._waits.step

    def closed(self, units: Sequence[ParamUnit], in_forward: bool) -> None:
        """The module has ended. ``in_forward``: the model's own forward is running."""
        began, waited, others = self._opened.pop()
        if not units:
            return
        now = perf_counter()
        active = now - began - (self._waits.waiting - waited)
        if self._opened:
            self._opened[-1][2] += active
        recomputed = graph_task_id() >= 0
        if in_forward and not recomputed:
            self.forward[units[0].index].add(active - others)
        if self._spans.wanted:
            lane = "backward" if recomputed else "forward" if in_forward else "touch"
            self._spans.add(lane, ", ".join(unit.name for unit in units), began, now, self._waits.step)

    def end_forward(self) -> None:
        self.forwards += graph_task_id() < 0  # a recomputation is part of its backward
        self._mark(perf_counter())

    def begin_backward(self) -> None:
        """Autograd unpacks a weight or delivers a gradient, for the first time in this pass or again."""
        if not self._in_backward:
            self._in_backward = True
            self._mark(perf_counter())

    def completed(self, unit: ParamUnit) -> None:
        """The unit has all gradients that this pass brings."""
        self._in_backward = True
        now = perf_counter()
        self.backward[unit.index].add(now - self._since - (self._waits.waiting - self._waited))
        if self._spans.wanted:
            self._spans.add("backward", unit.name, self._since, now, self._waits.step)
        self._mark(now)

    def end_backward(self) -> None:
        self._in_backward = False
        self.backwards += 1

    def _mark(self, now: float) -> None:
        self._since, self._waited = now, self._waits.waiting
