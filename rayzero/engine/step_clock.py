"""Where a rank's step goes: one stopwatch that always runs, in one phase or another.

[Note: phases] Every moment from one step() to the next is in exactly one phase, so phases add up to the step. A wait is
taken out of the phase that it interrupts and is one of its own. Backward begins with the first weight or gradient that
autograd touches: the loss and what comes before belong to forward. What the loop does between passes is "data".
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rayzero.telemetry.names import (
    EXPOSED_WAIT_SECONDS,
    LAST_STEP_TIMESTAMP,
    OVERLAP_RATIO,
    STEP,
    STEP_PHASE_SECONDS,
    STEP_SECONDS,
)
from rayzero.telemetry.recorder import Recorder

PHASES = ("data", "forward", "backward", "grad_push", "norm", "optimizer", "fetch_wait", "checkpoint")
_WAITS = {  # cause -> phase
    "fetch": "fetch_wait",
    "optimizer": "optimizer",
    "push": "grad_push",
    "norm": "norm",
    "mean": "data",  # the loop's own business, wherever it asks
}


class StepClock:
    """One rank's time. Told of phases and waits by whoever knows, on the thread that computes or one that it waits for.

    Knows seconds; not what happens in them."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float] = time.perf_counter, *, step: int = 0) -> None:
        """``step``: the one that is built first."""
        self._recorder = recorder
        self._clock = clock
        self._step = step
        self._phase = "data"
        self._began = self._since = self._entered = clock()
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._committed: float | None = None  # when the last step was
        self._published = 0.0  # when the newest of its weights were
        self._exposed = 0.0  # seconds waited for them

    def enter(self, phase: str) -> None:
        """From now on it is this phase."""
        now = self._clock()
        self._spent[self._phase] += now - self._since
        if phase != self._phase:
            self._recorder.spans.add("step", self._phase, self._entered, now, self._step)
            self._entered = now
        self._phase, self._since = phase, now

    def waited(self, cause: str, seconds: float, *, ago: float = 0.0) -> None:
        """For ``seconds``, until ``ago`` seconds before now, there was a wait. ``cause``: a key of ``_WAITS``."""
        self._recorder.add(EXPOSED_WAIT_SECONDS, seconds, cause=cause)
        if self._recorder.spans.wanted:
            end = self._clock() - ago
            self._recorder.spans.add("wait", cause, end - seconds, end, self._step)
        self._spent[self._phase] -= seconds
        self._spent[_WAITS[cause]] += seconds
        if cause == "optimizer":
            self._exposed += seconds

    def committing(self) -> None:
        """The step's update is asked for now: the last one's overlap is known."""
        now = self._clock()
        total = 0.0 if self._committed is None else self._published - self._committed
        if total > 0:
            self._recorder.set(OVERLAP_RATIO, 1 - min(1.0, self._exposed / total))
        self._committed, self._exposed = now, 0.0

    def published(self) -> None:
        """Some weights of the new version are there; from any thread."""
        self._published = self._clock()

    def step_over(self, steps: int) -> None:
        """step() returns; ``steps``: committed so far."""
        self.enter("data")
        for phase, seconds in self._spent.items():
            self._recorder.observe(STEP_PHASE_SECONDS, max(0.0, seconds), phase=phase)
        self._recorder.observe(STEP_SECONDS, self._since - self._began)
        self._recorder.set(STEP, steps)
        self._recorder.set(LAST_STEP_TIMESTAMP, time.time())
        self._began, self._step = self._since, steps
        self._spent = dict.fromkeys(PHASES, 0.0)
