"""Measures where a rank's step time goes: one stopwatch that always runs, always in exactly one phase. And which
units it goes to in forward and backward: always as sums, and as spans while a trace is wanted.

Metrics get a step's seconds when it ends. ``rayzero.stats`` reads what the stopwatch has added up until now.

[Note: phases] Every moment from one step() to the next is in exactly one phase, so phases add up to the step. A wait is
a phase of its own, taken out of the phase that it interrupts. Backward begins with the first weight or gradient that
autograd touches; the loss still belongs to forward. The loop's work between passes is "data".

[Note: backward by unit] Torch does not report when autograd begins with a unit. A unit's time runs from the completion
of the unit before it (for the first one: from the end of the forward, or from the first weight that autograd unpacked)
to its own completion. In a chain of layers that is its backward; where branches meet, it includes some of theirs.

[Note: time by layer] Sums leave out what a layer waited for, and the time of unit modules inside it, so layers do not
count a second twice. A module with several units counts under the first of them. These are the host's seconds: on CUDA
they are what issuing the kernels took, and whatever the host waited for in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, time
from typing import Protocol

import torch
from torch import Tensor

from rayzero.engine.private_torch import graph_task_id
from rayzero.layout.model_layout import UnitLayout
from rayzero.protocol.messages import MeanInput
from rayzero.telemetry.names import (
    EXPOSED_WAIT_SECONDS,
    LAST_STEP_TIMESTAMP,
    OVERLAP_RATIO,
    SAMPLES,
    STEP,
    STEP_PHASE_SECONDS,
    STEP_SECONDS,
    TOKENS,
)
from rayzero.telemetry.recorder import Recorder
from rayzero.telemetry.spans import Spans
from rayzero.telemetry.stats import Tally

PHASES = ("data", "forward", "backward", "grad_push", "norm", "optimizer", "fetch_wait", "checkpoint")
_WAITS = {  # cause -> phase
    "fetch": "fetch_wait",
    "optimizer": "optimizer",
    "push": "grad_push",
    "norm": "norm",
    "mean": "data",  # the loop's own waits, in any phase
}
_NEWEST = 0.1  # weight of a step's rate in the moving average


@dataclass(slots=True)
class TokenRate:
    """Tokens of this rank's steps, as the loop counts them: a step's rate is its tokens over its seconds."""

    tokens: int = 0
    seconds: float = 0.0  # of the steps that had tokens
    peak: float | None = None  # tokens per second of the fastest step
    average: float | None = None  # moving: a new step counts a tenth
    _open: int = 0  # tokens of the open step

    def count(self, tokens: int) -> None:
        """The open step trains on so many more."""
        self._open += tokens

    def step_over(self, seconds: float) -> None:
        """The open step took ``seconds``."""
        if not self._open or seconds <= 0:
            return
        rate = self._open / seconds
        self.tokens, self.seconds, self._open = self.tokens + self._open, self.seconds + seconds, 0
        self.peak = rate if self.peak is None else max(self.peak, rate)
        self.average = rate if self.average is None else self.average + _NEWEST * (rate - self.average)


class LoopMoments(Protocol):
    """Takes the loop's state at the moments of a step: see [Note: two moments] in loop/keeper.py."""

    returning: bool  # the rank has come back to a step's state, and has not begun its first forward
    repeating: bool  # see RankContext.repeating

    def committing(self, step: int) -> None:
        """``step`` is committed next."""
        ...

    def tracking(self) -> None:
        """The loop has called ``track``."""
        ...

    def begin_forward(self) -> None: ...

    def dropping(self) -> None:
        """Gradients are dropped with whose norm other ranks have gone on."""
        ...

    def sending(self, unit: int, kind: str, values: Tensor) -> bool:
        """Whether the owners get a write; else they have it from a former life of the rank. ``values``: 1D, unit.numel
        elements, host memory."""
        ...

    def mean(self, given: MeanInput) -> tuple[float, ...]:
        """See ``ParameterStore.mean``. Waits."""
        ...


