"""Decides which units the ranks of a host all-gather, and in which order, before any of them begins.

A collective hangs if one rank does not come, and if two come in different orders. So none is issued before every rank
of the host has announced it, with memory reserved for it, and all ranks read from one list which one is next.

::

    units     a word a unit: content + 1 | round | who has announced it | and until when nobody does
    order     how many are agreed | the latest of them, one entry for each unit
    members   an entry a rank: its process, its device, how many it has issued
    stopped   why no more are agreed: 0, or the reason and whose it is

[Note: agreed at once] The last rank to announce a unit clears all announcements and counts up the round, in one store.
Until then any rank may withdraw; from then on none can. So all ranks find the same answer, without a rank that decides.

[Note: short list] A rank announces a unit again only after it has read the unit's last entry. So a rank has at most one
unread entry for each unit, and a list with room for as many never loses one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from rayzero.errors import UnsupportedError
from rayzero.quantities import count
from rayzero.store.shm.signals import compare_exchange_64, load_acquire_64, store_release_64

UNIT_BYTES = 64  # one cache line
MOST_RANKS = 16  # bits for announcements
_ROUND_BITS = 16
_UNIT_BITS = 24
MOST_UNITS = 1 << _UNIT_BITS


def check_gathering(ranks: int) -> None:
    """Raise UnsupportedError for more ranks of a host than can gather."""
    if ranks > MOST_RANKS:
        raise UnsupportedError(
            f"host_gather=True with {count(ranks, 'rank')} on a host: at most {MOST_RANKS} gather; use "
            "host_gather=False"
        )


@dataclass(frozen=True, slots=True)
class UnitWord:
    """What a unit's word says."""

    content: int  # the version whose bytes are wanted; -1: none was yet
    round: int  # how often it was agreed, modulo 2^16
    wanted: int  # bit i set: the rank in place i has announced it in this round

    def encode(self) -> int:
        """As 64 bits."""
        return ((self.content + 1) << _ROUND_BITS | self.round) << MOST_RANKS | self.wanted

    @classmethod
    def decode(cls, word: int) -> UnitWord:
        """From 64 bits."""
        rest, wanted = divmod(word, 1 << MOST_RANKS)
        content, round_ = divmod(rest, 1 << _ROUND_BITS)
        return cls(content - 1, round_, wanted)


class Answer(Enum):
    """What comes of an announcement."""

    ALONE = auto()  # others want other bytes: copy the whole unit
    WAIT = auto()  # others have yet to come
    AGREED = auto()  # the caller was the last: put it into the order


def announced(word: UnitWord, place: int, size: int, content: int) -> tuple[Answer, UnitWord]:
    """A unit's word once the rank in ``place`` of ``size`` wants the bytes of version ``content``."""
    if word.wanted and word.content != content:
        return Answer.ALONE, word
    wanted = word.wanted | 1 << place
    if wanted == (1 << size) - 1:
        return Answer.AGREED, UnitWord(content, (word.round + 1) % (1 << _ROUND_BITS), 0)
    return Answer.WAIT, UnitWord(content, word.round, wanted)


def withdrawn(word: UnitWord, place: int, round_: int) -> UnitWord | None:
    """A unit's word once the rank in ``place``, which has announced it in ``round_``, does not want it any more; None:
    it is agreed."""
    if word.round != round_:
        return None
    return UnitWord(word.content, word.round, word.wanted & ~(1 << place))


class GatherWords:
    """The words of all units and the order of what is agreed, for one rank. One thread at a time may call it."""

    def __init__(self, units: int, order: int, memory: object, *, num_units: int, place: int, size: int) -> None:
        """units, order: addresses of ``UNIT_BYTES`` for each unit, and of 8 bytes for each and 8 more, in memory that
        ``memory`` keeps mapped. place: the caller's, of ``size`` ranks."""
        self._units, self._order, self._memory = units, order, memory
        self._num_units, self._place, self._size = num_units, place, size
        self._rounds: dict[int, int] = {}  # in which this rank has announced units, until it has read the entries
        self.read = 0  # entries of the order that this rank has read

    def announce(self, unit: int, content: int) -> Answer:
        """Announce that this rank wants a unit, and has not announced it yet; AGREED is in the order already."""
        assert unit not in self._rounds, "announced twice"
        while True:
            seen = self._look(unit)
            answer, to = announced(seen, self._place, self._size, content)
            if answer is Answer.ALONE:
                return answer
            if self._change(unit, seen, to):
                break
        self._rounds[unit] = seen.round
        if answer is Answer.AGREED:
            self._append(unit)
        return answer

    def withdraw(self, unit: int) -> bool:
        """Take an announcement back; False: the unit is agreed."""
        while True:
            seen = self._look(unit)
            to = withdrawn(seen, self._place, self._rounds[unit])
            if to is None:
                return False
            if self._change(unit, seen, to):
                del self._rounds[unit]
                return True

    def next(self) -> int | None:
        """The next unit in the order that this rank has not read; None: there is none yet."""
        number, unit = divmod(load_acquire_64(self._entry(self.read)), MOST_UNITS)
        if number != self.read + 1:
            return None
        self.read += 1
        del self._rounds[unit]
        return unit

    def _append(self, unit: int) -> None:
        while True:
            number = load_acquire_64(self._order)
            if compare_exchange_64(self._order, number, number + 1):
                break
        store_release_64(self._entry(number), (number + 1) << _UNIT_BITS | unit)

    def _look(self, unit: int) -> UnitWord:
        return UnitWord.decode(load_acquire_64(self._units + unit * UNIT_BYTES))

    def _change(self, unit: int, seen: UnitWord, to: UnitWord) -> bool:
        return compare_exchange_64(self._units + unit * UNIT_BYTES, seen.encode(), to.encode())

    def _entry(self, number: int) -> int:
        return self._order + 8 + number % self._num_units * 8

    # ---- rests

    def rests(self, unit: int, now_ms: int) -> bool:
        """Whether ranks have lately waited in vain for each other, and do without for a while."""
        return load_acquire_64(self._rest(unit)) >> 8 > now_ms

    def rest(self, unit: int, now_ms: int, longest_ms: int) -> None:
        """This rank has waited in vain: nobody announces the unit for 0.1 s, then 0.2, 0.4, at most ``longest_ms``. A
        hint that any rank may give: two at once count as one or two."""
        times = load_acquire_64(self._rest(unit)) & 0xFF
        until = now_ms + min(100 << min(times, 16), longest_ms)
        store_release_64(self._rest(unit), until << 8 | min(times + 1, 0xFF))

    def rested(self, unit: int) -> None:
        """All ranks have come."""
        if load_acquire_64(self._rest(unit)):
            store_release_64(self._rest(unit), 0)

    def _rest(self, unit: int) -> int:
        return self._units + unit * UNIT_BYTES + 8
