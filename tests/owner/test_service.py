"""One owner, event by event. A held publish listener stops the updater where a schedule needs it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from store.toy import WAIT, make_spec, random_grads

from owner.owner import Gate, Owner, counted, owner_of
from rayzero.checkpoint.tensor_file import as_bytes
from rayzero.errors import (
    MemoryPlanError,
    RankLeftError,
    StateLostError,
    StepMismatchError,
    StoreClosedError,
    StoreError,
)
from rayzero.owner.gradients import contributions
from rayzero.owner.gradients.landing import Landing
from rayzero.owner.memory import HostMemory
from rayzero.owner.owned_model import OwnerTerms
from rayzero.owner.service import ShardService
from rayzero.owner.shard import OwnedShard, ShardWork, Task, Updater, allocate
from rayzero.protocol.messages import MASTER, Action, FileEntry, Norm, Published, Record, Write
from rayzero.telemetry.names import OPTIMIZER_PARAMS
from rayzero.telemetry.recorder import MemoryRecorder

BF16 = torch.bfloat16


# ---- landing memory


def test_bytes_that_came_elsewhere_are_copied_when_no_repeat_can_have_the_memory(monkeypatch) -> None:
    """A caller that has given up may still be copying when its repeat comes."""
    with owner_of(make_spec(1, accumulation_steps=2)) as owner:
        grads = random_grads(owner.spec, 1)
        push, absorb = owner.header(0, 0, 0, grads), Landing.absorb
        repeats = []

        def repeated(landing: Landing, *args: Any) -> None:
            repeats.append(owner.service.reserve_when_free(push, 0))
            assert not repeats[0].done()
            absorb(landing, *args)

        monkeypatch.setattr(Landing, "absorb", repeated)
        memory = owner.service.reserve(push, 0)
        assert memory is not None
        owner.service.landed(push, 0, owner.part(0, grads).to(BF16))
        assert repeats[0].result(WAIT) is None
        assert torch.equal(memory, owner.part(0, grads).to(BF16).float())


def test_staging_is_as_much_as_two_largest_units_and_comes_back() -> None:
    with owner_of(make_spec(1, accumulation_steps=50, dtypes=[BF16] * 3)) as owner:
        grads = random_grads(owner.spec, 1)
        for seq in range(3):
            headers = [(owner.header(0, s.unit, 0, grads, seq=seq), s.index) for s in owner.spec.layout.shards]
            reserved = [owner.service.reserve(push, shard) for push, shard in headers]  # 11 of 2 x 7 entries
            assert all(memory is not None for memory in reserved)
            for (push, shard), memory in zip(headers, reserved, strict=True):
                assert memory is not None
                memory.copy_(owner.part(shard, grads))
                owner.service.landed(push, shard)
        parts = owner.collect(pushes=3).result(WAIT).parts
        expected = sum(float((3 * grad.double()).square().sum()) for grad in grads.values())
        assert sum(part[2] for part in parts) == pytest.approx(expected, rel=1e-5)


def test_the_next_push_of_a_unit_waits_for_the_one_before() -> None:
    with owner_of(make_spec(1, accumulation_steps=2)) as owner:
        grads = random_grads(owner.spec, 1)
        second = owner.service.reserve_when_free(owner.header(0, 0, 0, grads, seq=1), 0)
        assert not second.done()
        owner.push_shard(owner.header(0, 0, 0, grads, seq=0), 0, grads)
        assert second.result(WAIT) is not None


def test_a_push_that_cannot_be_is_refused() -> None:
    with owner_of(make_spec(1, frozen=[2])) as owner:
        grads = random_grads(owner.spec, 1)
        with pytest.raises(StoreError, match=r"pushed unit 1 .* to shard 0 of 'emb'"):
            owner.service.reserve(owner.header(0, 1, 0, grads), 0)
        with pytest.raises(StoreError, match="which is frozen"):
            owner.service.reserve(owner.header(0, 2, 0, grads), 9)
        with pytest.raises(StoreError, match="does not have shard 99"):
            owner.service.reserve(owner.header(0, 0, 0, grads), 99)


# ---- rule 7: update, publish, and when gradient memory is free


def test_shards_are_published_one_by_one_in_forward_order() -> None:
    spec = make_spec(1)
    with owner_of(spec) as owner:
        gate = Gate(owner.service)
        owner.take_step([random_grads(spec, 1)])
        owner.read(10, 1)
        owner.service.close()
        assert sorted(entry for batch in gate.seen for entry in batch if entry[1] == 0) == [(i, 0) for i in range(11)]
        assert [batch for batch in gate.seen if batch[0][1] == 1] == [[(i, 1)] for i in range(11)]


def test_a_shards_gradient_memory_is_free_exactly_when_its_new_version_is_published() -> None:
    spec = make_spec(2)
    with owner_of(spec) as owner:
        gate = Gate(owner.service, hold_at=(3, 1))
        grads = random_grads(spec, 1)
        owner.take_step([grads, grads])
        gate.wait()  # shards 0..3 are published, the updater stands before shard 4
        assert owner.service.read(3, 1, "compute").done()
        assert not owner.service.read(4, 1, "compute").done()
        free = [owner.service.reserve_when_free(owner.header(1, s.unit, 1, grads), s.index) for s in spec.layout.shards]
        assert [future.done() for future in free] == [True] * 4 + [False] * 7
        gate.release()
        assert all(future.result(WAIT) is not None for future in free)


def test_a_push_for_a_step_that_is_not_open_here_yet_waits_for_its_decision() -> None:
    with owner_of(make_spec(1)) as owner:
        grads = random_grads(owner.spec, 1)
        early = owner.service.reserve_when_free(owner.header(0, 0, 1, grads), 0)
        owner.push(0, grads)
        owner.collect().result(WAIT)
        assert not early.done()
        owner.service.apply(owner.decision(action=Action.SKIP)).result(WAIT)
        assert early.result(WAIT) is not None


def test_listeners_are_told_the_version_that_the_content_is_from() -> None:
    """Who has a copy of that content need not fetch it again."""
    spec = make_spec(1)
    heard: list[Published] = []
    with owner_of(spec) as owner:
        owner.service.on_publish(heard.extend)
        grads = random_grads(spec, 1)
        del grads["emb.weight"]  # all of unit 0: shards 0 and 1
        owner.take_step([grads])
        owner.push(0, grads, step=1)
        owner.collect(1).result(WAIT)
        owner.service.apply(owner.decision(1, action=Action.SKIP)).result(WAIT)
        owner.read(10, 2)
        assert [owner.service.content(shard) for shard in (0, 10)] == [0, 1]
        assert [owner.service.content_at(shard, 2) for shard in (0, 10)] == [0, 1]
        assert owner.service.content_at(0, 1) is None
    assert [each for each in heard if each.shard == 0] == [Published(0, version, 0) for version in range(3)]
    assert [each for each in heard if each.shard == 10] == [
        Published(10, 0, 0),
        Published(10, 1, 1),
        Published(10, 2, 1),
    ]
    assert len(heard) == 3 * len(spec.layout.shards)


def test_reads_of_a_version_under_update_are_refused() -> None:
    with owner_of(make_spec(1)) as owner:
        gate = Gate(owner.service, hold_at=(0, 1))
        owner.take_step([random_grads(owner.spec, 1)])
        gate.wait()
        with pytest.raises(StoreError, match="v0 is gone: shard 0 is at v1"):
            owner.read(0, 0)
        assert owner.service.read(1, 0, "compute").done()  # decided, but not touched yet
        assert owner.service.describe(5).startswith("v0 is published, the next update is queued")
        gate.release()


def test_waits_are_told_which_shard_is_updated() -> None:
    told: list[tuple[str, str]] = []
    with owner_of(make_spec(1)) as owner:
        rule = owner.service._attached().model.rule
        update = rule.update

        def updated(owned: OwnedShard, work: ShardWork) -> None:
            told.append((owner.service.describe(owned.shard.index), owner.service.describe(10)))
            update(owned, work)

        rule.update = updated  # type: ignore[method-assign]
        owner.take_step([random_grads(owner.spec, 1)])
        owner.read(10, 1)
        first = owner.service.shard(0).unit.name
    assert told[0] == (f"updating {first} shard 0", f"updating {first} shard 0 first")
    assert told[10][1] == told[10][0]


# ---- rule 5: decisions


def test_apply_is_idempotent_by_step() -> None:
    spec = make_spec(1)
    with owner_of(spec) as owner:
        grads = random_grads(spec, 1)
        owner.take_step([grads])
        owner.service.apply(owner.decision()).result(WAIT)
        owner.service.apply(owner.decision()).result(WAIT)
        once = owner.read_all(1)
        owner.take_step([grads], step=1)
        owner.service.apply(owner.decision(0)).result(WAIT)
        twice = owner.read_all(2)
    with owner_of(spec) as owner:
        owner.take_step([grads])
        assert all(map(torch.equal, owner.read_all(1), once))
        owner.take_step([grads], step=1)
        assert all(map(torch.equal, owner.read_all(2), twice))


def test_a_recorded_decision_is_redone_once_its_counted_pushes_are_there_again() -> None:
    spec = make_spec(2)
    grads = [random_grads(spec, rank) for rank in range(2)]
    with owner_of(spec) as owner:
        owner.take_step(grads)
        expected = owner.read_all(1)
    with owner_of(spec) as owner:
        record = Record(decision=owner.decision(), reports=owner.reports(), norm=Norm(step=0, total=1.0, finite=True))
        owner.push(0, grads[0])
        redone = owner.service.redo(record)
        with pytest.raises(TimeoutError):
            redone.result(0.05)
        owner.push(1, grads[1])
        redone.result(WAIT)
        assert all(map(torch.equal, owner.read_all(1), expected))
        owner.service.redo(record).result(WAIT)  # it was applied: nothing happens
        assert all(map(torch.equal, owner.read_all(1), expected))
        assert owner.service.decided_steps == 1


@pytest.mark.parametrize("told_first", [True, False])
def test_a_step_whose_counted_pushes_have_died_with_their_rank_ends_by_name(told_first: bool) -> None:
    spec = make_spec(2)
    with owner_of(spec) as owner:
        record = Record(decision=owner.decision(), reports=owner.reports(), norm=Norm(step=0, total=1.0, finite=True))
        owner.push(0, random_grads(spec, 0))
        if told_first:
            owner.service.lost_before(1, 1)
        redone = owner.service.redo(record)
        if not told_first:
            owner.service.lost_before(1, 1)
        with pytest.raises(StateLostError, match=r"before it had applied step 0, and so have ranks \[1\]"):
            redone.result(WAIT)


def test_what_a_rank_has_lost_is_not_missed_where_it_is_there() -> None:
    spec = make_spec(2)
    with owner_of(spec) as owner:
        owner.push(0, random_grads(spec, 0))
        owner.push(1, random_grads(spec, 1))
        owner.service.lost_before(1, 1)
        record = Record(decision=owner.decision(), reports=owner.reports(), norm=Norm(step=0, total=1.0, finite=True))
        owner.service.redo(record).result(WAIT)


def test_an_owner_has_settled_once_it_has_its_first_values_and_has_published_what_is_decided() -> None:
    spec = make_spec(1)
    with owner_of(spec, load=False) as owner:
        settled = owner.service.settled()
        for shard in spec.layout.shards:
            assert not settled.done()
            owner.service.load(shard.index, torch.zeros(shard.numel))
        assert settled.result(WAIT) == spec
        owner.take_step([random_grads(spec, 1)])
        owner.service.settled().result(WAIT)
        assert all(owner.service.content_at(shard.index, 1) == 1 for shard in spec.layout.shards)
    with owner_of(spec, load=False) as owner:
        settled = owner.service.settled()
        owner.service.abort(StoreError("the run has ended"))
        with pytest.raises(StoreError, match="the run has ended"):
            settled.result(WAIT)


def test_an_owner_without_shards_takes_a_later_decision_once_its_record_is_redone() -> None:
    """As a successor it cannot read in its memory which step is open, and the lead's orders may come first."""
    spec = make_spec(1)
    service = ShardService(99, 100)
    service.attach(0, spec)
    owner = Owner(service, spec)
    applied = service.apply(owner.decision(39))
    assert not applied.done()
    norm = Norm(step=39, total=1.0, finite=True)
    service.redo(Record(decision=owner.decision(39), reports=owner.reports(39), norm=norm)).result(WAIT)
    applied.result(WAIT)
    assert owner.collect(40).result(WAIT).parts == ()
    service.close()


