"""Which units ranks of a host agree to gather: every order of two and three ranks' moves, and the words themselves."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from rayzero.store.rank.gathers.gather_words import UNIT_BYTES, Answer, GatherWords, UnitWord, announced, withdrawn
from rayzero.store.shm.signals import available

# ---- one unit, explored whole -----------------------------------------------------------------------------------

ROUNDS = 2
NEW = UnitWord(-1, 0, 0)


@dataclass(frozen=True)
class Rank:
    """One rank, which stores a word only if it has not changed since it looked."""

    doing: str = "idle"  # "idle", "announces" and "withdraws" (has looked), "waits"
    saw: UnitWord = NEW
    round: int = 0  # that it has announced the unit in
    gathers: int = 0  # that it has taken part in


@dataclass(frozen=True)
class State:
    """The ranks of a host and the unit's word."""

    ranks: tuple[Rank, ...]
    word: UnitWord = NEW


def moves(state: State) -> Iterator[State]:
    """Every state that one move of one rank leads to. Raises AssertionError where ranks would not agree."""
    size = len(state.ranks)
    for place, rank in enumerate(state.ranks):

        def then(change: Rank, word: UnitWord = state.word, place: int = place) -> State:
            return State((*state.ranks[:place], change, *state.ranks[place + 1 :]), word)

        unchanged = rank.saw == state.word
        if rank.doing == "idle" and rank.gathers < ROUNDS:
            yield then(replace(rank, doing="announces", saw=state.word))
        elif rank.doing == "announces" and not unchanged:
            yield then(replace(rank, doing="idle"))
        elif rank.doing == "announces":
            answer, word = announced(rank.saw, place, size, 7)
            others = [other for i, other in enumerate(state.ranks) if i != place]
            if answer is Answer.AGREED:
                for other in others:
                    assert other.doing in ("waits", "withdraws"), "agreed without a rank that has announced it"
                    assert other.round == rank.saw.round, "agreed with a rank of another round"
            yield then(replace(rank, doing="waits", round=rank.saw.round), word)
        elif rank.doing == "waits":
            if state.word.round != rank.round:
                yield then(replace(rank, doing="idle", gathers=rank.gathers + 1))
            yield then(replace(rank, doing="withdraws", saw=state.word))
        elif rank.doing == "withdraws":
            taken = withdrawn(rank.saw, place, rank.round)
            if taken is None or not unchanged:
                yield then(replace(rank, doing="waits"))
            else:
                assert not taken.wanted >> place & 1
                yield then(replace(rank, doing="idle"), taken)


@pytest.mark.parametrize("size", [2, 3])
def test_in_every_order_of_moves_a_unit_is_agreed_by_all_or_by_none(size: int) -> None:
    first = State((Rank(),) * size)
    seen, todo, most = {first}, deque([first]), 0
    while todo:
        state = todo.popleft()
        most = max(most, min(rank.gathers for rank in state.ranks))
        for rank in state.ranks:
            agreed = rank.doing in ("waits", "withdraws") and rank.round < state.word.round
            assert rank.gathers + agreed == state.word.round, "ranks have taken part in different gathers"
        for each in moves(state):
            if each not in seen:
                seen.add(each)
                todo.append(each)
    assert most == ROUNDS
    assert len(seen) > 100


def test_ranks_that_want_other_bytes_do_not_join() -> None:
    answer, word = announced(UnitWord(-1, 0, 0), 0, 2, 3)
    assert answer is Answer.WAIT
    assert announced(word, 1, 2, 4) == (Answer.ALONE, word)
    assert announced(word, 1, 2, 3) == (Answer.AGREED, UnitWord(3, 1, 0))


def test_a_word_is_read_as_it_was_written() -> None:
    for word in (UnitWord(-1, 0, 0), UnitWord(0, 65535, 65535), UnitWord((1 << 31) - 2, 7, 1)):
        assert UnitWord.decode(word.encode()) == word


# ---- the words in memory ----------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> ctypes.Array[ctypes.c_char]:
    if available() is not None:
        pytest.skip("no signals between processes here")
    return ctypes.create_string_buffer(1 << 16)


UNITS = 3


def words(memory: ctypes.Array[ctypes.c_char], place: int, size: int) -> GatherWords:
    start = -(-ctypes.addressof(memory) // 64) * 64
    order = start + UNITS * UNIT_BYTES
    return GatherWords(start, order, memory, num_units=UNITS, place=place, size=size)


def test_the_last_rank_to_come_puts_a_unit_into_the_order_of_all(memory: ctypes.Array[ctypes.c_char]) -> None:
    ranks = [words(memory, place, 2) for place in range(2)]
    for time in range(5):  # more often than the list has room
        for unit in (2, 0):
            assert ranks[0].announce(unit, time) is Answer.WAIT
            assert ranks[1].announce(unit, time) is Answer.AGREED
        for rank in ranks:
            assert [rank.next(), rank.next(), rank.next()] == [2, 0, None]


def test_what_is_agreed_cannot_be_withdrawn_and_what_is_not_can(memory: ctypes.Array[ctypes.c_char]) -> None:
    first, second = (words(memory, place, 2) for place in range(2))
    assert first.announce(1, 0) is Answer.WAIT
    assert first.withdraw(1)
    assert second.announce(1, 0) is Answer.WAIT, "the first does not want it any more"
    assert first.announce(1, 0) is Answer.AGREED
    assert not second.withdraw(1)
    assert (first.next(), second.next()) == (1, 1)


def test_who_waited_in_vain_lets_all_rest_longer_each_time_until_all_come(memory: ctypes.Array[ctypes.c_char]) -> None:
    first, second = (words(memory, place, 2) for place in range(2))
    now, found = 1000, []
    for _ in range(11):
        first.rest(1, now, 60_000)
        found.append(next(after for after in range(0, 70_000, 100) if not second.rests(1, now + after)))
    assert found == [*(100 << i for i in range(10)), 60_000]
    assert not second.rests(0, now)
    second.rested(1)
    assert not first.rests(1, now)
    first.rest(1, now, 60_000)
    assert not second.rests(1, now + 100)


def test_ranks_in_threads_read_one_order_whatever_they_withdraw(memory: ctypes.Array[ctypes.c_char]) -> None:
    size, orders = 3, [list[int]() for _ in range(3)]
    until = 200  # entries of the order that each rank reads

    def run(place: int) -> None:
        mine, draw, open_ = words(memory, place, size), random.Random(place), set[int]()
        while len(orders[place]) < until:
            unit = draw.randrange(UNITS)
            if unit not in open_:
                mine.announce(unit, 0)
                open_.add(unit)
            elif draw.random() < 0.1 and mine.withdraw(unit):
                open_.remove(unit)
            while (agreed := mine.next()) is not None:
                orders[place].append(agreed)
                open_.remove(agreed)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert orders[0][:150] == orders[1][:150] == orders[2][:150]
    assert len(set(orders[0])) == UNITS
