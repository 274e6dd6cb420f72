"""A rank's forward and backward as a trace shows them: per module call, and per unit whose gradients are complete.

[Note: backward in a trace] Nobody tells when autograd begins with a unit. Its span is from the completion of the unit
before (the end of the forward, or the first weight that autograd wanted, for the first one) to its own: in a model of
one layer after the other that is its backward; where branches meet, some of theirs is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rayzero.engine.private_torch import graph_task_id
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.telemetry.spans import Spans

Clock = Callable[[], float]


class PassSpans:
    """Told of a rank's passes on the thread that computes.

    Knows when modules' forwards began; not what they compute."""

    def __init__(self, spans: Spans, step: Callable[[], int], clock: Clock = time.perf_counter) -> None:
        """``step()``: the one that is being built."""
        self._spans = spans
        self._step = step
        self._clock = clock
        self._opened: list[float] = []  # calls under way, outermost first
        self._since = clock()  # backward has been with the unit that comes next
        self._in_backward = False

    def opened(self) -> None:
        """A module's units are up: it computes now."""
        self._opened.append(self._clock() if self._spans.wanted else 0.0)

    def closed(self, units: Sequence[ParamUnit], in_forward: bool) -> None:
        """It has ended. ``in_forward``: of the whole model."""
        began = self._opened.pop()
        if units and began:
            lane = "backward" if graph_task_id() >= 0 else "forward" if in_forward else "touch"
            self._add(lane, ", ".join(unit.name for unit in units), began)

    def end_forward(self) -> None:
        """The model's forward has ended."""
        self._since = self._clock()

    def begin_backward(self) -> None:
        """Autograd wants something: for the first time in this pass, or again."""
        if not self._in_backward:
            self._in_backward, self._since = True, self._clock()

    def completed(self, unit: ParamUnit) -> None:
        """A unit has all gradients that this pass brings."""
        self._in_backward = True
        if self._spans.wanted:
            self._add("backward", unit.name, self._since)
        self._since = self._clock()

    def end_backward(self) -> None:
        """The pass has ended."""
        self._in_backward = False

    def _add(self, lane: str, name: str, began: float) -> None:
        self._spans.add(lane, name, began, self._clock(), self._step())
