"""An owner's log of changes: from any version that it still knows, it leads to every later one, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from clock import Clock
from store.toy import HYPER, WAIT, make_spec, random_grads
from torch import Tensor

from owner.owner import Owner, owner_of
from rayzero.codecs.changes import Change, Form, apply, checksum, compare, encode
from rayzero.memory.planner import SERVED_AT_ONCE
from rayzero.owner.changes import QUIET_S, ChangeLog
from rayzero.protocol.messages import MASTER, Action, FormerShard, ModelSpec, Write
from rayzero.telemetry.names import CHANGE_BYTES, CHANGED_RATIO, MEMORY_BYTES
from rayzero.telemetry.recorder import MemoryRecorder

BF16 = torch.bfloat16


@dataclass
class Copy:
    """A follower's copy of one shard."""

    values: Tensor
    version: int
    checksum: int

    def apply(self, change: Change) -> None:
        assert change.before <= self.version < change.after
        apply(change, self.values)
        self.version, self.checksum = change.after, change.checksum


def wholes(owner: Owner, version: int) -> list[Copy]:
    return [Copy(values, version, checksum(values)) for values in owner.read_all(version)]


def step(owner: Owner, at: int, scale: float = 1.0) -> list[Tensor]:
    """One step; the published values after it."""
    owner.take_step([random_grads(owner.spec, 10 * at + rank, scale) for rank in range(owner.spec.world_size)], at)
    owner.drain()
    return owner.read_all(at + 1)


def since(owner: Owner, copies: Sequence[Copy]) -> list[Sequence[Change] | None]:
    log = owner.service.changes
    return [log.since(index, each.version, each.checksum) for index, each in enumerate(copies)]


def catch_up(owner: Owner, copies: Sequence[Copy], version: int) -> None:
    for copy, changes in zip(copies, since(owner, copies), strict=True):
        assert changes is not None
        for change in changes:
            copy.apply(change)
        assert copy.version == version


def same(copies: Sequence[Copy], values: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(a.values.view(torch.int16), b.view(torch.int16)) for a, b in zip(copies, values, strict=True)
    )


@contextmanager
def followed(spec: ModelSpec, **options: Any) -> Iterator[Owner]:
    with owner_of(spec, **options) as owner:
        owner.service.changes.follow()
        owner.drain()
        yield owner


