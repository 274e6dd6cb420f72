"""Which of its earlier life's calls of ``mean_over_ranks`` a rank that has come back makes again.

[Note: calls before a forward] The lead pairs the ranks' nth calls. Of those between ``optimizer.step()`` and the next
forward, some end an iteration, and a rank that repeats the next one does not make them; others begin the next one, and
it does. Nothing in the loop says where the border is. But before its forward the new life makes exactly the calls
behind the border, and with the same values, because it computes the same: its calls tell where they begin. Where
several places fit (two flags that are 0), the lead must have one result for all of them.
"""

from __future__ import annotations

import hashlib
import struct

from rayzero.errors import StateLostError
from rayzero.protocol.messages import MeanInput


def key_of(given: MeanInput) -> str:
    """Equal for equal names, shapes, values (bit for bit) and weights."""
    numbers = struct.pack(f"<{len(given.values) + 1}d", *given.values, given.weight)
    return hashlib.sha256(repr((given.names, given.shape)).encode() + numbers).hexdigest()[:32]


class RepeatedMeans:
    """Finds the numbers of the calls that a rank makes before the first forward of its new life.

    Knows what was given and in which order; not the results."""

    def __init__(self, rank: int, made: list[str], newest: int) -> None:
        """``made``: keys of the earlier life's calls between its last commit and its next forward; ``newest``: the
        number of the last one, or of the last call of all if there is none."""
        self._rank, self._made, self._first = rank, made, newest - len(made) + 1
        self._starts = list(range(len(made)))  # places where the repeated calls may begin
        self._asked = 0

    def next(self, given: MeanInput) -> list[int]:
        """The numbers that the next call may have, at least one. Raises StateLostError if the earlier life made no
        such call here."""
        key, at = key_of(given), self._asked
        starts = [start for start in self._starts if self._made[start + at : start + at + 1] == [key]]
        if not starts:
            raise self._lost(f"calls mean_over_ranks() of {given} before a forward with gradients, and did not before")
        self._starts, self._asked = starts, at + 1
        return [self._first + start + at for start in starts]

    def end(self) -> None:
        """The forward begins. Raises StateLostError if the earlier life made further calls before it."""
        if self._asked and len(self._made) - self._asked not in self._starts:
            raise self._lost("begins a forward with gradients after fewer calls of mean_over_ranks() than before")

    def unclear(self) -> StateLostError:
        """The error if the calls of the numbers have different results."""
        return self._lost("repeats one of several calls of mean_over_ranks() with the same values and other results")

    def _lost(self, why: str) -> StateLostError:
        return StateLostError(
            f"rank {self._rank} has died and come back, but its loop cannot repeat its step alone: it {why}. Between "
            "optimizer.step() and the next forward give it values that a repeat computes again, and none between "
            "prepare() and the loop; or resume the run from its newest checkpoint"
        )
