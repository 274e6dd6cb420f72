"""One rank's pushes in its newest attempt, also each by itself: see [Note: totals] in protocol/gradient_sum.py."""

from __future__ import annotations

from typing import Generic, TypeVar

from rayzero.protocol.messages import Contribution, Pushed

T = TypeVar("T")


class NewestAttempt:
    """Which pushes of one rank's newest attempt are there: the first ``count``."""

    step, attempt = -1, 0
    count = 0

    def is_older(self, push: Contribution | Pushed) -> bool:
        """Whether ``push`` belongs to an attempt before the current one."""
        return (push.step, push.attempt) < (self.step, self.attempt)

    def count_of(self, step: int, attempt: int) -> int:
        """How many pushes of that attempt are there."""
        return self.count if (self.step, self.attempt) == (step, attempt) else 0

    def is_stale(self, push: Contribution) -> bool:
        """Whether ``push`` is a repeat or from an older attempt, so that it is dropped."""
        return self.is_older(push) or push.seq < self.count_of(push.step, push.attempt)


class Rounds(NewestAttempt, Generic[T]):
    """What is there of each push of one rank, of a unit or a shard, in its newest attempt.

    Knows which pushes are there; not memory. Calls must not overlap."""

    def __init__(self) -> None:
        self.each: list[T] = []  # by sequence number

    @property
    def count(self) -> int:  # type: ignore[override]  # it follows from ``each``, and nothing else sets it
        """How many pushes of that attempt are there."""
        return len(self.each)

    def open(self, push: Contribution | Pushed) -> list[T]:
        """Begin the attempt of ``push``, unless it is the current one; returns what was there of another one."""
        if (push.step, push.attempt) == (self.step, self.attempt):
            return []
        self.step, self.attempt = push.step, push.attempt
        dropped, self.each = self.each, []
        return dropped
