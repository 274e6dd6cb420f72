"""Calls of a rank that outlive the owners they were made to."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from rayzero.errors import EpochOverError, StoreError
from rayzero.store.rank.connection import Epochs

WAIT = 60.0


class Owners:
    """Answers nobody, and knows who has asked in which epoch."""

    def __init__(self) -> None:
        self.epochs, self.asked = Epochs(), list[tuple[str, int, Future[str]]]()

    def ask(self, what: str) -> Future[str]:
        def call() -> Future[str]:
            made = Future[str]()
            self.asked.append((what, self.epochs.number, made))
            return made

        return self.epochs.make(call)


def test_what_has_no_answer_is_asked_again_in_the_next_epoch_in_the_same_order() -> None:
    owners = Owners()
    answers = [owners.ask(what) for what in "abc"]
    owners.asked[1][2].set_result("early")
    owners.epochs.over()
    for _, _, made in (owners.asked[2], owners.asked[0]):
        made.set_exception(EpochOverError("over"))
    late = owners.ask("d")
    assert len(owners.asked) == 3
    owners.epochs.drain()
    owners.epochs.begin(1)
    assert [(what, epoch) for what, epoch, _ in owners.asked[3:]] == [("a", 1), ("c", 1), ("d", 1)]
    for what, _, made in owners.asked[3:]:
        made.set_result(what.upper())
    assert [answer.result(WAIT) for answer in (*answers, late)] == ["A", "early", "C", "D"]


def test_other_errors_are_passed_on_while_the_epoch_lasts() -> None:
    owners = Owners()
    answer = owners.ask("a")
    owners.asked[0][2].set_exception(StoreError("no"))
    with pytest.raises(StoreError, match="no"):
        answer.result(WAIT)


def test_a_change_waits_for_a_call_that_is_on_its_way() -> None:
    """It would else come to owners that do not expect it yet, and nobody would answer it."""
    epochs, entered, goes_on = Epochs(), threading.Event(), threading.Event()

    def slow() -> Future[str]:
        entered.set()
        assert goes_on.wait(WAIT)
        return Future()

    caller = threading.Thread(target=lambda: epochs.make(slow))
    caller.start()
    assert entered.wait(WAIT)
    epochs.over()
    drained = threading.Event()
    changing = threading.Thread(target=lambda: (epochs.drain(), drained.set()))
    changing.start()
    assert not drained.wait(0.05)
    goes_on.set()
    assert drained.wait(WAIT)
    for thread in (caller, changing):
        thread.join(WAIT)


def test_when_no_epoch_begins_any_more_calls_fail() -> None:
    owners = Owners()
    answer = owners.ask("a")
    owners.epochs.over()
    owners.asked[0][2].set_exception(EpochOverError("over"))
    owners.epochs.fail(StoreError("gone"))
    for each in (answer, owners.ask("b")):
        with pytest.raises(StoreError, match="gone"):
            each.result(WAIT)


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def again(epochs: Epochs, made: Future[str]) -> None:
    epochs.over()
    made.set_exception(EpochOverError("over"))
    epochs.begin(1)


ENDS: dict[str, Callable[[Epochs, Future[str], Future[str]], object]] = {
    "answered": lambda _epochs, made, _answer: made.set_result("a"),
    "failed": lambda _epochs, made, _answer: made.set_exception(StoreError("no")),
    "given up": lambda _epochs, _made, answer: answer.cancel(),
}


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("end", ENDS)
def test_what_a_call_holds_is_free_once_it_has_ended(end: str, epoch: int) -> None:
    """A unit's first values, a gradient: a cycle would keep them until Python collects garbage."""
    epochs, calls, vector = Epochs(), list[Future[str]](), set[int]()

    def call(_held: object = vector) -> Future[str]:
        calls.append(Future())
        return calls[-1]

    seen, answer = weakref.ref(vector), epochs.make(call)
    del call, vector
    if epoch:
        again(epochs, calls.pop())
    assert seen() is not None, "it may have to be sent again"
    ENDS[end](epochs, calls.pop(), answer)
    assert seen() is None
    assert answer.done()
