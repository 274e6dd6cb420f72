"""Decides who of a host's ranks fetches a shard into the memory that all of them read.

One word a shard: the version that its bytes are of + 1, and who writes them. Zero: nobody has fetched it yet.

[Note: one writer] While a word names a claimer, only the claimer writes the shard's bytes, and nobody reads them. A
claim ends when its holder stores the version, or gives the claim up, or when its process is dead: a process that is
only slow, stopped or cut off may still write, so its shards stay untouched until it is gone. Who claims a shard writes
over bytes that nobody reads any more: a version that is newer than the shard's content is published only after all
ranks have finished the step of that content, and with it their reads (the store's rule 7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from rayzero.store.shm.signals import compare_exchange_64, load_acquire_64

CLAIM_BYTES = 64  # a shard's word fills one cache line
MOST_CLAIMERS = (1 << 16) - 1
_BITS = 16


@dataclass(frozen=True, slots=True)
class ShardWord:
    """What a shard's word says."""

    version: int  # of the bytes, whole or being written; -1: none
    claimer: int  # who writes them, from 1; 0: nobody, they are whole

    def encode(self) -> int:
        """As 64 bits."""
        return (self.version + 1) << _BITS | self.claimer

    @classmethod
    def decode(cls, word: int) -> ShardWord:
        """From 64 bits."""
        return cls((word >> _BITS) - 1, word & MOST_CLAIMERS)


EMPTY = ShardWord(-1, 0)


class Move(Enum):
    """What a rank that needs a shard does next."""

    READ = auto()  # the bytes are there
    CLAIM = auto()  # fetch them for the host
    WAIT = auto()  # another one does
    PASS = auto()  # the host's memory has moved on: fetch them elsewhere


def next_move(word: ShardWord, content: int, version: int, is_dead: Callable[[int], bool]) -> Move:
    """What to do about a shard of which ``version`` is needed, whose bytes are unchanged since version ``content``.

    is_dead: whether a claimer's process is; only asked about the one in the word."""
    if word.version > version:
        return Move.PASS
    if word.claimer:
        return Move.CLAIM if is_dead(word.claimer) else Move.WAIT
    return Move.READ if word.version >= content else Move.CLAIM


class Claims:
    """The words of all shards, for one claimer. Any thread may call it."""

    def __init__(self, address: int, memory: object, claimer: int) -> None:
        """``address``: ``CLAIM_BYTES`` for each shard of the layout, in memory that ``memory`` keeps mapped.
        ``claimer``: the caller's number, from 1; no living process has the same one."""
        self._address, self._memory, self._claimer = address, memory, claimer

    def look(self, shard: int) -> ShardWord:
        """A shard's word; if nobody writes the bytes, they are visible."""
        return ShardWord.decode(load_acquire_64(self._at(shard)))

    def claim(self, shard: int, seen: ShardWord, version: int) -> bool:
        """Become the writer of a shard, to fetch ``version``; False if its word is not ``seen`` any more."""
        return self._change(shard, seen, ShardWord(version, self._claimer))

    def publish(self, shard: int, version: int) -> None:
        """The claimed shard has all bytes of ``version``."""
        self._change(shard, ShardWord(version, self._claimer), ShardWord(version, 0))

    def give_up(self, shard: int, version: int) -> None:
        """The claimed shard does not get ``version`` from this claimer."""
        self._change(shard, ShardWord(version, self._claimer), EMPTY)

    def forget(self, shard: int) -> None:
        """What the shard has is outdated, unless somebody is writing it."""
        while (seen := self.look(shard)) != EMPTY and not seen.claimer and not self._change(shard, seen, EMPTY):
            pass

    def void(self, num_shards: int, claimer: int) -> None:
        """Give up all that a claimer holds which writes no more."""
        for shard in range(num_shards):
            seen = self.look(shard)
            if seen.claimer == claimer:
                self._change(shard, seen, EMPTY)

    def _change(self, shard: int, seen: ShardWord, to: ShardWord) -> bool:
        return compare_exchange_64(self._at(shard), seen.encode(), to.encode())

    def _at(self, shard: int) -> int:
        return self._address + shard * CLAIM_BYTES
