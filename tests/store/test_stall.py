"""The watch over waits, with a clock of the test's own."""

from __future__ import annotations

import weakref
from concurrent.futures import Future

import pytest
from clock import Clock

from rayzero.concurrency.futures import failed, settled
from rayzero.errors import StallError, StoreClosedError, StoreError
from rayzero.store.host.waits import StallWatch
from store.toy import WAIT


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rayzero.store.host.waits.monotonic", clock)
    return clock


def test_a_wait_without_progress_fails_and_says_who_waits_for_what(clock: Clock) -> None:
    doing = "updating layers.6 shard 310"
    watch = StallWatch("rank 1", 10.0, poll_s=None)
    future: Future[None] = watch.watch(Future(), "layers.7 v42 from optimizer 2", lambda _: settled(doing))
    watch.check_all()
    clock.now += 9.0
    watch.check_all()
    assert not future.done()
    clock.now += 3.0
    watch.check_all()
    with pytest.raises(
        StallError, match=r"^rank 1 waits 12 s for layers.7 v42 from optimizer 2: updating layers.6 shard 310$"
    ):
        future.result(0)


def test_a_wait_that_begins_after_the_end_fails_with_it() -> None:
    watch = StallWatch("rank 1", 10.0, poll_s=None)
    watch.close(StoreClosedError("rank 1 closed its store"))
    with pytest.raises(StoreClosedError, match="rank 1 closed its store"):
        watch.watch(Future(), "x", lambda _: settled("y")).result(0)


def test_its_thread_does_the_same() -> None:
    watch = StallWatch("rank 3", 0.5)
    future: Future[None] = watch.watch(Future(), "rank 0", lambda _: settled("it sleeps"))
    with pytest.raises(StallError, match=r"rank 3 waits .* for rank 0: it sleeps"):
        future.result(WAIT)
    open_wait: Future[None] = watch.watch(Future(), "rank 0", lambda _: settled("it works"))
    for _ in range(2):
        watch.close(StoreClosedError("closed"))
    with pytest.raises(StoreClosedError):
        open_wait.result(WAIT)


class Peer:
    """Answers, or not, as the test says; every answer takes its time on the test's clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.says, self.asked = clock, "it works", 0
        self.silent: str | None = None

    def describe(self, timeout_s: float) -> Future[str]:
        self.asked += 1
        return settled(self.says) if self.silent is None else failed(StoreError(self.silent))


@pytest.mark.parametrize("timeout_s", [4.0, 6.0, 60.0, 600.0])
def test_a_peer_that_falls_silent_is_noticed_within_one_and_a_half_timeouts(clock: Clock, timeout_s: float) -> None:
    """Also one whose silence has another reason each time: only news are progress. The clock goes on as the watch's
    thread would: it sleeps between passes, and a pass in which nobody answers lasts as long as an answer may."""
    watch, peer = StallWatch("rank 1", timeout_s, poll_s=None), Peer(clock)
    future: Future[None] = watch.watch(Future(), "the norm of step 3", peer.describe)
    for shard in range(40):  # it works for a while, longer than the timeout
        clock.now += timeout_s / 8
        peer.says = f"updating layers.6 shard {shard}"
        watch.check_all()
    stopped = clock.now
    while not future.done():
        clock.now += min(timeout_s / 8, 5.0) + min(max(timeout_s / 4, 1.0), 5.0)
        peer.silent = f"optimizer 1 gives no answer ({peer.asked})"
        watch.check_all()
        assert clock.now - stopped <= 1.5 * timeout_s
    with pytest.raises(StallError, match=r"norm of step 3: optimizer 1 gives no answer \(\d+\); its last answer: upda"):
        future.result(0)
    assert clock.now - stopped >= timeout_s


def test_bytes_that_come_are_progress_while_the_peer_is_silent(clock: Clock) -> None:
    came = iter(range(100))
    watch, peer = StallWatch("rank 0", 10.0, poll_s=None), Peer(clock)
    peer.silent = "no answer"
    future: Future[None] = watch.watch(Future(), "x", peer.describe, lambda: next(came))
    for _ in range(20):
        clock.now += 9.0
        watch.check_all()
    assert not future.done()


def test_a_pass_ends_however_many_waits_begin_while_it_lasts() -> None:
    """Each look at a wait begins another one, as a training that goes on does."""
    watch = StallWatch("rank 0", 10.0, poll_s=None)
    asked = []

    def describe(timeout_s: float) -> Future[str]:
        asked.append(timeout_s)
        assert len(asked) <= 8, "the pass has gone on to waits that began in it"
        for _ in range(2):
            watch.watch(Future(), "the next one", describe)
        return settled("it works")

    watch.watch(Future(), "the first one", describe)
    for looks in (1, 1 + 3):
        watch.check_all()
        assert len(asked) == looks


def test_all_peers_are_asked_before_any_answer_is_waited_for() -> None:
    """The last one that is asked makes all answer: a pass over many silent peers lasts as long as over one."""
    watch = StallWatch("rank 0", 10.0, poll_s=None)
    answers: list[Future[str]] = []

    def describe(timeout_s: float) -> Future[str]:
        answers.append(Future())
        if len(answers) == 200:
            for answer in answers:
                answer.set_result("it works")
        return answers[-1]

    for _ in range(200):
        watch.watch(Future(), "x", describe)
    watch.check_all()
    assert {wait.account() for wait in watch._waits.values()} == {"it works"}


def test_thousands_of_steps_leave_no_wait_and_ask_nobody(clock: Clock) -> None:
    """A wait that ends at once is never asked about; nothing is kept of it, whether the watch looks or not."""
    watch = StallWatch("rank 0", 8.0, poll_s=1.0)
    peer, made = Peer(clock), []
    watch._run = lambda: None  # type: ignore[method-assign]  # no thread: the test looks
    for step in range(6000):
        waits = [watch.watch(Future(), f"unit {unit} v{step}", peer.describe) for unit in range(8)]
        made += [weakref.ref(wait) for wait in waits[:1]]
        clock.now += 0.05
        if step % 20 == 0:
            watch.check_all()
        assert len(watch._waits) == 8
        for wait in waits:
            wait.set_result(None)
        del wait, waits
    assert peer.asked == 0
    assert len(watch._waits) == 0
    assert not [ref for ref in made if ref() is not None]
