"""Checkpoints beside the training, at the lead: what a step waits for, what waits for the checkpoint, and what a
successor of the lead makes of one that had begun."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from rayzero.checkpoint import commit_checkpoint, staging_path, write_rank_state
from rayzero.checkpoint.manifest import MANIFEST
from rayzero.concurrency.futures import settle
from rayzero.errors import CheckpointAbandonedError, StepMismatchError
from rayzero.lead.lead import StepLead
from rayzero.protocol.messages import BegunSave, CheckpointInfo, FileEntry, LeadHistory, NormParts
from tests.store.toy import WAIT, make_spec

from .test_lead import WatchedPeer, inputs, lead_of, report

SPEC = make_spec(2)


def staged(directory: Path, rank: int) -> tuple[FileEntry]:
    return (write_rank_state(staging_path(directory), rank, {}, {}),)


def begin(lead: StepLead, directory: Path, step: int = 0) -> list[Future[None]]:
    return [lead.begin_save(rank, step, directory, staged(directory, rank)) for rank in range(2)]


def ends(lead: StepLead, directory: Path, step: int = 0) -> list[Future[CheckpointInfo]]:
    files = [write_rank_state(directory.parent / "elsewhere", rank, {}, {}) for rank in range(2)]
    return [lead.save(rank, step, directory, (files[rank],), begun=True) for rank in range(2)]


def take_step(lead: StepLead, step: int) -> None:
    for rank in range(2):
        lead.finish(report(rank, step), inputs())


def hold_files(peers: list[WatchedPeer]) -> list[Future[FileEntry]]:
    """Owners' next files are written only when these futures say so."""
    files: list[Future[FileEntry]] = [Future() for _ in peers]
    for peer, file in zip(peers, files, strict=True):
        peer.answers.append(file)
    return files


def write_held(peers: list[WatchedPeer], files: list[Future[FileEntry]], directory: Path, step: int = 0) -> None:
    for peer, file in zip(peers, files, strict=True):
        settle(file, peer.service.write_checkpoint(step, directory).result(WAIT))


def test_a_step_waits_until_owners_keep_the_version_and_not_for_their_files(tmp_path: Path) -> None:
    directory = tmp_path / "step"
    with lead_of(SPEC) as (lead, peers):
        acks: list[Future[None]] = [Future(), Future()]
        for peer, ack in zip(peers, acks, strict=True):
            peer.begins.append(ack)
        files = hold_files(peers)
        begun = begin(lead, directory)
        take_step(lead, 0)
        settle(acks[0], None)
        assert not any(future.done() for future in begun)
        assert all("apply 0" not in peer.calls for peer in peers)
        peers[0].service.begin_checkpoint(0, directory).result(WAIT)
        peers[1].service.begin_checkpoint(0, directory).result(WAIT)
        settle(acks[1], None)
        for future in begun:
            future.result(WAIT)
        assert lead.decision(0).result(WAIT).step == 0
        take_step(lead, 1)
        assert lead.decision(1).result(WAIT).step == 1
        ended = ends(lead, directory)
        assert not any(future.done() for future in ended)
        write_held(peers, files, directory)
        infos = [future.result(WAIT) for future in ended]
        assert infos[0] == infos[1]
        assert infos[0].step == 0
        assert ends(lead, directory)[1].result(WAIT) == infos[0]  # asked late
    assert directory in tmp_path.iterdir()


