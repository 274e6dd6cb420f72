"""Decides when the gradients that a host's ranks have pushed of a unit are added.

Every rank announces what its memory holds (``Stamps``) and, with its finish, how often it has pushed each unit. Its
part of a unit's round (protocol/gradient_sum.py) is *settled* once it has made that push, or its finish says that it
makes none. Once all parts are, the host's door adds them up and sends the sum of the round.

[Note: sums replace sums] A part may change after it was sent: a rank discards what it has pushed, or dies and comes
back. Its attempt grows then, so the owner knows the newer sums, and a decision is made only from those whose attempts
and counts all ranks have reported.

[Note: bytes that change] Nobody keeps a rank from changing its gradients while they are added. It only does so for an
attempt or a push that it has not counted yet, and for a later step once every owner has published what the sum is for.
So a sum of bytes that have changed is one that no decision is made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rayzero.layout.model_layout import UnitLayout
from rayzero.protocol.messages import IN_TOTAL, FinishReport, Pushed, Summand

FP32 = 4  # bytes of an element
_MOST_THREADS = 4  # for each rank; one reads about 10 GB/s, so 8 ranks' take half of a host's memory bandwidth


class Part(NamedTuple):
    """What one rank adds to the sum of a unit's round."""

    summand: Summand
    pushed: Pushed | None  # None: nothing


def settled(
    rank: int, unit: int, step: int, number: int, pushed: Sequence[Pushed], report: FinishReport | None
) -> Part | None:
    """The part of a rank in a round of ``step``; None: it may still come, or change.

    number: of the round. pushed: what it has announced of the unit, of whatever step. report: its last finish of
    ``step``, if it has announced one."""
    here = pushed if pushed and pushed[0].step == step else ()
    attempt = here[0].attempt if here else -1
    if report is not None and report.attempt >= attempt:
        counted = report.counts[unit]
        if counted <= number:
            return Part(Summand(rank, report.attempt, counted), None)
        if report.attempt != attempt:
            return None
    if not here or here[-1].count <= number:
        return None
    before = Pushed(step=step, attempt=attempt, count=number + 1, presence=b"", place=IN_TOTAL)
    found = next((each for each in here if each.count == number + 1), before)
    return Part(Summand(rank, attempt, number + 1), found)


class GradientBytes(NamedTuple):
    """What the gradients of a step take on their way to other hosts."""

    pushed: int  # all pushes of one rank
    summed: int  # the fp32 sums of any number of ranks, one for each round

    @classmethod
    def of(cls, units: Sequence[UnitLayout], pushes: int) -> GradientBytes:
        """``pushes``: of each trained unit by each rank, a step."""
        trained = [unit for unit in units if unit.trainable]
        one = sum(unit.size_bytes for unit in trained), FP32 * sum(unit.numel for unit in trained)
        return cls(pushes * one[0], pushes * one[1])

    def sums_gain(self, ranks: int) -> bool:
        """Whether sums of that many ranks take fewer bytes than their pushes."""
        return ranks * self.pushed > self.summed


def adding_threads(cores: int, ranks: int, *, on_gpu: bool) -> int:
    """Threads of a host's door that add, for each of its ``ranks``. Ranks on CPUs compute with their cores meanwhile;
    those on GPUs leave half of the host's to loaders and to all else."""
    return max(1, min(_MOST_THREADS, cores // (2 * ranks))) if on_gpu else 1