def test_no_decision_is_made_while_an_owner_lacks_an_earlier_one() -> None:
    """So two records are enough for any successor (``RECORDS``): norm parts come after the updates before them."""
    with owner_of(make_spec(1)) as owner:
        gate = Gate(owner.service, hold_at=(0, 1))
        owner.take_step([random_grads(owner.spec, 1)])
        gate.wait()
        parts = owner.service.collect(1, owner.reports(1, pushes=0))
        with pytest.raises(TimeoutError):
            parts.result(0.05)
        gate.release()
        parts.result(WAIT)
        assert min(owned.published for owned in owner.service._shards().values()) == 1


def test_decisions_that_do_not_fit_are_refused() -> None:
    spec = make_spec(1)
    with owner_of(spec) as owner:
        with pytest.raises(StepMismatchError, match=r"is in step 0 \(not collected\), but got the decision of step 0"):
            owner.service.apply(owner.decision(0)).result(WAIT)
        owner.push(0, random_grads(spec, 1))
        owner.collect().result(WAIT)
        with pytest.raises(StepMismatchError, match=r"is in step 0 \(collected\), but got the decision of step 1"):
            owner.service.apply(owner.decision(1)).result(WAIT)
        with pytest.raises(StepMismatchError, match=r"counts attempts \(1,\), but optimizer 0 collected \(0,\)"):
            owner.service.apply(replace(owner.decision(), attempts=(1,))).result(WAIT)


