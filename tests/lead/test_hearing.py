"""A lead's successor hears from every rank what only its predecessor knew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rayzero.checkpoint.writer import checkpoint_name, staging_path, taken_path, write_rank_state
from rayzero.errors import CheckpointWriteError, StateLostError, StoreError
from rayzero.lead.attempt import attempts_of
from rayzero.lead.lead import StepLead
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import (
    COMPUTE,
    AttemptHistory,
    CheckpointInfo,
    EndedSave,
    GivenMean,
    LeadHistory,
    MeanInput,
    ModelSpec,
    Norm,
    StepHistory,
    Write,
)
from tests.store.toy import WAIT, make_spec

from .test_lead import WatchedPeer, inputs, lead_of, report

NORM = Norm(step=0, total=3.0, finite=True)
SILENT = LeadHistory()


@pytest.fixture
def spec() -> ModelSpec:
    return make_spec(2)


@pytest.fixture
def peers(spec: ModelSpec) -> Iterator[list[WatchedPeer]]:
    """Owners whose lead has died."""
    with lead_of(spec) as (_, peers):
        yield peers


@pytest.fixture
def lead(peers: list[WatchedPeer]) -> Iterator[StepLead]:
    """The successor; it has heard nobody."""
    lead = StepLead(peers)
    for peer in peers:
        peer.lead = lead
    yield lead
    lead.close()


def of_step(*attempts: AttemptHistory, discards: int = 0, written: tuple[Write, ...] = ()) -> LeadHistory:
    """The history of a rank in step 0: its last discarded attempt, if any, and the present one."""
    discarded = attempts[0] if discards else AttemptHistory()
    return LeadHistory(
        steps=(StepHistory(step=0, discards=discards, discarded=discarded, attempt=attempts[-1], written=written),)
    )


def finished(rank: int, *norms: Norm, attempt: int = 0) -> AttemptHistory:
    return AttemptHistory(reports=(report(rank, attempt=attempt),), norms=norms)


def test_a_rank_that_has_just_begun_waits_for_the_others_to_be_heard(lead: StepLead, spec: ModelSpec) -> None:
    """It knows nothing of the lead's former life; what it says before the others are heard counts."""
    lead.attach(1, spec, succeeds=True)
    first = lead.finish(report(1), None)
    lead.attach(0, spec, history=of_step(finished(0)), succeeds=True)
    again = lead.finish(report(0), None)
    assert first.result(WAIT) == again.result(WAIT)


def test_no_call_is_taken_before_every_rank_has_been_heard(lead: StepLead, spec: ModelSpec) -> None:
    """Rank 0 has gone on to its finish; that rank 1 still waits in a mean is known only once rank 1 has said so."""
    lead.attach(0, spec, history=SILENT)
    given = MeanInput(names=(), shape=(), values=(1.0,), weight=1.0)
    norm, mean = lead.finish(report(0), inputs()), lead.mean(0, 1, given)
    assert lead.describe() == "rank 1 has not said how far it was with the lead that died"
    assert not norm.done()
    lead.attach(1, spec, history=LeadHistory(means=(GivenMean(number=1, given=given),)))
    assert mean.result(WAIT) == (1.0,)
    assert lead.finish(report(1), inputs()).result(WAIT) == norm.result(WAIT)


def test_a_mean_that_a_rank_had_before_is_no_call_that_others_have_to_make(lead: StepLead, spec: ModelSpec) -> None:
    """Rank 1 had it, too, in a life that is over."""
    given = MeanInput(names=(), shape=(), values=(1.0,), weight=1.0)
    lead.attach(0, spec, history=LeadHistory(means=(GivenMean(number=1, given=given),)))
    lead.attach(1, spec)
    norm = lead.finish(report(1), None)
    assert lead.describe().startswith("rank 0 has not finished step 0")
    assert lead.finish(report(0), None).result(WAIT) == norm.result(WAIT)


