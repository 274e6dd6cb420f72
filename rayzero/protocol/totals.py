"""What is in a shard's total: the gradients of all ranks, added up once. See [Note: totals] in
protocol/gradient_sum.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import xxhash

Summands = tuple[tuple[int, int], ...]  # (rank, attempt as any life of the rank counts it), ascending


@dataclass(frozen=True, slots=True)
class Total:
    """What is in a shard's total."""

    step: int
    summands: Summands | int  # whose gradients, of which attempts; or their digest, if a former life has added them
    present: tuple[bool, ...]  # per slice: whether any has a gradient for it

    def is_of(self, step: int, summands: Summands) -> bool:
        """Whether exactly these gradients of a step are in it."""
        mine = digest_of(summands) if isinstance(self.summands, int) else summands
        return (self.step, self.summands) == (step, mine)


def digest_of(summands: Summands) -> int:
    """63 bits that tell summands apart."""
    return xxhash.xxh3_64_intdigest(repr(summands).encode()) >> 1


class TotalLine(Protocol):
    """What is noted of a total in memory that outlives the process."""

    def write(self, step: int, oldest: int, digest: int, present: tuple[bool, ...]) -> None:
        """The total is whole: from now on, ranks give back what is in it. ``oldest``: the lowest attempt in it.
        ``digest``: of its summands."""
        ...

    def hold(self) -> None:
        """Ranks give back nothing more of what is in it."""
        ...

    def clear(self) -> None:
        """The total's bytes are about to change."""
        ...

    def read(self) -> Total | None:
        """What a former life of the owner has left there; None: nothing."""
        ...
