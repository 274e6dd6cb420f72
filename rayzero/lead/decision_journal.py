"""The journal of decisions: records them, keeps the latest for later queries, and reports them as metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from rayzero.lead.decide import clip_factor, unscaling
from rayzero.protocol.messages import Action, Decision, Edit, Record
from rayzero.telemetry.names import (
    CLIP_FACTOR,
    CLIPPED_STEPS,
    DECIDED_STEPS,
    GRAD_NORM,
    LOSS_SCALE,
    SKIPPED_STEPS,
)
from rayzero.telemetry.recorder import Recorder

_KEPT = 8  # decisions kept for later queries
_ROUNDING = 1e-9  # rounding of a clip factor that is 1


class DecisionRecord(Protocol):
    """Keeps decisions where they outlive this process."""

    def record(self, record: Record) -> None:
        """Keep a record; returns once it is kept."""
        ...

    def records(self) -> Sequence[Record]:
        """What a former life of the lead has left, by step."""
        ...


class DecisionJournal:
    """The latest decisions, and the futures that wait for the next ones.

    Knows what was decided; not how, or who acts on it. Only one thread at a time may call it."""

    def __init__(self, record: DecisionRecord | None) -> None:
        """``record``: None if decisions end with this process."""
        self._record = record
        self._records: dict[int, Record] = {}  # by step
        self._waiting: dict[int, list[Future[Decision]]] = {}  # by step

    def restore(self) -> list[Record]:
        """Take over what a former life of the lead has recorded; returns it, by step."""
        found = [] if self._record is None else list(self._record.records())
        self._records = {record.decision.step: record for record in found}
        return found

    def write(self, record: Record) -> None:
        """The commit point: from here on the step is decided."""
        if self._record is not None:
            self._record.record(record)
        self._records[record.decision.step] = record
        self._records.pop(record.decision.step - _KEPT, None)

    def record(self, step: int) -> Record | None:
        """What is recorded of ``step``; None if it is not decided yet or no longer kept."""
        return self._records.get(step)

    @property
    def records(self) -> list[Record]:
        """What is kept, by step."""
        return [self._records[step] for step in sorted(self._records)]

    def decision(self, step: int) -> Decision | None:
        """The decision of ``step``; None if it is not made yet or no longer kept."""
        found = self._records.get(step)
        return None if found is None else found.decision

    def wait(self, step: int) -> Future[Decision]:
        """A future of the decision of ``step``."""
        future: Future[Decision] = Future()
        self._waiting.setdefault(step, []).append(future)
        return future

    def take_waiting(self, step: int) -> list[Future[Decision]]:
        """Remove and return the futures that wait for ``step``, to answer them."""
        return self._waiting.pop(step, [])

    def take_all(self) -> list[Future[Decision]]:
        """Remove and return every future that waits: no further step will be decided."""
        waiting, self._waiting = self._waiting, {}
        return [future for futures in waiting.values() for future in futures]


def tell_decision(recorder: Recorder, decision: Decision, edits: Sequence[Edit], world_size: int) -> None:
    """Report a decision, and the ranks' edits of its gradients, as metrics. Only the lead does, so each value exists
    once per run."""
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