def test_a_mean_that_a_dead_rank_had_is_made_again_for_others(lead: StepLead, spec: ModelSpec) -> None:
    """Rank 1 has had it and has gone on, and then has died with the lead: its new life says what it had given."""
    given = [MeanInput(names=(), shape=(), values=(value,), weight=1.0) for value in (1.0, 3.0)]
    lead.attach(0, spec, history=LeadHistory(means=(GivenMean(number=1, given=given[0]),)))
    lead.attach(1, spec)
    asked = lead.mean(0, 1, given[0])
    assert not asked.done()
    lead.know_mean(1, 1, given[1]).result(WAIT)
    assert asked.result(WAIT) == (2.0,)


def test_a_mean_older_than_what_a_rank_still_knows_is_refused_by_name(lead: StepLead, spec: ModelSpec) -> None:
    """Rank 1 has died with the lead, and would wait for what rank 0 gave to it."""
    given = MeanInput(names=(), shape=(), values=(1.0,), weight=1.0)
    lead.attach(
        0, spec, history=LeadHistory(means=(GivenMean(number=8, given=given), GivenMean(number=9, given=given)))
    )
    lead.attach(1, spec)
    with pytest.raises(StateLostError, match=r"^rank 1 repeats call 7 of mean_over_ranks\(\), .*newest checkpoint"):
        lead.mean(1, 7, given).result(WAIT)
    assert lead.mean(1, 8, given).result(WAIT) == (1.0,)


def test_a_rank_that_gives_to_a_mean_again_waits_for_nobody_in_it(lead: StepLead, spec: ModelSpec) -> None:
    """Else a rank that waits for its norm meanwhile would be taken for one that makes calls in another order."""
    given = MeanInput(names=(), shape=(), values=(1.0,), weight=1.0)
    lead.attach(0, spec, history=SILENT)
    lead.attach(1, spec)
    norm = lead.finish(report(0), None)
    lead.know_mean(1, 1, given).result(WAIT)
    assert lead.finish(report(1), None).result(WAIT) == norm.result(WAIT)


def test_a_rank_without_a_predecessor_of_the_lead_ends_the_wait(lead: StepLead, spec: ModelSpec) -> None:
    """It has come back in a new life, and has no history with this lead."""
    lead.attach(0, spec, history=SILENT)
    norm = lead.finish(report(0), None)
    lead.attach(1, spec)
    lead.finish(report(1), None).result(WAIT)
    assert norm.done()


def test_a_rank_that_dies_is_heard_in_its_next_life(lead: StepLead, spec: ModelSpec) -> None:
    lead.attach(0, spec, history=of_step(AttemptHistory(inputs=inputs())))
    lead.lose(0)
    lead.attach(1, spec, history=SILENT)
    norm = lead.finish(report(1), None)
    assert not norm.done()
    lead.attach(0, spec)
    lead.finish(report(0), None).result(WAIT)
    assert norm.result(WAIT).finite


def test_what_one_rank_has_discarded_another_gets_the_norm_of(lead: StepLead, spec: ModelSpec) -> None:
    """Owners are not asked: rank 0 has overwritten what it pushed in that attempt."""
    lead.attach(0, spec, history=of_step(finished(0, NORM), AttemptHistory(), discards=1))
    lead.attach(1, spec, history=SILENT)
    assert lead.finish(report(1), None).result(WAIT) == NORM
    again = lead.finish(report(0, attempt=1), inputs())
    assert not again.done()
    lead.discard(1, 0, 0).result(WAIT)
    lead.finish(report(1, attempt=1), inputs()).result(WAIT)
    assert again.result(WAIT).step == 0


def test_attempts_that_all_ranks_have_discarded_are_over(spec: ModelSpec) -> None:
    """Rank 0 is in the third attempt, rank 1 in the second, whose norm it has."""
    histories = {
        0: of_step(finished(0, NORM, attempt=1), finished(0, attempt=2), discards=2).steps[0],
        1: of_step(finished(1), finished(1, NORM, attempt=1), discards=1).steps[0],
    }
    current, following = attempts_of(0, histories)
    assert {rank: each.attempt for rank, each in current.reports.items()} == {0: 1, 1: 1}
    assert (current.norm, current.discarded) == (NORM, {0: 1})
    assert following is not None
    assert list(following.reports) == [0]