@pytest.mark.parametrize("beside", [True, False])
def test_a_checkpoint_has_the_rates_that_made_it_though_ranks_ask_before_the_step_is_decided(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go on as soon as they have committed, and ask for the version that is to come."""
    directory, rates = tmp_path / "step", ({**SPEC.hyper[0], "lr": 0.5},)
    with lead_of(SPEC) as (lead, peers):
        parts: Future[NormParts] = Future()
        monkeypatch.setattr(peers[1], "collect", lambda step, reports: parts)
        for rank in range(2):
            lead.finish(report(rank), replace(inputs(), hyper=rates))
        begun = begin(lead, directory, 1) if beside else []
        saved = [] if beside else [lead.save(rank, 1, directory, staged(directory, rank)) for rank in range(2)]
        assert not any(future.done() for future in (*begun, *saved))
        settle(parts, peers[1].service.collect(0, (report(0), report(1))).result(WAIT))
        for future in begun:
            future.result(WAIT)
        for info in [future.result(WAIT) for future in saved or ends(lead, directory, 1)]:
            assert info.step == 1
    assert json.loads((directory / MANIFEST).read_text())["hyper"] == list(rates)


def test_the_next_checkpoint_begins_when_owners_have_written_the_one_before(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with lead_of(SPEC) as (lead, peers):
        files = hold_files(peers)
        for future in begin(lead, first):
            future.result(WAIT)
        take_step(lead, 0)
        assert lead.decision(0).result(WAIT).step == 0
        begun = begin(lead, second, 1)
        take_step(lead, 1)
        assert not any(future.done() for future in begun)
        assert all(peer.calls.count("begin 1") == 0 and "apply 1" not in peer.calls for peer in peers)
        write_held(peers, files, first)
        for future in begun:
            future.result(WAIT)
        assert [future.result(WAIT).step for future in ends(lead, first) + ends(lead, second, 1)] == [0, 0, 1, 1]
        assert lead.decision(1).result(WAIT).step == 1


def test_owners_that_are_to_change_wait_for_the_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "step"
    with lead_of(SPEC) as (lead, peers):
        files = hold_files(peers)
        for future in begin(lead, directory):
            future.result(WAIT)
        held = lead.hold()
        assert not held.done()
        ended = ends(lead, directory)  # asked while the lead is held: answered all the same
        write_held(peers, files, directory)
        assert held.result(WAIT) == 0
        assert {future.result(WAIT).step for future in ended} == {0}


def test_a_rank_that_comes_back_and_begins_it_again_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "step"
    with lead_of(SPEC) as (lead, peers):
        files = hold_files(peers)
        for future in begin(lead, directory):
            future.result(WAIT)
        lead.lose(1)
        lead.attach(1, SPEC)
        lead.begin_save(1, 0, directory, staged(directory, 1)).result(WAIT)
        write_held(peers, files, directory)
        for future in ends(lead, directory):
            assert future.result(WAIT).step == 0
        lead.lose(0)
        lead.attach(0, SPEC)
        lead.begin_save(0, 0, directory, staged(directory, 0)).result(WAIT)  # it is complete
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "step"]


def test_a_rank_that_goes_on_without_it_fails_the_step_by_name(tmp_path: Path) -> None:
    with lead_of(SPEC) as (lead, _):
        begun = lead.begin_save(0, 0, tmp_path / "step", staged(tmp_path / "step", 0))
        lead.finish(report(1), inputs())
        with pytest.raises(StepMismatchError, match="finished step 0 without saving it"):
            lead.finish(report(0), inputs()).result(WAIT)
        assert begun.exception(WAIT) is not None


@pytest.mark.parametrize("committed", [False, True])
def test_a_successor_of_the_lead_begins_nothing_again_that_a_rank_knows_to_be_begun(
    committed: bool, tmp_path: Path
) -> None:
    """Rank 0 has had the answer of the lead that died, and may be steps further; rank 1 has not."""
    directory = tmp_path / "step"
    with lead_of(SPEC) as (_, peers):
        files = [staged(directory, rank)[0] for rank in range(2)]
        if committed:
            owners = [peer.service.write_checkpoint(0, directory).result(WAIT) for peer in peers]
            facts = {"step": 0, "spec": SPEC, "hyper": SPEC.hyper, "slot_steps": {}}
            made = commit_checkpoint(directory, owner_files=owners, rank_files=files, **facts)
        lead = StepLead(peers)
        for peer in peers:
            peer.lead = lead
        history = LeadHistory(begun=BegunSave(number=1, step=0, directory=str(directory)))
        lead.attach(0, SPEC, history=history, succeeds=True)
        again = lead.begin_save(1, 0, directory, (files[1],))  # waits until both are heard
        lead.attach(1, SPEC, history=LeadHistory(), succeeds=True)
        again.result(WAIT)
        for rank in range(2):
            ended = lead.save(rank, 0, directory, (files[rank],), begun=True)
            if committed:
                assert ended.result(WAIT) == made
            else:
                with pytest.raises(CheckpointAbandonedError, match="the optimizer that leads the run died while v0"):
                    ended.result(WAIT)
        assert all("begin 0" not in peer.calls for peer in peers)
        take_step(lead, 0)
        assert lead.decision(0).result(WAIT).step == 0
        lead.close()
    assert [path.name for path in tmp_path.iterdir()] == (["step"] if committed else [])
