"""Decides when the gradients that a host's ranks have pushed of a unit are added.

Every rank announces what its memory holds (``Stamps``) and, with its finish, how often it has pushed each unit. Its
part of a unit is *settled* at a step once nothing of it is still to come: as many pushes as were planned, or those that
its finish counts. Once all parts are, the host's door adds them up and sends one sum.

[Note: sums replace sums] A part may change after it was sent: a rank pushes more often than was planned, discards what
it has pushed, or dies and comes back. Its attempt or its count grows then, so the owner knows the newer sum, and a
decision is made only from the one whose attempts and counts all ranks have reported.

[Note: bytes that change] Nobody keeps a rank from changing its gradients while they are added. It only does so for an
attempt or a push that it has not counted yet, and for a later step once every owner has published what the sum is for.
So a sum of bytes that have changed is one that no decision is made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rayzero.layout.model_layout import UnitLayout
from rayzero.protocol.messages import FinishReport, Pushed, Summand

FP32 = 4  # bytes of an element
_MOST_THREADS = 4  # for each rank; one reads about 10 GB/s, so 8 ranks' take half of a host's memory bandwidth


class Part(NamedTuple):
    """What one rank adds to a unit's sum."""

    summand: Summand
    presence: bytes  # bit i set: slot i has a gradient; empty: none has


def settled(
    rank: int, unit: int, step: int, planned: int, pushed: Pushed | None, report: FinishReport | None
) -> Part | None:
    """The part of a rank at ``step``; None while more may come.

    planned: pushes of a unit in a step. pushed: what its memory holds now, of whatever step. report: its last finish of
    ``step``, if it has announced one."""
    here = pushed if pushed is not None and pushed.step == step else None
    if report is not None and (here is None or report.attempt >= here.attempt):
        counted = report.counts[unit]
        if not counted:
            return Part(Summand(rank, report.attempt, 0), b"")
        if here is None or (here.attempt, here.count) != (report.attempt, counted):
            return None
    elif here is None or here.count < planned:
        return None
    return Part(Summand(rank, here.attempt, here.count), here.presence)


class GradientBytes(NamedTuple):
    """What the gradients of a step take on their way to other hosts."""

    pushed: int  # all pushes of one rank
    summed: int  # the fp32 sum of any number of ranks

    @classmethod
    def of(cls, units: Sequence[UnitLayout], pushes: int) -> GradientBytes:
        """``pushes``: of each trained unit by each rank, a step."""
        trained = [unit for unit in units if unit.trainable]
        return cls(pushes * sum(unit.size_bytes for unit in trained), FP32 * sum(unit.numel for unit in trained))

    def sums_gain(self, ranks: int) -> bool:
        """Whether one sum of that many ranks takes fewer bytes than their pushes."""
        return ranks * self.pushed > self.summed


def adding_threads(cores: int, ranks: int, *, on_gpu: bool) -> int:
    """Threads of a host's door that add, for each of its ``ranks``. Ranks on CPUs compute with their cores meanwhile;
    those on GPUs leave half of the host's to loaders and to all else."""
    return max(1, min(_MOST_THREADS, cores // (2 * ranks))) if on_gpu else 1