def test_a_collect_may_be_repeated_and_replaced() -> None:
    with owner_of(make_spec(1)) as owner:
        first = owner.collect()
        assert owner.collect() is first
        second = owner.service.collect(0, owner.reports(attempts=[1]))
        with pytest.raises(StepMismatchError, match="step 0 was reopened"):
            first.result(WAIT)
        owner.push(0, random_grads(owner.spec, 1), attempt=1)
        assert second.result(WAIT).parts
        with pytest.raises(StepMismatchError, match="is in step 0, but was asked to collect step 5"):
            owner.collect(5).result(WAIT)
        with pytest.raises(StoreError, match="rank 0 counted 1 unit, but the layout has 3"):
            owner.service.collect(0, counted(owner.reports(), (1,))).result(WAIT)


# ---- rule 6: norm parts


def test_a_part_computed_early_is_replaced_when_another_push_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "EARLY", 1)  # element: one task a shard
    spec = make_spec(1, accumulation_steps=2)
    grads = [random_grads(spec, seed) for seed in range(3)]
    results = []
    for early in (False, True):
        with owner_of(spec) as owner:
            for seq in range(3):  # two are planned: after the second every part is computed early
                owner.push(0, grads[seq], seq=seq)
                if early:
                    owner.drain()
            results.append(owner.collect(pushes=3).result(WAIT))
    assert results[0] == results[1]
    exact = sum(float(sum(g[name].double() for g in grads).square().sum()) for name in grads[0])
    assert sum(part[2] for part in results[1].parts) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("early", "tasks"), [(1, 11), (700, 5), (1 << 20, 0)])
