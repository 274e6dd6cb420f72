"""What a rank has asked the lead, and what it was answered, for the lead's successor.

[Note: asked or answered] A rank asks again what it has had no answer to. What it has had an answer to it does not ask
again, but other ranks may still wait for the same answer: so the successor of a lead has to know it.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from rayzero.errors import RayZeroError
from rayzero.protocol.messages import (
    BegunSave,
    CheckpointInfo,
    Decision,
    EndedSave,
    FinishReport,
    MeanInput,
    Norm,
    StepInputs,
    Told,
    ToldAttempt,
    ToldStep,
    Write,
)

_MEANS = 8  # a rank makes its means one after the other, so that the last one would do


class LeadHistory:
    """Notes a rank's calls to the lead, each before it is sent, and the answers as they come. Thread-safe.

    Knows calls and answers; not how they travel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, ToldStep] = {}  # freed by: a later step's norm, or the decision
        self._means: dict[int, MeanInput] = {}  # by number
        self._saved: EndedSave | None = None
        self._begun: BegunSave | None = None

    def told(self) -> Told:
        """All of it."""
        with self._lock:
            steps = tuple(self._steps[step] for step in sorted(self._steps))
            return Told(steps=steps, means=tuple(self._means.items()), saved=self._saved, begun=self._begun)

    # ---- calls

    def finish(self, report: FinishReport, inputs: StepInputs | None) -> None:
        """The rank asks for a norm."""
        with self._lock:
            step = self._step(report.step)
            kept = ToldAttempt() if report.clamp is None else step.attempt
            attempt = replace(kept, reports=(*kept.reports, report), inputs=inputs)
            self._steps[report.step] = replace(step, attempt=attempt)

    def commit(self, step: int, inputs: StepInputs) -> None:
        """The rank commits a step that it has finished."""
        with self._lock:
            told = self._step(step)
            self._steps[step] = replace(told, attempt=replace(told.attempt, inputs=inputs))

    def mean(self, number: int, given: MeanInput) -> None:
        """The rank asks for a mean."""
        with self._lock:
            self._means[number] = given
            self._means.pop(number - _MEANS, None)

    def _step(self, step: int) -> ToldStep:
        return self._steps.get(step) or ToldStep(step=step)

    # ---- answers: each is noted before the call that waits for it returns

    def normed(self, norm: Norm) -> Norm:
        """A norm of a step is here, so the steps before are decided."""
        with self._lock:
            told = self._step(norm.step)
            attempt = replace(told.attempt, norms=(*told.attempt.norms, norm))
            self._steps = {step: each for step, each in self._steps.items() if step > norm.step}
            self._steps[norm.step] = replace(told, attempt=attempt)
        return norm

    def decided(self, decision: Decision) -> Decision:
        """A step is decided."""
        with self._lock:
            self._steps = {step: each for step, each in self._steps.items() if step > decision.step}
        return decision

    def discarded(self, step: int) -> None:
        """The present attempt at a step is discarded."""
        with self._lock:
            told = self._step(step)
            self._steps[step] = replace(told, discards=told.discards + 1, discarded=told.attempt, attempt=ToldAttempt())

    def written(self, write: Write) -> None:
        """A write is made, so the steps before are decided."""
        with self._lock:
            told = self._step(write.version)
            self._steps = {step: each for step, each in self._steps.items() if step > write.version}
            self._steps[write.version] = replace(told, written=(*told.written, write))

    def begun(self, number: int, step: int, directory: Path) -> None:
        """A save has begun, and the training goes on."""
        with self._lock:
            self._begun = BegunSave(number=number, step=step, directory=str(directory))

    def saved(self, number: int, step: int, directory: Path, outcome: CheckpointInfo | RayZeroError) -> None:
        """A save has ended."""
        with self._lock:
            self._saved = EndedSave(number=number, step=step, directory=str(directory), outcome=outcome)
