"""Pushes of one unit take their turn; nothing else waits for anything."""

from __future__ import annotations

import pytest

from rayzero.errors import AccumulationError
from rayzero.protocol.messages import Contribution
from rayzero.store.host.waits import PushOrder


def push(seq: int, *, step: int = 0, attempt: int = 0, unit: int = 0) -> Contribution:
    return Contribution(step=step, attempt=attempt, rank=0, unit=unit, seq=seq, presence=b"\1")


def land(order: PushOrder, contribution: Contribution) -> None:
    order.end(0, contribution, None)


def test_a_later_push_waits_for_the_one_before_it() -> None:
    order = PushOrder()
    third, second, first = (order.turn(0, push(seq)) for seq in (2, 1, 0))
    assert (first.done(), second.done(), third.done()) == (True, False, False)
    land(order, push(0))
    assert (second.done(), third.done()) == (True, False)
    land(order, push(1))
    assert third.done()


def test_other_units_and_owners_do_not_wait() -> None:
    order = PushOrder()
    assert not order.turn(0, push(1)).done()
    assert order.turn(0, push(0, unit=1)).done()
    assert order.turn(1, push(0)).done()


def test_repeats_go_at_once() -> None:
    order = PushOrder()
    land_now = order.turn(0, push(0))
    assert land_now.done()
    land(order, push(0))
    assert order.turn(0, push(0)).done()
    land(order, push(0))
    assert order.turn(0, push(1)).done()
    assert not order.turn(0, push(2)).done()


@pytest.mark.parametrize("newer", [push(0, attempt=1), push(0, step=1)])
def test_a_newer_try_frees_what_was_parked_for_the_old_one(newer: Contribution) -> None:
    order = PushOrder()
    parked = order.turn(0, push(3))
    assert order.turn(0, newer).done()
    assert parked.result(0) is None  # it goes; the owner drops it
    assert order.turn(0, push(5)).done()  # so does a straggler of the old try


def test_a_push_that_fails_fails_those_behind_it() -> None:
    order = PushOrder()
    order.turn(0, push(0))
    behind = order.turn(0, push(1))
    order.end(0, push(0), AccumulationError("not planned"))
    assert isinstance(behind.exception(0), AccumulationError)
    assert order.turn(0, push(0)).done()  # it may be tried again


def test_the_end_of_the_store_ends_every_wait() -> None:
    order = PushOrder()
    parked = [order.turn(owner, push(1)) for owner in (0, 1)]
    order.fail(AccumulationError("over"))
    assert all(isinstance(turn.exception(0), AccumulationError) for turn in parked)


def test_a_push_after_one_that_failed_fails_too_until_a_new_attempt_or_a_repeat_that_lands() -> None:
    order = PushOrder()
    order.turn(0, push(0))
    order.end(0, push(0), AccumulationError("unplanned"))
    for later in (1, 2):
        with pytest.raises(AccumulationError, match="unplanned"):
            order.turn(0, push(later)).result(0)
    assert order.turn(0, push(0, attempt=1)).done()
    assert not order.turn(0, push(1, attempt=1)).done()
    order.end(0, push(0, attempt=1), AccumulationError("unplanned"))
    land(order, push(0, attempt=1))
    assert order.turn(0, push(1, attempt=1)).result(0) is None
