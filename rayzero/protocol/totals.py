"""What is in a shard's total: the gradients of all ranks, added up round by round. See [Note: totals] in
protocol/gradient_sum.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import xxhash
from torch import Tensor

from rayzero.protocol.lives import ATTEMPTS
from rayzero.protocol.messages import Pushed

WORD_STEP, _WORD_ATTEMPT = 32, 16  # bits of a word below them
MOST_ROUNDS = (1 << _WORD_ATTEMPT - 1) - 1
# (rank, attempt as any life of the rank counts it, how many of its pushes), ascending
Summands = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Total:
    """What is in a shard's total."""

    step: int
    rounds: int  # how many
    summands: Summands | int  # whose gradients; or their digest, if a former life has added them
    present: tuple[bool, ...]  # per slice: whether any has a gradient for it

    @property
    def word(self) -> int:
        """See ``total_word``."""
        assert not isinstance(self.summands, int)
        return total_word(self.step, min((attempt for _, attempt, _ in self.summands), default=0), self.rounds)

    def covers(self, step: int, pushes: Mapping[int, int]) -> int:
        """How many of their pushes ranks need not bring again, because they are in it. ``pushes``: by rank, its
        attempt at ``step``. What a former life has added is taken for theirs: they have been told of it."""
        if self.step != step:
            return 0
        if isinstance(self.summands, int):
            return self.rounds
        there = {rank: attempt for rank, attempt, _ in self.summands}
        return self.rounds if all(there.get(rank) == tried % ATTEMPTS for rank, tried in pushes.items()) else 0

    def is_of(self, step: int, summands: Summands) -> bool:
        """Whether exactly these gradients of a step are in it."""
        mine = digest_of(summands) if isinstance(self.summands, int) else summands
        return (self.step, self.summands) == (step, mine)


def summands_of(pushes: Mapping[int, tuple[int, int]], rounds: int) -> Summands:
    """What is in a total after some rounds. ``pushes``: by rank that has any, its attempt and how many."""
    return tuple((rank, attempt, min(count, rounds)) for rank, (attempt, count) in sorted(pushes.items()))


def total_word(step: int, attempt: int, rounds: int) -> int:
    """63 bits and a 0 for what a rank needs to know of a total, or for what it has pushed: the total has that if its
    word is not less. ``attempt``: of a total the lowest one, of ``rounds`` pushes theirs."""
    return (step + 1) << WORD_STEP | attempt % ATTEMPTS << _WORD_ATTEMPT | rounds << 1


def has_pushed(word: int, pushed: Pushed) -> bool:
    """Whether a total with this ``total_word`` has what a rank has pushed."""
    return word >= total_word(pushed.step, pushed.attempt, pushed.count)


def digest_of(summands: Summands) -> int:
    """63 bits that tell summands apart."""
    return xxhash.xxh3_64_intdigest(repr(summands).encode()) >> 1


@dataclass(frozen=True, slots=True)
class KeptTotal:
    """What a total was before a round is added to it: in memory that outlives the process, beginning with its first
    element. It is filled little by little, just before the total changes there, while both are in a core's cache."""

    values: Tensor  # 1D fp32, the total's elements
    count: Tensor  # int64, 1 element: the first so many are there

    def keep(self, total: Tensor, end: int) -> None:
        """The elements of ``total`` before ``end`` are about to change."""
        there = int(self.count)
        if there < end:
            self.values[there:end].copy_(total[there:end])
            self.count.fill_(end)


class TotalLine:
    """What is noted of a total in memory that outlives the process; here nothing, where no memory does."""

    def write(self, made: Total) -> None:
        """The total is whole: from now on, ranks give back what is in it."""

    def hold(self) -> None:
        """A rank comes back: what its former life had in the total, ranks give back no more in this step."""

    def clear(self) -> None:
        """The total's bytes are about to change, and the ranks still have everything that was in it."""

    def keeps(self, total: Tensor) -> KeptTotal | None:
        """The total's bytes are about to change by one more round. Returns what takes them first; until ``write``,
        ``read`` brings back those that are in it."""
        return None

    def read(self, total: Tensor) -> Total | None:
        """What a former life of the owner has left there; None: nothing."""
        return None