def test_parts_are_computed_early_in_tasks_of_some_size(
    early: int, tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contributions, "EARLY", early)  # elements
    with owner_of(make_spec(1)) as owner:
        submitted: list[Task] = []
        monkeypatch.setattr(Updater, "submit", lambda updater, task: submitted.append(task))
        owner.push(0, random_grads(owner.spec, 0))
        sizes = [shard.numel for shard in owner.spec.layout.shards]
        assert (len(submitted), len(sizes)) == (tasks, 11), sizes


# ---- checkpoints


def saved(owner: Owner, entry: FileEntry, version: int) -> bool:
    """True when the file holds exactly these masters, each with ``version`` updates."""
    layout = owner.spec.layout
    for shard in layout.shards:
        master = owner.read(shard.index, version, MASTER)
        for part in layout.slices(shard):
            slot = layout.units[shard.unit].slots[part.slot]
            found = entry.content[f"{slot.name}/{MASTER}/{part.param_start}"]
            if found["sha256"] != hashlib.sha256(as_bytes(master[part.start : part.stop])).hexdigest():
                return False
            if found["step"] != version:
                return False
    return True


def test_a_save_may_be_asked_for_before_its_version_is_decided(tmp_path: Path) -> None:
    with owner_of(make_spec(1, dtypes=[BF16] * 3)) as owner:
        entry = owner.service.write_checkpoint(1, tmp_path / "step-000001")
        owner.take_step([random_grads(owner.spec, 1)])
        assert saved(owner, entry.result(WAIT), 1)