RULES: dict[str, dict[str, Any]] = {
    "native": {"kernel": "native"},
    "native, moments int8": {"kernel": "native", "moments": "int8"},
    "torch": {"kernel": "torch"},
    "a torch class": {"optimizer": "torch.optim:SGD", "hyper": [{"lr": 1e-2, "momentum": 0.9}]},
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("rule", RULES)
def test_changes_lead_from_every_version_to_every_later_one(rule: str, dtype: torch.dtype) -> None:
    """With a frozen unit, a parameter that gets no gradient once, and a step that changes nothing. Some steps change
    little, others much."""
    spec = make_spec(2, dtypes=[BF16, dtype, dtype], frozen=[0], **RULES[rule])
    with followed(spec) as owner:
        copies = [wholes(owner, 0)]
        for at, rate in enumerate([1e-2, 1e-5, 1e-2, 1e-4]):
            hyper = tuple({**options, "lr": rate} for options in spec.hyper)
            grads = [{k: v for k, v in random_grads(spec, at).items() if at or not k.endswith("w")} for _ in range(2)]
            for rank, mine in enumerate(grads):
                owner.push(rank, mine, at)
            owner.collect(at).result(WAIT)
            action = Action.SKIP if at == 2 else Action.APPLY
            owner.service.apply(replace(owner.decision(at, action), hyper=hyper)).result(WAIT)
            owner.drain()
            values, told = owner.read_all(at + 1), since(owner, copies[-1])
            assert all(changes is not None and len(changes) == 1 for changes in told)
            assert {changes[0].form for changes in told[:2] if changes} == {Form.NOTHING}, "a frozen unit"
            if action is Action.SKIP:
                assert {changes[0].form for changes in told if changes} == {Form.NOTHING}
            for each in copies:
                catch_up(owner, each, at + 1)
                assert same(each, values)
            copies.append(wholes(owner, at + 1))
        assert since(owner, copies[-1]) == [[]] * len(spec.layout.shards), "there is nothing newer"


def test_nothing_is_noted_while_nobody_follows() -> None:
    clock, spec = Clock(), make_spec(1, dtypes=[BF16] * 3)
    with owner_of(spec) as owner:
        log = owner.service.changes
        log._clock = clock
        before = wholes(owner, 0)
        step(owner, 0)
        assert log.kept_bytes == 0
        assert since(owner, before) == [None] * 11, "the first question: noting begins"
        owner.drain()
        copies = wholes(owner, 1)
        clock.now += QUIET_S
        values = step(owner, 1)
        assert log.kept_bytes > 0
        catch_up(owner, copies, 2)
        assert same(copies, values)
        clock.now += QUIET_S + 1
        step(owner, 2)
        assert log.kept_bytes == 0
        assert since(owner, copies) == [None] * 11


def test_who_follows_before_there_are_values_gets_changes_from_the_first_update_on() -> None:
    with owner_of(make_spec(1, dtypes=[BF16] * 3), load=False) as owner:
        owner.service.changes.follow()
        owner.drain()
        for shard in owner.spec.layout.shards:
            owner.service.load(shard.index, torch.ones(shard.numel))
        step(owner, 0)
        copies = wholes(owner, 1)
        values = step(owner, 1)
        catch_up(owner, copies, 2)
        assert same(copies, values)


def test_a_users_write_ends_what_is_known_of_its_shards() -> None:
    """Also for those who have the version that it changes; a write of a state changes nothing that is published."""
    with followed(make_spec(1, dtypes=[BF16] * 3)) as owner:
        step(owner, 0)
        copies = wholes(owner, 1)
        for number, kind in enumerate(("exp_avg", MASTER), 1):
            for shard in owner.spec.layout.shards_by_unit[1]:
                owner.service.stage(shard.index, 1, kind, torch.full((shard.numel,), 0.5))
            owner.service.write(number, Write(version=1, unit=1, kind=kind, digest=kind)).result(WAIT)
            lost = [None if kind == MASTER and shard.unit == 1 else [] for shard in owner.spec.layout.shards]
            assert since(owner, copies) == lost
        copies = wholes(owner, 1)
        assert since(owner, copies) == [[]] * 11
        values = step(owner, 1)
        catch_up(owner, copies, 2)
        assert same(copies, values)


def test_values_that_are_not_those_of_their_version_are_taken_whole() -> None:
    with followed(make_spec(1, dtypes=[BF16] * 3)) as owner:
        copies = wholes(owner, 0)
        copies[3].checksum += 1
        step(owner, 0)
        told = since(owner, copies)
        assert told[3] is None
        assert all(told[:3])
        copies[4].version = 7  # of a run that began again
        assert since(owner, copies)[4] is None


def test_a_version_that_is_published_and_not_noted_yet_is_known_in_a_moment_shard_by_shard() -> None:
    with followed(make_spec(1, dtypes=[BF16] * 3)) as owner:
        copies, heard = wholes(owner, 0), list[int]()
        told: list[Any] = []
        log = owner.service.changes

        def published(shards: Sequence[Any]) -> None:
            if shards[0].version == 1:
                told.append(log.since(shards[0].shard, 1, 0))

        owner.service.on_publish(published)
        log.listen(lambda: heard.append(sum(map(bool, since(owner, copies)))))
        step(owner, 0)
        assert told == [[]] * 11
        assert heard == list(range(12))


def test_what_a_former_life_may_have_been_writing_is_not_gone_on_from() -> None:
    with owner_of(make_spec(1, dtypes=[BF16] * 3)) as owner:
        service = owner.service
        parts = service._attached()
        left = {0: FormerShard(published=0, content=0, applied=-1, slices=())}
        log = ChangeLog(replace(parts.model, former=left), service._updater, service.recorder)
        log.follow()
        owner.drain()
        copy = wholes(owner, 0)[0]
        assert log.since(0, 0, copy.checksum) is None
        log.published(0)
        assert log.since(0, 0, copy.checksum) == []


def test_a_nan_that_another_has_rounded_is_compared_with_what_is_there() -> None:
    with owner_of(make_spec(1, dtypes=[torch.float16] * 3)) as owner:
        for owned in owner.service._shards().values():
            owned.master[3], owned.params.view(torch.int16)[3] = torch.nan, -1
        owner.service.changes.follow()
        owner.drain()
        copies = wholes(owner, 0)
        values = step(owner, 0)
        catch_up(owner, copies, 1)
        assert same(copies, values)
        assert checksum(values[0]) == copies[0].checksum


def test_the_oldest_changes_go_first_and_no_more_is_kept_than_there_is_room_for() -> None:
    with owner_of(make_spec(1, dtypes=[BF16] * 3)) as owner:
        log = owner.service.changes
        published = sum(owned.params.nbytes for owned in owner.service._shards().values())
        bitmaps = sum(-(-shard.numel // 8) for shard in owner.spec.layout.shards)
        log.follow()
        owner.drain()
        versions = [wholes(owner, 0)]
        for at in range(6):
            step(owner, at)
            assert 0 < log.kept_bytes <= published + bitmaps
            versions.append(wholes(owner, at + 1))
        known = [all(changes is not None for changes in since(owner, copies)) for copies in versions]
        assert known == sorted(known)
        assert known[-2]
        assert not known[0]
        for copies, there in zip(versions, known, strict=True):
            if there:
                catch_up(owner, copies, 6)
                assert same(copies, owner.read_all(6))


@pytest.mark.parametrize("room", [0, 100, 4000])
def test_no_more_is_held_than_there_is_room_for_in_the_budget_bitmaps_too(room: int) -> None:
    """Where there is none, shards are taken whole. For copies nothing is noted then, either."""
    spec = make_spec(1, dtypes=[BF16] * 3, hyper=[{**HYPER, "lr": 2e-4}])
    with owner_of(spec) as owner:
        needed = owner.plan.total
    with owner_of(spec, budget=needed + room) as owner:
        log, indices = owner.service.changes, range(len(spec.layout.shards))
        log.follow()
        owner.drain()
        copies = wholes(owner, 0)
        for at in range(3):
            step(owner, at)
            assert log.kept_bytes <= max(0, room)
            noted = [log.newest(shard, at, at + 1) is not None for shard in indices]
            assert any(noted) == (room > 1000)
        assert (None in since(owner, copies)) == (room < 4000)
        assert since(owner, wholes(owner, 3)) == [[]] * 11


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("rule", ["native", "a torch class"])
def test_the_plan_has_all_that_is_held_for_followers(rule: str, dtype: torch.dtype) -> None:
    with followed(make_spec(1, dtypes=[dtype] * 3, **RULES[rule])) as owner:
        for at in range(4):
            step(owner, at, 100.0)
        held, shards = owner.service.changes.kept_bytes, owner.spec.layout.shards
        published = sum(shard.numel for shard in shards) * dtype.itemsize
        planned = owner.plan.followers - SERVED_AT_ONCE * published  # this model is smaller than SERVED_BYTES
        bitmaps = sum(-(-shard.numel // 8) for shard in shards if dtype is BF16)
        assert planned == published + bitmaps
        assert planned - max(shard.numel for shard in shards) * dtype.itemsize <= held <= planned


def test_bytes_and_shares_are_measured() -> None:
    recorder, spec = MemoryRecorder(), make_spec(1, dtypes=[BF16] * 3)
    with followed(spec, recorder=recorder) as owner:
        step(owner, 0)
        log = owner.service.changes
        bitmaps = sum(-(-shard.numel // 8) for shard in spec.layout.shards)
        assert recorder.gauge(MEMORY_BYTES, kind="changes") == log.kept_bytes
        assert log.kept_bytes - bitmaps == recorder.total(CHANGE_BYTES) > 0
        assert 0.1 < recorder.gauge(CHANGED_RATIO) <= 1.0


def test_for_copies_the_newest_update_is_noted_while_one_asks() -> None:
    """Also one in which some parameters have no gradient."""
    with owner_of(make_spec(1, dtypes=[BF16] * 3, hyper=[{**HYPER, "lr": 2e-4}])) as owner:
        log, shards = owner.service.changes, range(len(owner.spec.layout.shards))
        step(owner, 0)
        assert [log.newest(shard, 0, 1) for shard in shards] == [None] * 11, "the first question"
        step(owner, 1)
        copies = wholes(owner, 2)
        for at in range(2, 15):
            grads = {k: v for k, v in random_grads(owner.spec, at).items() if at % 2 or not k.endswith("b")}
            owner.take_step([grads], at)
            owner.drain()
            values = owner.read_all(at + 1)
            if at < 5:
                for shard, copy in enumerate(copies):
                    assert log.newest(shard, at - 1, at + 1) is None, "of another content"
                    change = log.newest(shard, at, at + 1)
                    assert change is not None
                    assert bytes(change.payload) == encode(values[shard], compare(copy.values, values[shard]))[1]
                    copy.apply(change)
                assert same(copies, values)
        assert not log._newest, "nobody has asked for eight versions"
        assert log.kept_bytes == 0


def test_a_users_write_ends_what_a_copy_can_go_on_from() -> None:
    with owner_of(make_spec(1, dtypes=[BF16] * 3, hyper=[{**HYPER, "lr": 1e-5}])) as owner:
        log, first = owner.service.changes, owner.spec.layout.shards_by_unit[1][0].index
        for at in range(3):
            step(owner, at)
            log.newest(first, at, at + 1)
        assert log.newest(first, 2, 3) is not None
        for shard in owner.spec.layout.shards_by_unit[1]:
            owner.service.stage(shard.index, 3, MASTER, torch.full((shard.numel,), 0.5))
        owner.service.write(1, Write(version=3, unit=1, kind=MASTER, digest=MASTER)).result(WAIT)
        assert log.newest(first, 2, 3) is None


def test_of_updates_that_change_much_fewer_and_fewer_are_noted_for_copies() -> None:
    with owner_of(make_spec(1, dtypes=[BF16] * 3, hyper=[{**HYPER, "lr": 1.0}])) as owner:
        log, noted = owner.service.changes, list[int]()
        for at in range(205):
            step(owner, at)
            if log._newest:
                noted.append(at)
            for shard in range(11):
                log.newest(shard, at, at + 1)
        gaps = [after - before for before, after in itertools.pairwise(noted)]
        assert gaps == [1, 5, 9, 17, 33, 65, 65]