def test_a_commit_that_was_told_counts(lead: StepLead, spec: ModelSpec) -> None:
    committed = AttemptHistory(reports=(report(0),), norms=(NORM,), inputs=inputs())
    lead.attach(0, spec, history=of_step(committed))
    lead.attach(1, spec, history=of_step(finished(1)))
    decision = lead.commit(1, 0, inputs()).result(WAIT)
    assert lead.commit(0, 0, inputs()).result(WAIT) == decision


def test_a_write_that_one_rank_knows_is_made_is_not_made_again(
    lead: StepLead, peers: list[WatchedPeer], spec: ModelSpec
) -> None:
    write = Write(version=0, unit=0, kind=COMPUTE, digest="d")
    lead.attach(0, spec, history=of_step(AttemptHistory(), written=(write,)))
    lead.attach(1, spec, history=SILENT)
    lead.write(1, write).result(WAIT)  # nothing is staged: an owner that was asked would refuse
    asked = Write(version=0, unit=0, kind=COMPUTE, digest="another")
    more = [lead.write(rank, asked) for rank in range(2)]
    assert [future.result(WAIT) for future in more] == [None, None]
    assert [call for peer in peers for call in peer.calls] == ["write 2 another", "write 2 another"]


@pytest.mark.parametrize("asks_first", [True, False])
def test_a_write_that_a_rank_that_came_back_finds_published_is_made(
    lead: StepLead, peers: list[WatchedPeer], spec: ModelSpec, asks_first: bool
) -> None:
    """No other rank has had the answer of the lead that made it, and the next life of rank 1 does not ask."""
    write = Write(version=0, unit=0, kind=COMPUTE, digest="d")
    lead.attach(0, spec, history=SILENT)
    lead.attach(1, spec)
    asked = [lead.write(0, write)] if asks_first else []
    lead.know_write(1, write).result(WAIT)
    assert [future.result(WAIT) for future in asked or [lead.write(0, write)]] == [None]
    assert [call for peer in peers for call in peer.calls] == []
    norm = lead.finish(report(1), None)
    assert lead.finish(report(0), None).result(WAIT) == norm.result(WAIT)


def test_a_write_that_a_rank_says_is_made_is_not_taken_for_a_later_one(
    lead: StepLead, peers: list[WatchedPeer], spec: ModelSpec
) -> None:
    """Weights that are exchanged and put back, and exchanged again within one version, as averages of them are."""
    one, other = (Write(version=0, unit=0, kind=COMPUTE, digest=digest) for digest in ("average", "own"))
    for rank in range(2):
        lead.attach(rank, spec)
    for write in (one, other):
        asked = [lead.write(rank, write) for rank in range(2)]
        assert [future.result(WAIT) for future in asked] == [None, None]
    lead.lose(1)
    lead.attach(1, spec)
    for write in (one, other):
        lead.know_write(1, write).result(WAIT)
    again = lead.write(0, one)
    assert not again.done(), "rank 1 has not asked for it"
    assert [future.result(WAIT) for future in (lead.write(1, one), again)] == [None, None]
    assert peers[0].calls == ["write 1 average", "write 2 own", "write 3 average"]


def test_a_write_that_ranks_know_to_be_made_while_owners_make_it_again_is_answered_once_they_have(
    lead: StepLead, peers: list[WatchedPeer], spec: ModelSpec
) -> None:
    write = Write(version=0, unit=0, kind=COMPUTE, digest="d")
    for rank in range(2):
        lead.attach(rank, spec, history=SILENT)
    asked = [lead.write(rank, write) for rank in range(2)]
    lead.know_write(1, write).result(WAIT)
    assert [future.result(WAIT) for future in asked] == [None, None]
    assert [call for peer in peers for call in peer.calls] == ["write 1 d", "write 1 d"]