# ---- failures


def test_an_abort_fails_what_can_never_come_and_keeps_what_is_decided() -> None:
    with owner_of(make_spec(2)) as owner:
        grads = random_grads(owner.spec, 1)
        gate = Gate(owner.service, hold_at=(0, 1))
        owner.take_step([grads, grads])
        gate.wait()
        decided, never = owner.service.read(10, 1, "compute"), owner.service.read(10, 2, "compute")
        waiting = owner.service.reserve_when_free(owner.header(0, 2, 1, grads), 10)
        collecting = owner.collect(1)
        owner.service.abort(RankLeftError("rank 1 left"))
        for future in (never, waiting, collecting, owner.service.read(0, 2, "compute"), owner.collect(1)):
            with pytest.raises(RankLeftError, match="rank 1 left"):
                future.result(WAIT)
        gate.release()
        assert decided.result(WAIT) is not None
        assert owner.service.read(0, 1, MASTER).result(WAIT) is not None


def test_an_abort_fails_the_checkpoint_that_can_never_be_written_and_keeps_the_one_that_can(tmp_path: Path) -> None:
    with owner_of(make_spec(1)) as owner:
        gate = Gate(owner.service, hold_at=(0, 1))
        owner.take_step([random_grads(owner.spec, 1)])
        gate.wait()  # v1 is decided and not published whole
        decided = owner.service.write_checkpoint(1, tmp_path / "step-000001")
        never = owner.service.write_checkpoint(2, tmp_path / "step-000002")
        owner.service.abort(RankLeftError("rank 1 left"))
        later = owner.service.write_checkpoint(1, tmp_path / "again")
        for future in (never, later):
            with pytest.raises(RankLeftError, match="rank 1 left"):
                future.result(0)
        gate.release()
        assert saved(owner, decided.result(WAIT), 1)
    assert not (tmp_path / "step-000002").exists()


def test_its_failure_is_told_once_with_the_first_reason() -> None:
    with owner_of(make_spec(1)) as owner:
        heard: list[str] = []
        owner.service.failed.add_done_callback(lambda failed: heard.append(str(failed.result())))
        assert not owner.service.failed.done()
        owner.service.abort(StoreError("first"))
        owner.service.abort(StoreError("second"))
        owner.service.close()
        assert heard == ["first"]
        with pytest.raises(StoreError, match="first"):
            owner.collect().result(0)


def test_an_owner_that_failed_before_anybody_attached_takes_no_step_and_still_gives_its_values() -> None:
    spec = make_spec(1)
    service = ShardService(0, 1)
    service.abort(RankLeftError("rank 1 left"))
    try:
        service.attach(0, spec)
        owner = Owner(service, spec)
        for shard in spec.layout.shards:
            service.load(shard.index, torch.ones(shard.numel))
        assert owner.read(0, 0) is not None
        waiting = [
            service.reserve_when_free(owner.header(0, 0, 0, random_grads(spec, 1)), 0),
            owner.collect(),
            service.read(0, 1, "compute"),
            service.write(1, Write(version=0, unit=0, kind=MASTER, digest="")),
        ]
        for future in waiting:
            with pytest.raises(RankLeftError, match="rank 1 left"):
                future.result(0)
    finally:
        service.close()


def test_another_write_with_the_number_of_the_last_one_is_made() -> None:
    """The successor of a lead counts anew if no rank is left that had told it of a version's writes."""
    with owner_of(make_spec(1)) as owner:
        for value in (2.0, 3.0):
            for shard in owner.spec.layout.shards_by_unit[0]:
                owner.service.stage(shard.index, 0, MASTER, torch.full((shard.numel,), value))
            write = Write(version=0, unit=0, kind=MASTER, digest=str(value))
            owner.service.write(1, write).result(WAIT)
            owner.service.write(1, write).result(WAIT)  # a repeat has nothing staged
            assert owner.read(0, 0, MASTER)[0] == value


def test_only_the_first_initial_values_of_a_shard_count() -> None:
    with owner_of(make_spec(1), load=False) as owner:
        numel = owner.spec.layout.shards[0].numel
        owner.service.load(0, torch.full((numel,), 2.0))
        owner.service.load(0, torch.full((numel,), 3.0))
        assert owner.read(0, 0, MASTER)[0] == 2.0
        with pytest.raises(StoreError, match=f"shard 0 of 'emb' has {numel} elements"):
            owner.service.load(0, torch.zeros(1))


