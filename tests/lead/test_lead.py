"""The lead's decisions over real owners; owners that fail are wrapped, not imitated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from store.toy import HYPER, WAIT, flatten, initial_values, make_spec

from rayzero.checkpoint import commit_checkpoint, owner_file_name, staging_path, write_rank_state
from rayzero.concurrency.futures import fail, failed, settle, settled
from rayzero.errors import (
    CheckpointError,
    ConfigError,
    StepMismatchError,
    StoreClosedError,
    StoreError,
    TransferError,
    UnsupportedError,
)
from rayzero.lead import checkpoints
from rayzero.lead.lead import StepLead
from rayzero.owner.service import ShardService
from rayzero.protocol.messages import (
    COMPUTE,
    Decision,
    Edit,
    EditKind,
    FileEntry,
    FinishReport,
    ModelSpec,
    NormParts,
    StepInputs,
    Write,
)
from rayzero.protocol.ownership import Ownership
from rayzero.telemetry.names import DECIDED_STEPS, LOSS_SCALE
from rayzero.telemetry.recorder import MemoryRecorder


@dataclass
class WatchedPeer:
    """An owner whose calls are noted, and whose answers can be made to fail or to come late."""

    service: ShardService
    lead: StepLead | None = None
    calls: list[str] = field(default_factory=list)
    fails: dict[str, Exception] = field(default_factory=dict)
    recorded: list[Decision] = field(default_factory=list)  # what the lead knew when it told this owner
    answers: list[Future[FileEntry]] = field(default_factory=list)  # to its next saves, which it does not make itself
    hold_acks: bool = False
    acks: list[Future[None]] = field(default_factory=list)
    begins: list[Future[None]] = field(default_factory=list)
    broken: str | None = None

    def collect(self, step: int, reports: tuple[FinishReport, ...]) -> Future[NormParts]:
        self.calls.append(f"collect {step}")
        return failed(self.fails["collect"]) if "collect" in self.fails else self.service.collect(step, reports)

    def apply(self, decision: Decision) -> Future[None]:
        self.calls.append(f"apply {decision.step}")
        assert self.lead is not None
        self.recorded.append(self.lead.decision(decision.step).result(0))
        ack: Future[None] = Future()
        self.acks.append(ack)
        if "apply" in self.fails:
            fail(ack, self.fails["apply"])
        else:
            self.service.apply(decision).result(0)
            if not self.hold_acks:
                settle(ack, None)
        return ack

    def trouble(self) -> str | None:
        return self.broken

    def begin_checkpoint(self, step: int, directory: Path) -> Future[None]:
        self.calls.append(f"begin {step}")
        return self.begins.pop() if self.begins else self.service.begin_checkpoint(step, directory)

    def write_checkpoint(self, step: int, directory: Path) -> Future[FileEntry]:
        self.calls.append(f"save {step}")
        if "save" in self.fails:
            return failed(self.fails["save"])
        return self.answers.pop() if self.answers else self.service.write_checkpoint(step, directory)

    def write(self, number: int, write: Write) -> Future[None]:
        self.calls.append(f"write {number} {write.digest}")
        return settled(None)

    def abort(self, error: StoreError) -> None:
        self.calls.append(f"abort {type(error).__name__}")
        self.service.abort(error)


@contextmanager
def lead_of(
    spec: ModelSpec, num_owners: int = 2, recorder: MemoryRecorder | None = None, doors: int = 0
) -> Iterator[tuple[StepLead, list[WatchedPeer]]]:
    """A lead over loaded owners, the last ``doors`` of them without shards; every rank has attached."""
    ownership = Ownership(num_owners, doors=doors)
    peers = [WatchedPeer(ShardService(owner, num_owners, ownership=ownership)) for owner in range(num_owners)]
    lead = StepLead(peers, recorder=recorder, doors=ownership.door_numbers)
    try:
        values = initial_values(spec)
        for peer in peers:
            peer.lead = lead
            for rank in range(spec.world_size):
                peer.service.attach(rank, spec)
            for shard in spec.layout.shards:
                unit = spec.layout.units[shard.unit]
                if shard.index in peer.service._attached().model.shards:
                    flat = flatten(unit, values, unit.dtype)
                    peer.service.load(shard.index, flat[shard.start : shard.stop].float())
        for rank in range(spec.world_size):
            lead.attach(rank, spec)
        yield lead, peers
    finally:
        lead.close()
        for peer in peers:
            peer.service.close()


def report(rank: int, step: int = 0, attempt: int = 0) -> FinishReport:
    """A rank that pushed nothing."""
    return FinishReport(step=step, attempt=attempt, rank=rank, counts=(0, 0, 0))


def inputs() -> StepInputs:
    """A clip, with the options of ``make_spec``."""
    return StepInputs(edits=(Edit(EditKind.CLIP_NORM, 1.0),), hyper=(HYPER,))


def test_the_record_is_written_before_any_owner_is_told() -> None:
    with lead_of(make_spec(2)) as (lead, peers):
        deciding = lead.decision(0)  # asked before it is made: done once every owner has it
        norms = [lead.finish(report(rank), inputs()) for rank in range(2)]
        assert [norm.result(WAIT).total for norm in norms] == [0.0, 0.0]
        decision = deciding.result(WAIT)
        for peer in peers:
            assert peer.calls == ["collect 0", "apply 0"]
            assert peer.recorded == [decision]


def test_every_decision_is_told_once_with_the_loss_scale_that_ranks_took_back() -> None:
    spec, recorder = make_spec(2), MemoryRecorder()
    with lead_of(spec, recorder=recorder) as (lead, _):
        for step, scale in enumerate((1024.0, 512.0)):
            scaled = StepInputs(edits=(Edit(EditKind.UNSCALE, 1 / scale), *inputs().edits), hyper=spec.hyper)
            for rank in range(2):
                lead.finish(report(rank, step), scaled)
            lead.decision(step).result(WAIT)
            assert recorder.gauge(LOSS_SCALE) == scale
        assert recorder.total(DECIDED_STEPS) == 2


def test_the_next_step_is_collected_once_every_owner_took_the_decision_in() -> None:
    with lead_of(make_spec(1)) as (lead, peers):
        peers[1].hold_acks = True
        lead.finish(report(0), inputs()).result(WAIT)
        later = lead.finish(report(0, step=1), inputs())
        assert not later.done()
        assert peers[0].calls == ["collect 0", "apply 0"]
        peers[1].hold_acks = False
        settle(peers[1].acks[0], None)
        later.result(WAIT)
        assert peers[0].calls == ["collect 0", "apply 0", "collect 1", "apply 1"]


def test_messages_that_come_twice_change_nothing() -> None:
    with lead_of(make_spec(2)) as (lead, (peer, _)):
        norm = lead.finish(report(0), None)
        assert lead.finish(report(0), None) is norm
        lead.finish(report(1), None)
        commit = lead.commit(0, 0, inputs())
        assert lead.commit(0, 0, inputs()) is commit
        lead.commit(1, 0, inputs()).result(WAIT)
        assert lead.commit(1, 0, inputs()).result(WAIT) == commit.result(WAIT)
        assert peer.calls == ["collect 0", "apply 0"]


def test_an_option_of_another_class_that_is_no_number_is_refused_by_name() -> None:
    with lead_of(make_spec(1, optimizer="torch.optim.sgd:SGD", hyper=({"lr": 0.1, "momentum": 0.9},))) as (lead, _):
        wrong = StepInputs(edits=(), hyper=({"lr": 0.1, "momentum": None},))
        with pytest.raises(ConfigError, match=r"^momentum of parameter group 0 must be a number, got None$"):
            lead.finish(report(0), wrong).result(WAIT)


def test_the_options_a_run_starts_with_are_refused_by_name() -> None:
    spec = make_spec(1, hyper=(HYPER, HYPER | {"lr": "x"}))
    service = ShardService(0, 1)
    with pytest.raises(ConfigError, match=r"^lr of parameter group 1 must be a number, got 'x'$"):
        service.attach(0, spec)
    service.close()


def test_calls_out_of_order_are_refused_by_name() -> None:
    with lead_of(make_spec(2)) as (lead, _):
        with pytest.raises(StepMismatchError, match="rank 0 committed step 0 before its finish"):
            lead.commit(0, 0, inputs()).result(WAIT)
        with pytest.raises(StepMismatchError, match="rank 0 discards attempt 0 of step 0, not finished so"):
            lead.discard(0, 0, 0).result(WAIT)
        lead.finish(report(0), None)
        with pytest.raises(StepMismatchError, match="rank 0 discards step 0 before it has its norm"):
            lead.discard(0, 0, 0).result(WAIT)
        with pytest.raises(StepMismatchError, match="rank 0 finished step 0 twice with different counts; a backward"):
            lead.finish(report(0, attempt=1), None).result(WAIT)
        with pytest.raises(StoreError, match="rank 7 has not attached"):
            lead.finish(report(7), None).result(WAIT)
        lead.finish(report(1), None).result(WAIT)
        lead.discard(0, 0, 0).result(WAIT)
        with pytest.raises(StepMismatchError, match="rank 0 finished attempt 0 of step 0, which it discarded"):
            lead.finish(report(0), None).result(WAIT)


def test_hyper_parameters_that_cannot_be_applied_are_refused_before_the_step_is_decided() -> None:
    with lead_of(make_spec(1)) as (lead, (peer, _)):
        bad = [
            ((), StepMismatchError, "have 0 parameter groups, the run was attached with 1"),
            ((HYPER | {"amsgrad": True},), UnsupportedError, "amsgrad of parameter group 0 was switched on"),
            ((HYPER | {"lr": -1.0},), ValueError, "lr=-1.0"),
            ((HYPER | {"lr": "x"},), ConfigError, "^lr of parameter group 0 must be a number, got 'x'$"),
            ((HYPER | {"betas": [0.9]},), ConfigError, r"^betas of parameter group 0 must be 2 numbers, got \[0.9\]$"),
        ]
        for hyper, error, message in bad:
            with pytest.raises(error, match=message):
                lead.finish(report(0), StepInputs(edits=(), hyper=hyper)).result(WAIT)
        assert peer.calls == []
        lead.finish(report(0), inputs()).result(WAIT)


@pytest.mark.parametrize("verb", ["collect", "apply"])
def test_an_owner_that_fails_fails_every_wait_and_every_owner(verb: str) -> None:
    with lead_of(make_spec(2)) as (lead, peers):
        peers[1].fails[verb] = TransferError("optimizer 1 is gone")
        lead.finish(report(0), None)
        lead.finish(report(1), None)
        commits = [lead.commit(rank, 0, inputs()) for rank in range(2)]
        for commit in commits:
            with pytest.raises(TransferError, match="optimizer 1 is gone"):
                commit.result(WAIT)
        assert all(peer.calls[-1] == "abort TransferError" for peer in peers)
        with pytest.raises(TransferError):
            lead.finish(report(0, step=1), None).result(WAIT)


def test_a_door_has_no_part_in_a_step_a_write_or_a_checkpoint_and_hears_of_a_failure(tmp_path: Path) -> None:
    spec, directory = make_spec(1), tmp_path / "step-000000"
    with lead_of(spec, 3, doors=1) as (lead, (*owners, door)):
        lead.save(0, 0, directory, staged(directory, 0)).result(WAIT)
        assert sorted(file.name for file in directory.glob("owner-*")) == [owner_file_name(owner) for owner in range(2)]
        lead.write(0, Write(version=0, unit=0, kind=COMPUTE, digest="d")).result(WAIT)
        lead.finish(report(0), inputs()).result(WAIT)
        lead.decision(0).result(WAIT)
        assert [peer.calls for peer in owners] == [["save 0", "write 1 d", "collect 0", "apply 0"]] * 2
        assert door.calls == []
        lead.owner_failed(StoreError("an owner is gone"))
        assert [peer.calls[-1] for peer in (*owners, door)] == ["abort StoreError"] * 3


def staged(directory: Path, rank: int) -> tuple[FileEntry]:
    return (write_rank_state(staging_path(directory), rank, {}, {}),)


def test_ranks_hear_of_a_failed_save_when_every_owner_has_answered_and_nothing_is_staged(tmp_path: Path) -> None:
    """An owner that still writes would put its file into the folder of the next try."""
    spec, directory = make_spec(2), tmp_path / "best"
    with lead_of(spec) as (lead, peers):
        writes: Future[FileEntry] = Future()
        peers[0].fails["save"] = OSError("disk full")
        peers[1].answers.append(writes)
        saves = [lead.save(rank, 0, directory, staged(directory, rank)) for rank in range(2)]
        assert not any(save.done() for save in saves)
        gone: list[bool] = []
        saves[0].add_done_callback(lambda _: gone.append(not any(tmp_path.iterdir())))
        peers[1].service.write_checkpoint(0, directory).add_done_callback(lambda file: settle(writes, file.result()))
        for save in saves:
            with pytest.raises(OSError, match="disk full"):
                save.result(WAIT)
        assert gone == [True]
        again = [lead.save(rank, 0, tmp_path / "other", staged(tmp_path / "other", rank)) for rank in range(2)]
        with pytest.raises(OSError, match="disk full"):  # asked anew, not told what the first try was
            again[1].result(WAIT)
        assert peers[0].calls == ["save 0", "save 0"]


def test_ranks_that_come_back_while_their_checkpoint_is_committed_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stage their files again and ask; the files that they find staged may be those that are being committed."""
    spec, directory = make_spec(2), tmp_path / "best"
    begun, goes_on = threading.Event(), threading.Event()

    def commit(*args: Any, **facts: Any) -> Any:
        begun.set()
        assert goes_on.wait(WAIT)
        return commit_checkpoint(*args, **facts)

    monkeypatch.setattr(checkpoints, "commit_checkpoint", commit)
    with lead_of(spec) as (lead, peers):
        for rank in range(2):
            lead.save(rank, 0, directory, staged(directory, rank))
        assert begun.wait(WAIT)
        for rank in range(2):
            lead.lose(rank)
            lead.attach(rank, spec)
        saves = [lead.save(rank, 0, directory, staged(directory, rank)) for rank in range(2)]
        goes_on.set()
        assert {save.result(WAIT).step for save in saves} == {0}
        assert [peer.calls for peer in peers] == [["save 0"]] * 2
    assert list(tmp_path.iterdir()) == [directory]


