"""Questions and answers in shared memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rayzero.errors import RayZeroError, StoreClosedError
from rayzero.slabs.header import SlabFacts, lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.store.shm import mailbox
from rayzero.store.shm.mailbox import SLOTS, Answerer, Asker, Cells
from rayzero.store.shm.signals import BELL_BYTES, Bell, changed
from tests.support import needs

from .toy import WAIT

pytestmark = needs.signals_between_processes
CAPACITY = 200


def control(role: str) -> Slab:
    facts = SlabFacts(run="test", role=role, index=0, incarnation=1, layout_digest="", kernel="")
    return Slab.create(lay_out_slab(facts, [("bell", BELL_BYTES, 0), ("cells", Cells.bytes_for(CAPACITY), 0)]), None)


def bell(slab: Slab) -> Bell:
    return Bell(slab.address(slab.header.regions[0].offset), slab.keeper)


def cells(slab: Slab) -> Cells:
    return Cells(slab.address(slab.header.regions[1].offset), slab.keeper, CAPACITY)


@pytest.fixture
def both() -> Iterator[tuple[Asker, Answerer]]:
    ours, theirs = control("asker"), control("answerer")
    asker = Asker(cells(ours), cells(theirs), bell(theirs))
    yield asker, Answerer(cells(ours), cells(theirs), bell(ours))
    ours.close()
    theirs.close()


def test_answers_find_their_questions_in_any_order(both: tuple[Asker, Answerer]) -> None:
    asker, answerer = both
    futures = [asker.ask("Finish", bytes([i])) for i in range(3)]
    questions = answerer.take_questions()
    assert [(method, request) for _, _, method, request in questions] == [("Finish", bytes([i])) for i in range(3)]
    for slot, number, _, request in reversed(questions):
        answerer.answer(slot, number, request * 2)
    asker.take_answers()
    assert [future.result(0) for future in futures if future is not None] == [bytes([i, i]) for i in range(3)]
    assert answerer.take_questions() == []


def test_what_a_former_asker_was_answered_is_no_answer_to_a_new_one() -> None:
    """Its questions have the numbers that the former one's had, and the answers are still in the cells."""
    before, ours, theirs = control("before"), control("asker"), control("answerer")
    former = Answerer(cells(before), cells(theirs), bell(before))
    Asker(cells(before), cells(theirs), bell(theirs)).ask("Finish", b"old")
    ((slot, number, _, _),) = former.take_questions()
    former.answer(slot, number, b"old")
    answerer = Answerer(cells(ours), cells(theirs), bell(ours))
    asker = Asker(cells(ours), cells(theirs), bell(theirs))
    future = asker.ask("Finish", b"new")
    asker.take_answers()
    assert future is not None
    assert not future.done()
    ((slot, number, _, _),) = answerer.take_questions()
    answerer.answer(slot, number, b"new")
    asker.take_answers()
    assert future.result(0) == b"new"
    for slab in (before, ours, theirs):
        slab.close()


def test_a_question_that_was_seen_half_written_and_read_whole_is_taken_once(
    both: tuple[Asker, Answerer], monkeypatch: pytest.MonkeyPatch
) -> None:
    asker, answerer = both
    asker.ask("Write", b"x")
    sequence = ctypes.c_uint64.from_address(answerer._news._where.address)

    def seen_while_written(*arguments: Any) -> list[int]:
        sequence.value -= 1  # odd: the asker is writing still
        found = changed(*arguments)
        sequence.value += 1
        return found

    with monkeypatch.context() as early:
        early.setattr(mailbox, "changed", seen_while_written)
        assert len(answerer.take_questions()) == 1
    assert answerer.take_questions() == [], "its ring, which comes after it"
    asker.ask("Write", b"y")
    assert len(answerer.take_questions()) == 1


def test_what_is_asked_again_has_the_answer_to_the_last_question_alone(both: tuple[Asker, Answerer]) -> None:
    asker, answerer = both
    future = asker.ask("Finish", b"norm?")
    ((slot, first, *_),) = answerer.take_questions()
    assert asker.open == [("Finish", b"norm?")]
    asker.ask_again()
    answerer.answer(slot, first, b"of a lead that has died")
    asker.take_answers()
    assert future is not None
    assert not future.done()
    ((_, again, method, request),) = answerer.take_questions()
    assert (method, request) == ("Finish", b"norm?")
    answerer.answer(slot, again, b"of its successor")
    answerer.answer(slot, first, b"late")  # it must not cover the other one
    asker.take_answers()
    assert future.result(0) == b"of its successor"
    assert asker.open == []


def test_an_answer_to_a_rank_that_has_died_is_none_to_its_next_life() -> None:
    """Both ask their first question in the first cell, and the answers' cells are the same."""
    first, second, theirs = control("asker"), control("asker"), control("answerer")
    Asker(cells(first), cells(theirs), bell(theirs)).ask("Finish", b"of a life that is over")
    before = Answerer(cells(first), cells(theirs), bell(first))
    before.close()
    asker = Asker(cells(second), cells(theirs), bell(theirs))
    now = Answerer(cells(second), cells(theirs), bell(second))
    future = asker.ask("Finish", b"norm?")
    before.answer(0, 1, b"late")
    asker.take_answers()
    assert future is not None
    assert not future.done()
    ((slot, number, *_),) = now.take_questions()
    now.answer(slot, number, b"norm")
    asker.take_answers()
    assert future.result(0) == b"norm"
    for slab in (first, second, theirs):
        slab.close()


def test_what_does_not_fit_goes_another_way(both: tuple[Asker, Answerer]) -> None:
    asker, answerer = both
    assert asker.ask("Finish", bytes(CAPACITY)) is None
    open_ones = [asker.ask("Finish", b"x") for _ in range(SLOTS)]
    assert None not in open_ones
    assert asker.ask("Finish", b"x") is None
    slot, number, _, _ = answerer.take_questions()[0]
    answerer.answer(slot, number, bytes(CAPACITY))
    asker.take_answers()
    with pytest.raises(RayZeroError, match=r"an answer of 200 bytes does not fit"):
        open_ones[slot].result(0)  # type: ignore[union-attr]


def test_close_fails_what_is_open_and_what_comes_later(both: tuple[Asker, Answerer]) -> None:
    asker, _ = both
    before = asker.ask("Finish", b"")
    asker.close(StoreClosedError("over"))
    for future in (before, asker.ask("Finish", b"")):
        assert future is not None
        with pytest.raises(StoreClosedError, match="over"):
            future.result(0)


def test_a_listener_that_waits_for_its_bell_misses_no_question(both: tuple[Asker, Answerer]) -> None:
    """The way owners listen: read the bell, look, wait. 500 questions, each asked when the last was answered."""
    asker, answerer = both
    over = threading.Event()

    def listen(ring: Bell, look: object) -> None:
        while not over.is_set():
            heard = ring.value
            look()  # type: ignore[operator]
            ring.wait(heard, 0.2)

    def answer_all() -> None:
        for slot, number, _, request in answerer.take_questions():
            answerer.answer(slot, number, request[::-1])

    sides = [(asker._bell, answer_all), (answerer._bell, asker.take_answers)]  # each rings the other's
    threads = [threading.Thread(target=listen, args=side) for side in sides]
    for thread in threads:
        thread.start()
    try:
        for turn in range(500):
            future = asker.ask("Finish", turn.to_bytes(4, "little"))
            assert future is not None
            assert future.result(WAIT) == turn.to_bytes(4, "big")
    finally:
        over.set()
        for thread in threads:
            thread.join()
