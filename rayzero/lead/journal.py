"""The decisions that were made: recorded, kept for those who ask, and measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from rayzero.lead.decide import clip_factor, unscaling
from rayzero.protocol.messages import Action, Decision, Edit
from rayzero.telemetry.names import (
    CLIP_FACTOR,
    CLIPPED_STEPS,
    DECIDED_STEPS,
    GRAD_NORM,
    LOSS_SCALE,
    SKIPPED_STEPS,
)
from rayzero.telemetry.recorder import Recorder

_KEPT = 8  # decisions kept for those who ask
_ROUNDING = 1e-9  # of a clip factor that is 1


class DecisionRecord(Protocol):
    """Keeps decisions where they outlive this process."""

    def record(self, decision: Decision) -> None:
        """Returns once the decision is kept."""
        ...


class DecisionJournal:
    """The latest decisions, and who waits for the next ones.

    Knows what was decided; not how, or who has to act on it. One thread at a time calls it."""

    def __init__(self, record: DecisionRecord | None) -> None:
        """``record``: None where decisions end with this process."""
        self._record = record
        self._decisions: dict[int, Decision] = {}  # by step
        self._waiting: dict[int, list[Future[Decision]]] = {}  # by step

    def write(self, decision: Decision) -> None:
        """The commit point: from here on the step is decided so."""
        if self._record is not None:
            self._record.record(decision)
        self._decisions[decision.step] = decision
        self._decisions.pop(decision.step - _KEPT, None)

    def decision(self, step: int) -> Decision | None:
        """What was decided for ``step``; None before that, and long after."""
        return self._decisions.get(step)

    def wait(self, step: int) -> Future[Decision]:
        """What will be decided for ``step``."""
        future: Future[Decision] = Future()
        self._waiting.setdefault(step, []).append(future)
        return future

    def take_waiting(self, step: int) -> list[Future[Decision]]:
        """Take out those who wait for ``step``, to answer them."""
        return self._waiting.pop(step, [])

    def take_all(self) -> list[Future[Decision]]:
        """Take out everyone who waits: nothing will be decided any more."""
        waiting, self._waiting = self._waiting, {}
        return [future for futures in waiting.values() for future in futures]


def tell_decision(recorder: Recorder, decision: Decision, edits: Sequence[Edit], world_size: int) -> None:
    """What a step was decided to be, of gradients that ranks edited so; the lead alone tells it: once a run."""
    recorder.add(DECIDED_STEPS)
    recorder.set(GRAD_NORM, decision.norm)
    back = unscaling(edits)
    recorder.set(LOSS_SCALE, 1 / back if back else math.inf)
    recorder.add(SKIPPED_STEPS, decision.action is Action.SKIP, reason="nonfinite")
    if decision.action is Action.SKIP:
        return
    factor = clip_factor(decision, edits, world_size)
    recorder.set(CLIP_FACTOR, factor)
    recorder.add(CLIPPED_STEPS, factor < 1 - _ROUNDING)
