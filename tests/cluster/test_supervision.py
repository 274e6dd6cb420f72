"""How a run ends: the cause is told from its consequences, and the error says all of it."""

from __future__ import annotations

import pickle

import pytest

from rayzero.cluster.supervision import (
    OneCause,
    RankOutcome,
    Verdict,
    Watch,
    death_of,
    failure_of,
    is_lost,
    run_failed,
)
from rayzero.errors import HandshakeError, RankLeftError, RunFailedError, StallError, UntrackedError


def caught(who: str, error: Exception):
    try:
        raise error
    except type(error) as raised:
        return failure_of(who, raised)


def test_a_run_is_finished_when_every_loop_has_returned():
    watch = Watch(2)
    watch.finished(RankOutcome(rank=1), 0.0)
    assert watch.verdict(0.0) is Verdict.RUNNING
    watch.finished(RankOutcome(rank=0), 1.0)
    assert watch.verdict(1.0) is Verdict.FINISHED


def test_an_error_of_the_loop_ends_the_run_at_once():
    watch = Watch(2)
    watch.finished(RankOutcome(rank=1, failure=caught("rank 1", ValueError("boom"))), 5.0)
    assert watch.verdict(5.0) is Verdict.FAILED
    assert watch.cause.who == "rank 1"


def test_a_consequence_waits_for_its_cause_and_the_cause_is_named():
    watch = Watch(2, settle_s=3.0)
    watch.finished(RankOutcome(rank=0, failure=caught("rank 0", RankLeftError("rank 1 left"))), 5.0)
    assert watch.verdict(5.5) is Verdict.RUNNING
    assert watch.patience_s(5.5) == 2.5
    watch.failed(death_of("optimizer 0", 123, "killed"), 6.0)
    assert watch.verdict(6.0) is Verdict.FAILED
    assert watch.cause.who == "optimizer 0"
    assert [other.who for other in watch.others] == ["rank 0"]


def test_an_end_after_a_consequence_does_not_make_the_run_finished():
    watch = Watch(2, settle_s=3.0)
    watch.finished(RankOutcome(rank=0, failure=caught("rank 0", RankLeftError("rank 1 left"))), 5.0)
    watch.finished(RankOutcome(rank=1), 5.0)
    assert watch.verdict(5.0) is Verdict.RUNNING
    assert watch.verdict(9.0) is Verdict.FAILED


def test_a_handshake_error_is_a_cause():
    assert not caught("rank 0", HandshakeError("layouts differ")).consequence


def test_a_run_may_start_again_after_a_loss_and_not_after_an_error_of_its_loop():
    assert death_of("rank 1", 7, "").restarts
    lost = failure_of("rank 1", UntrackedError("its loop tracks nothing"))
    assert lost.restarts
    assert not lost.consequence
    assert not failure_of("rank 1", ValueError("boom")).restarts
    assert not failure_of("rank 1", RankLeftError("rank 0 left")).restarts


def test_a_stall_is_a_loss_only_after_a_death():
    stalled = failure_of("rank 0", StallError("no progress"))
    assert is_lost(stalled, after_a_death=True)
    assert not is_lost(stalled, after_a_death=False)
    assert not is_lost(failure_of("rank 0", ValueError("boom")), after_a_death=True), "it would come again"
    assert is_lost(death_of("rank 0", 7, ""), after_a_death=False)


def test_deaths_on_one_host_within_seconds_are_one_failure():
    causes = OneCause(within_s=5.0)
    assert not causes.is_known("a", "rank 0", 10.0)
    assert causes.is_known("a", "optimizer 0", 14.0)
    assert not causes.is_known("b", "rank 1", 14.0), "another host"
    assert not causes.is_known("a", "rank 0", 14.5), "its successor has died"
    assert not causes.is_known("a", "optimizer 0", 20.0), "long after"


def test_the_error_names_who_what_and_where_and_keeps_the_original():
    cause = caught("rank 1", ValueError("boom\nand more"))
    error = run_failed("demo", cause, [caught("rank 0", RankLeftError("rank 1 left"))])
    assert isinstance(error, RunFailedError)
    first, then, *rest = str(error).splitlines()
    assert first == "run 'demo' failed: rank 1 raised ValueError: boom"
    assert then == "  then: rank 0 raised RankLeftError: rank 1 left"
    assert rest[0] == "--- traceback of rank 1 ---"
    assert "raise error" in str(error)
    assert isinstance(error.__cause__, ValueError)


def test_a_failure_whose_exception_cannot_be_pickled_is_told_all_the_same():
    class LocalError(Exception):
        pass

    failure = pickle.loads(pickle.dumps(caught("rank 0", LocalError("only here"))))
    assert failure.exception() is None
    assert failure.what == "raised LocalError: only here"


@pytest.mark.parametrize("error", [ValueError(), KeyError("k"), RuntimeError("a\nb")])
def test_a_failure_survives_the_way_to_the_driver(error):
    failure = pickle.loads(pickle.dumps(caught("rank 3", error)))
    assert type(failure.exception()) is type(error)
    assert type(error).__name__ in failure.traceback
