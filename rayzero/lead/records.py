"""Decisions that were made, for those who ask, and those who ask before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from rayzero.protocol.messages import Decision

_KEPT = 8  # decisions kept for those who ask


class Records:
    """The latest decisions, and who waits for the next.

    Knows what was decided; not how, or who has to act on it. Called under the lead's lock, ``of`` from any thread."""

    def __init__(self, record: Callable[[Decision], None] | None) -> None:
        """``record`` keeps each decision where it outlives this process."""
        self._record = record
        self._decisions: dict[int, Decision] = {}  # by step
        self._askers: dict[int, list[Future[Decision]]] = {}  # by step

    def write(self, decision: Decision) -> None:
        """The commit point: from here on the step is decided so."""
        if self._record is not None:
            self._record(decision)
        self._decisions[decision.step] = decision
        self._decisions.pop(decision.step - _KEPT, None)

    def of(self, step: int) -> Decision | None:
        """What was decided for ``step``; None before that, and long after."""
        return self._decisions.get(step)

    def ask(self, step: int) -> Future[Decision]:
        """What will be decided for ``step``."""
        future: Future[Decision] = Future()
        self._askers.setdefault(step, []).append(future)
        return future

    def take_askers(self, step: int) -> list[Future[Decision]]:
        """Who has asked for ``step`` and is answered now."""
        return self._askers.pop(step, [])

    def take_all_askers(self) -> list[Future[Decision]]:
        """Everyone who has asked: nothing will be decided any more."""
        askers, self._askers = self._askers, {}
        return [future for futures in askers.values() for future in futures]