class StepClock:
    """One rank's stopwatch. Phases and waits are reported to it on the computing thread, or on a thread that it waits
    for.

    Knows seconds; not what happens in them."""

    def __init__(self, recorder: Recorder, *, step: int = 0) -> None:
        """``step``: the number of the first step."""
        self._recorder = recorder
        self.step = step  # the open one
        self._phase = "data"
        self._began = self._since = self._entered = perf_counter()
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._committed: float | None = None  # when the last step was
        self._published = 0.0  # when the newest of its weights were published
        self._exposed = 0.0  # seconds waited for them
        self.waiting = 0.0  # seconds that the host was blocked; only grows
        self.restart()

    def restart(self) -> None:
        """Add up from now on. The open step counts whole when it ends."""
        now = self._restarted = perf_counter()
        self._spent_before = {phase: -seconds for phase, seconds in self._spending(now).items()}
        self.steps = Tally()
        self.waits = {cause: Tally() for cause in _WAITS}
        self.rate = TokenRate()
        self.update_seconds = self.exposed_seconds = 0.0  # of updates: from commit to publication, and waited for

    def read(self) -> tuple[float, dict[str, float]]:
        """Seconds since the last restart, and the same by phase, the open step's included."""
        now = perf_counter()
        spending = self._spending(now)
        return now - self._restarted, {phase: self._spent_before[phase] + spending[phase] for phase in PHASES}

    def _spending(self, now: float) -> dict[str, float]:
        """Seconds of the open step by phase until ``now``."""
        return {phase: seconds + (now - self._since) * (phase == self._phase) for phase, seconds in self._spent.items()}

    def count(self, tokens: int, samples: int) -> None:
        """The open step trains on so many tokens and samples."""
        self._recorder.add(TOKENS, tokens)
        self._recorder.add(SAMPLES, samples)
        self.rate.count(tokens)

    def enter(self, phase: str) -> None:
        now = perf_counter()
        self._spent[self._phase] += now - self._since
        if phase != self._phase:
            self._recorder.spans.add("step", self._phase, self._entered, now, self.step)
            self._entered = now
        self._phase, self._since = phase, now

    def waited(self, cause: str, seconds: float) -> None:
        """Record a wait of ``seconds`` that ends now. ``cause``: a key of ``_WAITS``."""
        self.exposed(cause, seconds)
        self.blocked(cause, seconds)

    def exposed(self, cause: str, seconds: float) -> None:
        """The computation stood for ``seconds``, which a device may tell later."""
        self._recorder.add(EXPOSED_WAIT_SECONDS, seconds, cause=cause)
        self.waits[cause].add(seconds)
        if cause == "optimizer":
            self._exposed += seconds

    def blocked(self, cause: str, seconds: float, *, ago: float = 0.0) -> None:
        """The host was blocked for ``seconds``, until ``ago`` seconds before now: no phase of its step has them."""
        self.waiting += seconds
        if self._recorder.spans.wanted:
            end = perf_counter() - ago
            self._recorder.spans.add("wait", cause, end - seconds, end, self.step)
        self._spent[self._phase] -= seconds
        self._spent[_WAITS[cause]] += seconds

    def committing(self) -> None:
        """The step is committed now, so the overlap of the last update is known."""
        now = perf_counter()
        total = 0.0 if self._committed is None else self._published - self._committed
        if total > 0:
            self._recorder.set(OVERLAP_RATIO, 1 - min(1.0, self._exposed / total))
            self.update_seconds += total
            self.exposed_seconds += min(total, self._exposed)
        self._committed, self._exposed = now, 0.0

    def published(self) -> None:
        """Some weights of the new version are published. Any thread may call it."""
        self._published = perf_counter()

    def step_over(self, steps: int) -> None:
        """step() returns. ``steps``: steps committed so far."""
        self.enter("data")
        for phase, seconds in self._spent.items():
            self._recorder.observe(STEP_PHASE_SECONDS, max(0.0, seconds), phase=phase)
            self._spent_before[phase] += seconds
        took = self._since - self._began
        self._recorder.observe(STEP_SECONDS, took)
        self.steps.add(took)
        self.rate.step_over(took)
        self._recorder.set(STEP, steps)
        self._recorder.set(LAST_STEP_TIMESTAMP, time())
        self._began, self.step = self._since, steps
        self._spent = dict.fromkeys(PHASES, 0.0)


class PassTimes:
    """Times a rank's passes, on the computing thread.

    Knows when modules' forwards began and units' gradients were complete; not what they compute."""

    def __init__(self, units: Sequence[UnitLayout], clock: StepClock, spans: Spans) -> None:
        self._names = [unit.name for unit in units]
        self._clock = clock
        self._spans = spans
        self._opened: list[list[float]] = []  # running calls, outermost first: [began, waited before, time of others]
        self._since = perf_counter()  # backward has been working on the next unit
        self._waited = clock.waiting  # until then
        self._in_backward = False
        self._graph_in = -1  # the last step in which a module's forward ran with grad
        self.forward = [Tally() for _ in units]
        self.backward = [Tally() for _ in units]
        self.forwards = self.backwards = 0

    def restart(self) -> None:
        """Add up from now on."""
        for tally in (*self.forward, *self.backward):
            tally.restart()
        self.forwards = self.backwards = 0

    def opened(self, *, forward: bool) -> None:
        """Units are up, and something begins to compute. ``forward``: a module's; else an operation on parameters."""
        if forward and torch.is_grad_enabled():
            self._graph_in = self._clock.step
        self._opened.append([perf_counter(), self._clock.waiting, 0.0])

    @property
    def may_have_graph(self) -> bool:
        """Whether autograd may have saved something in a module's forward of the open step."""
        return self._graph_in == self._clock.step

    def closed(self, units: Sequence[int], in_forward: bool) -> None:
        """The module has ended. ``in_forward``: the model's own forward is running."""
        began, waited, others = self._opened.pop()
        if not units:
            return
        now = perf_counter()
        active = now - began - (self._clock.waiting - waited)
        if self._opened:
            self._opened[-1][2] += active
        recomputed = graph_task_id() >= 0
        if in_forward and not recomputed:
            self.forward[units[0]].add(active - others)
        if self._spans.wanted:
            lane = "backward" if recomputed else "forward" if in_forward else "touch"
            self._spans.add(lane, ", ".join(self._names[unit] for unit in units), began, now, self._clock.step)

    def end_forward(self) -> None:
        self.forwards += graph_task_id() < 0  # a recomputation is part of its backward
        self._mark(perf_counter())

    def begin_backward(self) -> None:
        """Autograd unpacks a weight or delivers a gradient, for the first time in this pass or again."""
        self._clock.enter("backward")
        if not self._in_backward:
            self._in_backward = True
            self._mark(perf_counter())

    def completed(self, unit: int) -> None:
        """The unit has all gradients that this pass brings."""
        self._clock.enter("backward")
        self._in_backward = True
        now = perf_counter()
        self.backward[unit].add(now - self._since - (self._clock.waiting - self._waited))
        if self._spans.wanted:
            self._spans.add("backward", self._names[unit], self._since, now, self._clock.step)
        self._mark(now)

    def end_backward(self) -> None:
        self._clock.enter("data")
        self._in_backward = False
        self.backwards += 1

    def _mark(self, now: float) -> None:
        self._since, self._waited = now, self._clock.waiting