def test_a_save_whose_hyper_parameters_are_gone_fails_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first step a resumed run has them in the checkpoint it began with, which may be removed meanwhile."""
    spec, directory = make_spec(1), tmp_path / "best"
    with lead_of(spec) as (lead, _):
        monkeypatch.setattr(lead, "_spec", replace(spec, restore_from=str(tmp_path / "gone")))
        with pytest.raises(CheckpointError, match="gone"):
            lead.save(0, 0, directory, staged(directory, 0)).result(WAIT)
        assert not list(tmp_path.iterdir())
        assert lead.finish(report(0), inputs()).result(WAIT).step == 0


@pytest.mark.parametrize("num_asked", [1, 2])
def test_a_run_that_fails_during_a_save_leaves_nothing_of_it(tmp_path: Path, num_asked: int) -> None:
    """With both ranks asking, owners write: the one that answers last has what was staged removed."""
    spec, directory = make_spec(2), tmp_path / "best"
    with lead_of(spec) as (lead, peers):
        writes: Future[FileEntry] = Future()
        (entry,) = staged(directory, 0)
        peers[0].answers, peers[1].answers = [settled(entry)], [writes]
        saves = [lead.save(rank, 0, directory, staged(directory, rank)) for rank in range(num_asked)]
        lead.close()
        for save in saves:
            with pytest.raises(StoreClosedError):
                save.result(0)
        if num_asked == 2:
            assert staging_path(directory).exists()
            settle(writes, entry)
        assert not list(tmp_path.iterdir())


def test_a_decision_waits_until_the_version_before_it_is_saved(tmp_path: Path) -> None:
    with lead_of(make_spec(2)) as (lead, (peer, _)):
        first = lead.save(0, 0, tmp_path / "step-000000", ())
        for norm in [lead.finish(report(0), inputs()), lead.finish(report(1), None)]:
            norm.result(WAIT)
        assert lead.describe() == "v0 is being saved: rank 1 has not asked for it"
        assert "apply 0" not in peer.calls
        lead.save(1, 0, tmp_path / "step-000000", ())
        first.result(WAIT)
        lead.commit(1, 0, inputs()).result(WAIT)
        lead.decision(0).result(WAIT)
        assert peer.calls == ["collect 0", "save 0", "apply 0"]


@pytest.mark.parametrize("save_first", [True, False])
@pytest.mark.parametrize("commits", [True, False])
def test_a_save_that_another_rank_has_gone_past_fails_at_once(tmp_path: Path, save_first: bool, commits: bool) -> None:
    with lead_of(make_spec(3)) as (lead, peers):
        calls = [
            lambda: lead.save(0, 0, tmp_path / "step-000000", ()),
            lambda: lead.finish(report(1), inputs() if commits else None),
        ]
        for waiting in [call() for call in (calls if save_first else reversed(calls))]:
            with pytest.raises(
                StepMismatchError,
                match=r"^rank 0 has asked to save v0, but rank 1 has finished step 0 without saving it; every rank",
            ):
                waiting.result(0)
        assert all(peer.calls[-1] == "abort StepMismatchError" for peer in peers)


def test_a_rank_that_has_its_norm_may_still_save_until_it_commits(tmp_path: Path) -> None:
    with lead_of(make_spec(2)) as (lead, _):
        for norm in [lead.finish(report(rank), None) for rank in range(2)]:
            norm.result(WAIT)
        save = lead.save(0, 0, tmp_path / "step-000000", ())
        assert not save.done()
        commit = lead.commit(1, 0, inputs())
        for waiting in (save, commit):
            with pytest.raises(StepMismatchError, match="rank 1 has finished step 0 without saving"):
                waiting.result(0)


def test_old_decisions_are_forgotten() -> None:
    with lead_of(make_spec(1), 1) as (lead, _):
        for step in range(10):
            lead.finish(report(0, step=step), inputs()).result(WAIT)
        assert lead.decision(9).result(WAIT).step == 9
        with pytest.raises(StoreError, match="the decision of step 1 is no longer kept"):
            lead.decision(1).result(WAIT)


def test_it_says_who_is_waited_for() -> None:
    with lead_of(make_spec(3)) as (lead, _):
        assert lead.describe() == "ranks [0, 1, 2] have not finished step 0"
        lead.finish(report(0), None)
        lead.finish(report(2), None)
        assert lead.describe() == "rank 1 has not finished step 0"
        lead.finish(report(1), None).result(WAIT)
        lead.commit(1, 0, inputs())
        assert lead.describe() == "ranks [0, 2] have not committed step 0"


def test_it_says_which_owner_it_has_no_link_to() -> None:
    with lead_of(make_spec(1)) as (lead, peers):
        peers[1].broken = "optimizer 1 at b:1: its link is down since 6.2 s (connection refused)"
        assert lead.describe() == f"rank 0 has not finished step 0; {peers[1].broken}"
        peers[1].broken = None
        assert lead.describe() == "rank 0 has not finished step 0"