class Exploding(torch.optim.SGD):
    """A user's optimizer that passes the probe and breaks later."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and float(param.grad.flatten()[0]) == 12345.0:
                    raise ArithmeticError("overflow in user code")
        super().step(closure)


def test_an_update_that_fails_fails_every_wait_with_its_cause() -> None:
    with owner_of(make_spec(1, optimizer=f"{__name__}:Exploding", hyper=[{"lr": 0.1}])) as owner:
        grads = random_grads(owner.spec, 1)
        grads["layers.0.w"][0, 0] = 12345.0
        waiting = owner.service.read(10, 1, "compute")
        owner.take_step([grads])
        owner.read(0, 1)
        for future in (waiting, owner.service.read(2, 1, "compute"), owner.collect(1)):
            with pytest.raises(StoreError, match=r"optimizer 0 failed: ArithmeticError\('overflow in user code'\)"):
                future.result(WAIT)


def test_close_fails_every_wait_and_is_idempotent() -> None:
    with owner_of(make_spec(1), load=False) as owner:
        waiting = owner.service.read(0, 0, "compute")
        owner.service.close()
        owner.service.close()
        with pytest.raises(StoreClosedError, match="optimizer 0 was closed"):
            waiting.result(WAIT)


def test_a_budget_that_is_too_small_is_refused_before_anything_is_allocated() -> None:
    spec = make_spec(4)
    service = ShardService(0, 1, OwnerTerms(memory_budget=100_000))
    with pytest.raises(MemoryPlanError, match=r"optimizer 0 of 1 needs .* cpu_memory_budget is 97.66 KiB"):
        service.attach(0, spec)
    service.close()


def test_what_it_says_it_is_doing() -> None:
    spec = make_spec(2)
    with owner_of(spec, load=False) as owner:
        assert owner.service.describe(0) == "waiting for rank 0 to load it"
    with owner_of(spec) as owner:
        grads = random_grads(spec, 1)
        assert owner.service.describe(0) == "v0 is published, step 0 is not decided"
        owner.push(0, grads)
        owner.collect()
        assert owner.service.describe(0) == "v0 is published, waiting for counted pushes of ranks [1]"


# ---- the shard itself


def test_padding_stays_zero_whatever_ranks_send() -> None:
    spec = make_spec(1, dtypes=[BF16, torch.float32, BF16])
    with owner_of(spec) as owner:
        grads = random_grads(spec, 1)
        for unit in spec.layout.units:
            push = owner.header(0, unit.index, 0, grads)
            for shard in spec.layout.shards_by_unit[unit.index]:
                memory = owner.service.reserve(push, shard.index)
                assert memory is not None
                memory.fill_(3.0)  # padding included
                owner.service.landed(push, shard.index)
        owner.collect().result(WAIT)
        owner.service.apply(owner.decision()).result(WAIT)
        for shard in spec.layout.shards:
            real = torch.zeros(shard.numel, dtype=torch.bool)
            for part in spec.layout.slices(shard):
                real[part.start : part.stop] = True
            for kind in ("compute", MASTER, "exp_avg", "exp_avg_sq"):
                values = owner.read(shard.index, 1, kind)
                assert not values[~real].any()
                assert values[real].all()


def test_what_an_fp32_unit_publishes_is_its_master() -> None:
    spec = make_spec(dtypes=[torch.float32, BF16, torch.float32], frozen=[2])
    shards = allocate(spec, range(11), ("exp_avg",), HostMemory(), room=None, splits=False)
    assert shards[0].params is shards[0].master
    assert shards[2].master is not None
    assert shards[2].params.dtype is BF16
    assert shards[10].master is None
    assert shards[10].states == {}


def test_updated_elements_are_counted() -> None:
    spec, recorder = make_spec(1), MemoryRecorder()
    with owner_of(spec, recorder=recorder) as owner:
        grads = random_grads(spec, 1)
        del grads["emb.weight"]
        owner.take_step([grads])
        owner.read(10, 1)
    assert recorder.total(OPTIMIZER_PARAMS) == sum(grad.numel() for grad in grads.values())
