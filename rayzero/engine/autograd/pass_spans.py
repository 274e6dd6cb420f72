"""Records a rank's forward and backward for traces: a span per module call, and one per unit in backward.

[Note: backward in a trace] Torch does not report when autograd begins with a unit. A unit's span runs from the
completion of the unit before it (for the first one: from the end of the forward, or from the first weight that autograd
unpacked) to its own completion. In a chain of layers that is its backward; where branches meet, it includes some of
theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rayzero.engine.private_torch import graph_task_id
from rayzero.engine.units.param_unit import ParamUnit
from rayzero.telemetry.spans import Spans

Clock = Callable[[], float]


class PassSpans:
    """Records a rank's passes, on the computing thread.

    Knows when modules' forwards began; not what they compute."""

    def __init__(self, spans: Spans, step: Callable[[], int], clock: Clock = time.perf_counter) -> None:
        """``step()``: the number of the open step."""
        self._spans = spans
        self._step = step
        self._clock = clock
        self._opened: list[float] = []  # running calls, outermost first
        self._since = clock()  # backward has been working on the next unit
        self._in_backward = False

    def opened(self) -> None:
        """A module's units are up; it begins to compute."""
        self._opened.append(self._clock() if self._spans.wanted else 0.0)

    def closed(self, units: Sequence[ParamUnit], in_forward: bool) -> None:
        """The module has ended. ``in_forward``: the model's own forward is running."""
        began = self._opened.pop()
        if units and began:
            lane = "backward" if graph_task_id() >= 0 else "forward" if in_forward else "touch"
            self._add(lane, ", ".join(unit.name for unit in units), began)

    def end_forward(self) -> None:
        """The model's forward has ended."""
        self._since = self._clock()

    def begin_backward(self) -> None:
        """Autograd unpacks a weight or delivers a gradient, for the first time in this pass or again."""
        if not self._in_backward:
            self._in_backward, self._since = True, self._clock()

    def completed(self, unit: ParamUnit) -> None:
        """The unit has all gradients that this pass brings."""
        self._in_backward = True
        if self._spans.wanted:
            self._add("backward", unit.name, self._since)
        self._since = self._clock()

    def end_backward(self) -> None:
        """The pass has ended."""
        self._in_backward = False

    def _add(self, lane: str, name: str, began: float) -> None:
        self._spans.add(lane, name, began, self._clock(), self._step())
