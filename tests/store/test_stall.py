"""The watch over waits, with a clock of the test's own."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from clock import Clock

from rayzero.errors import StallError, StoreClosedError
from rayzero.store.stall import StallWatch
from store.toy import WAIT


def test_a_wait_without_progress_fails_and_says_who_waits_for_what() -> None:
    clock, doing = Clock(), "updating tile 310/512"
    watch = StallWatch(1, 10.0, clock, poll_s=None)
    future: Future[None] = watch.watch(Future(), "layers.7 v42 from optimizer 2", lambda: doing)
    watch.check_all()
    clock.now += 9.0
    watch.check_all()
    assert not future.done()
    clock.now += 3.0
    watch.check_all()
    with pytest.raises(
        StallError, match=r"^rank 1 waits 12 s for layers.7 v42 from optimizer 2: updating tile 310/512$"
    ):
        future.result(0)


def test_a_wait_that_begins_after_the_end_fails_with_it() -> None:
    watch = StallWatch(1, 10.0, poll_s=None)
    watch.close(StoreClosedError("rank 1 closed its store"))
    with pytest.raises(StoreClosedError, match="rank 1 closed its store"):
        watch.watch(Future(), "x", lambda: "y").result(0)


def test_progress_renews_the_wait() -> None:
    clock, tiles = Clock(), iter(range(100))
    watch = StallWatch(0, 10.0, clock, poll_s=None)
    future: Future[None] = watch.watch(Future(), "x", lambda: f"updating tile {next(tiles)}/100")
    for _ in range(20):
        clock.now += 9.0
        watch.check_all()
    assert not future.done()


def test_a_wait_that_ends_is_forgotten() -> None:
    clock = Clock()
    watch = StallWatch(0, 10.0, clock, poll_s=None)
    future: Future[int] = watch.watch(Future(), "x", lambda: "nothing")
    future.set_result(5)
    clock.now += 100.0
    watch.check_all()
    assert future.result(0) == 5
    assert watch.num_waits == 0


def test_its_thread_does_the_same() -> None:
    watch = StallWatch(3, 0.5)
    future: Future[None] = watch.watch(Future(), "rank 0", lambda: "it sleeps")
    with pytest.raises(StallError, match=r"rank 3 waits .* for rank 0: it sleeps"):
        future.result(WAIT)
    open_wait: Future[None] = watch.watch(Future(), "rank 0", lambda: "it works")
    for _ in range(2):
        watch.close(StoreClosedError("closed"))
    with pytest.raises(StoreClosedError):
        open_wait.result(WAIT)