@pytest.mark.parametrize(
    "outcome", [CheckpointInfo(path="p", step=0, digest="d"), CheckpointWriteError("the disk is full")]
)
def test_the_end_of_a_save_reaches_ranks_that_have_not_heard(
    lead: StepLead, spec: ModelSpec, outcome: CheckpointInfo | CheckpointWriteError, tmp_path: Path
) -> None:
    directory = tmp_path / checkpoint_name(0)
    made, error = (outcome, None) if isinstance(outcome, CheckpointInfo) else (None, outcome)
    saved = EndedSave(number=3, step=0, directory=str(directory), checkpoint=made, failure=error)
    lead.attach(0, spec, history=LeadHistory(saved=saved))
    lead.attach(1, spec, history=SILENT)
    asked = lead.save(1, 0, directory, ())
    if isinstance(outcome, CheckpointInfo):
        assert asked.result(WAIT) == outcome
    else:
        with pytest.raises(CheckpointWriteError, match="the disk is full"):
            asked.result(WAIT)
    again = [lead.save(rank, 0, directory, ()) for rank in range(2)]  # from here on saves are new ones
    assert {future.result(WAIT).path for future in again} == {str(directory)}


def test_a_rank_that_dies_after_it_was_heard_asks_again_for_a_checkpoint_that_is_made(
    lead: StepLead, peers: list[WatchedPeer], spec: ModelSpec, tmp_path: Path
) -> None:
    directory, made = tmp_path / checkpoint_name(0), CheckpointInfo(path="p", step=0, digest="d")
    for rank in range(2):
        lead.attach(
            rank,
            spec,
            history=LeadHistory(saved=EndedSave(number=1, step=0, directory=str(directory), checkpoint=made)),
        )
    lead.lose(1)
    lead.attach(1, spec)
    assert lead.save(1, 0, directory, ()).result(WAIT) == made
    assert [call for peer in peers for call in peer.calls] == []


def test_a_checkpoint_that_was_made_but_not_told_is_found(
    lead: StepLead, peers: list[WatchedPeer], spec: ModelSpec, tmp_path: Path
) -> None:
    directory = tmp_path / checkpoint_name(0)
    files = [(write_rank_state(staging_path(directory), rank, {}, {}),) for rank in range(2)]
    first = StepLead(peers)
    for rank in range(2):
        first.attach(rank, spec)
    info, _ = [saved.result(WAIT) for saved in [first.save(rank, 0, directory, files[rank]) for rank in range(2)]]
    for peer in peers:
        peer.calls.clear()
    for rank in range(2):
        lead.attach(rank, spec, history=SILENT)
    again = [lead.save(rank, 0, directory, files[rank]) for rank in range(2)]
    assert [future.result(WAIT) for future in again] == [info] * 2
    assert [call for peer in peers for call in peer.calls] == []


def test_a_commit_that_was_cut_is_taken_up(
    lead: StepLead, peers: list[WatchedPeer], spec: ModelSpec, tmp_path: Path
) -> None:
    """The predecessor had taken the staged files of all, ranks' too, which only their ranks could write again."""
    directory = tmp_path / checkpoint_name(0)
    files = [(write_rank_state(staging_path(directory), rank, {}, {}),) for rank in range(2)]
    staging_path(directory).rename(taken_path(directory))
    for rank in range(2):
        lead.attach(rank, spec, history=SILENT)
    saved = [lead.save(rank, 0, directory, files[rank]) for rank in range(2)]
    assert saved[0].result(WAIT) == saved[1].result(WAIT)
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_an_owner_that_no_rank_has_met_writes_its_file_once_one_has(tmp_path: Path) -> None:
    """A successor, which the new lead may ask before a rank attaches. (This one has no values, and says so then.)"""
    spec, service = make_spec(1), ShardService(0, 1)
    written = service.write_checkpoint(0, tmp_path / checkpoint_name(0))
    assert not written.done()
    service.attach(0, spec)
    with pytest.raises(StoreError, match="'emb' is at v-1, v0 cannot be saved"):
        written.result(WAIT)
    service.close()
