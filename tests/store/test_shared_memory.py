"""What lies in the shared memory of a run: plans, version lines, stamps and windows, without any store."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayzero.errors import HandshakeError, StoreClosedError
from rayzero.memory.mapping import beyond_limit
from rayzero.protocol.gradient_sum import Total, digest_of
from rayzero.protocol.messages import ATTEMPTS, IN_TOTAL, Action, Decision, Norm, Published, Pushed, Record, SharedPaths
from rayzero.quantities import PAGE
from rayzero.slabs.arena import Arena, SlabGroup, SlabPiece, plan_arena
from rayzero.slabs.header import lay_out_slab
from rayzero.slabs.slab import Slab
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.memory.slabs import OwnerSlabs
from rayzero.store.rank.shared_memory import SharedRank, doubt_of_locks
from rayzero.store.rank.unit_windows import UnitWindows
from rayzero.store.shm.mailbox import SLOTS, Cells
from rayzero.store.shm.shard_lines import ShardLines, TotalLines
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.shm.signals import Cell, store_release_64
from rayzero.store.shm.words import Stamps, cells_of, read_records, write_record
from tests.support import needs

from .toy import make_spec

needs_signals = needs.signals_between_processes


def plan_of(num_owners: int, **fields: object) -> SharedPlan:
    spec = make_spec(**fields)  # type: ignore[arg-type]
    return SharedPlan.of(spec, num_owners)


@pytest.fixture
def slabs() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def owner_slabs(stack: ExitStack, plan: SharedPlan, owner: int) -> OwnerSlabs:
    found = OwnerSlabs(plan, plan.facts("params", owner, "test", 1), None)
    stack.callback(found.close)
    return found


def control(stack: ExitStack, plan: SharedPlan, role: str) -> Slab:
    regions = plan.owner_control(0, 1) if role == "owner" else plan.rank_control()
    slab = Slab.create(lay_out_slab(plan.facts("control", 0, "", 1), regions), None)
    stack.callback(slab.close)
    return slab


# ---- windows: a unit as one tensor, where its owners write it


def fill(plan: SharedPlan, arenas: dict[int, Arena]) -> None:
    """Every element of the model its own number."""
    for shard in plan.spec.layout.shards:
        start = 100_000 * shard.unit + shard.start
        arenas[plan.shard_map.owner(shard.index)].tensor(shard.index).copy_(torch.arange(start, start + shard.numel))


@given(owners=st.integers(1, 5), shard_numel=st.sampled_from([64, 512, 1024, 2048, 4096]))
def test_a_window_shows_what_all_owners_of_a_unit_write_or_there_is_none(owners: int, shard_numel: int) -> None:
    plan = plan_of(owners, shard_numel=shard_numel)
    with ExitStack() as stack:
        arenas = {owner: owner_slabs(stack, plan, owner).arena for owner in range(owners)}
        windows = UnitWindows(plan, arenas, page_lock=None)
        stack.callback(windows.close)
        fill(plan, arenas)
        for unit in plan.spec.layout.units:
            found = windows.tensor(unit.index)
            if found is not None:
                assert found.tolist() == list(range(100_000 * unit.index, 100_000 * unit.index + unit.numel))
            pages = shard_numel * unit.dtype.itemsize % 4096 == 0
            one_owner = len({plan.shard_map.owner(s.index) for s in plan.spec.layout.shards_by_unit[unit.index]}) == 1
            assert (found is not None) == (pages or one_owner)


def test_masters_and_moments_are_not_in_slabs_that_ranks_map(slabs: ExitStack) -> None:
    plan = plan_of(1, dtypes=[torch.bfloat16] * 3)
    memory = owner_slabs(slabs, plan, 0)
    sizes = [(shard.index, shard.numel) for shard in plan.spec.layout.shards]
    master, moment = memory.state(sizes, torch.float32), memory.state(sizes, torch.float32)
    mapped = [(slab.address(0), slab.address(0) + slab.header.bytes) for slab in memory.arena.slabs]
    for tensor in (*master.values(), *moment.values()):
        assert not any(start <= tensor.data_ptr() < stop for start, stop in mapped)
    assert len({t.data_ptr() for t in (*master.values(), *moment.values())}) == 2 * len(sizes)


# ---- words


@needs_signals
def test_version_lines_tell_news_once_and_whose_they_are(slabs: ExitStack) -> None:
    plan = plan_of(1)
    slab, shards = control(slabs, plan, "owner"), plan.shards_of(0)
    ours, theirs = ShardLines(slab, shards), ShardLines(slab, shards)
    ours.describe(plan.first_tiles(0))
    theirs.check("here")
    assert theirs.news() == []
    ours.publish(Published(3, 0, 0))
    ours.publish(Published(1, 2, 1))
    assert theirs.news() == [Published(1, 2, 1), Published(3, 0, 0)]
    assert theirs.news() == []
    with pytest.raises(HandshakeError, match=r"here has shard \(0, 0, 512\)"):
        ShardLines(slab, plan_of(1, shard_numel=1024).shards_of(0)).check("here")


@needs_signals
def test_who_sees_a_new_version_sees_its_content(slabs: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank looks after each store: with the content of the version before, it would fetch nothing."""
    plan = plan_of(1)
    slab, shards = control(slabs, plan, "owner"), plan.shards_of(0)
    ours, theirs = ShardLines(slab, shards), ShardLines(slab, shards)
    seen: list[Published] = []

    def store(address: int, value: int) -> None:
        store_release_64(address, value)
        seen.extend(theirs.news())

    monkeypatch.setattr("rayzero.store.shm.shard_lines.store_release_64", store)
    published = [Published(1, 0, 0), Published(1, 1, 1), Published(1, 2, 1)]
    for each in published:
        ours.publish(each)
    assert seen == published


@needs_signals
def test_a_decision_stays_recorded_until_another_one_is_after_the_next(slabs: ExitStack) -> None:
    """Whichever record is cut short by a death, the one before it is whole."""
    plan = plan_of(1)
    slab = control(slabs, plan, "owner")
    records = []
    for step in range(4):
        decision = Decision(step=step, attempts=(0, 0), action=Action.APPLY, scale=1.0, norm=1.0, hyper=plan.spec.hyper)
        records.append(Record(decision=decision, reports=(), norm=Norm(step=step, total=1.0, finite=True)))
        write_record(slab, records[-1])
        assert read_records(slab) == records[-2:]


@needs_signals
def test_a_stamp_is_the_newest_of_its_unit(slabs: ExitStack) -> None:
    plan = plan_of(1, accumulation_steps=2)
    slab = control(slabs, plan, "rank")
    ours, theirs = Stamps(slab, plan), Stamps(slab, plan)
    first = Pushed(step=4, attempt=0, count=1, presence=b"\x05")
    second = Pushed(step=4, attempt=0, count=2, presence=b"\x0f")
    ours.write(1, [first])
    assert theirs.news() == [(1, [first])]
    ours.write(1, [first])
    ours.write(1, [first, second])
    ours.write(2, [first])
    assert theirs.news() == [(1, [first, second]), (2, [first])]
    gone = [replace(each, place=IN_TOTAL) for each in (first, second)]
    ours.write(1, [gone[0], second])
    assert theirs.read(1) == [second], "what is in totals is only counted"
    ours.write(1, gone)
    assert theirs.read(1) == [gone[1]]


def total(step: int, attempt: int, rounds: int, present: tuple[bool, ...]) -> Total:
    return Total(step, rounds, ((0, attempt, rounds),), present)


def left(made: Total) -> Total:
    """What a successor reads of it."""
    assert not isinstance(made.summands, int)
    return replace(made, summands=digest_of(made.summands))


@needs_signals
def test_a_total_that_a_dead_owner_was_adding_to_is_made_what_it_was(slabs: ExitStack) -> None:
    plan = plan_of(1, accumulation_steps=3)
    slab = control(slabs, plan, "owner")
    ours, theirs = (TotalLines(slab, plan, 0) for _ in range(2))
    one, other = torch.full((512,), 1.0), torch.full((512,), 2.0)
    present = [(True,) * len(plan.spec.layout.slices(plan.spec.layout.shards[shard])) for shard in (0, 1)]
    made = [total(4, 1 + shard, 1, present[shard]) for shard in (0, 1)]
    for shard in (0, 1):
        ours.line(shard).write(made[shard])
    ours.line(0).keeps(one).keep(one, 300)
    one[:300].fill_(9.0)  # in part, when it died
    one[300:].fill_(1.5)
    assert theirs.line(1).read(other) == left(made[1])
    assert other.eq(2.0).all(), "another one was added to"
    assert theirs.line(0).read(one) == left(made[0])
    assert one[:300].eq(1.0).all()
    assert one[300:].eq(1.5).all(), "what was not kept had not changed"
    more = total(4, 0, 2, (False, *present[0][1:]))
    ours.line(0).write(more)  # the round is in
    one.fill_(3.0)
    assert theirs.line(0).read(one) == left(more)
    assert one.eq(3.0).all()
    ours.line(0).clear()
    later = total(5, 0, 1, present[0])
    ours.line(0).write(later)  # of the next step: what was kept of the last one is of no use
    assert theirs.line(0).read(one) == left(later)
    assert one.eq(3.0).all()


@needs_signals
def test_a_line_says_which_pushes_are_in_a_total(slabs: ExitStack) -> None:
    plan = plan_of(1, accumulation_steps=3)
    lines = TotalLines(control(slabs, plan, "owner"), plan, 0)
    line, present = lines.line(0), (True,) * len(plan.spec.layout.slices(plan.spec.layout.shards[0]))

    def has(step: int, attempt: int, count: int) -> bool:
        return lines.has(0, Pushed(step=step, attempt=attempt, count=count, presence=b""))

    assert not has(0, 0, 1)
    line.write(total(4, 1, 2, present))
    assert [has(4, 1, count) for count in (1, 2, 3)] == [True, True, False]
    assert [has(4, 0, 9), has(3, 7, 9), has(4, 2, 1), has(5, 0, 1)] == [True, True, False, False]
    assert has(4, 1 + ATTEMPTS, 2), "of a later life of the rank"
    line.hold()
    assert not has(4, 1, 1)
    line.write(total(4, 1, 3, present))
    assert not has(4, 1, 1), "for the rest of the step"
    line.write(total(5, 0, 1, present))
    assert has(5, 0, 1)


@needs_signals
def test_the_longest_messages_of_a_run_fit_their_cells() -> None:
    """The sizes that the plan reserves hold what the wire makes of the largest values."""
    from rayzero.protocol.messages import Action, Clamp, Decision, Edit, EditKind, FinishReport, NormParts, StepInputs
    from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
    from rayzero.store.wire import translate

    big = 1 << 40
    plan = plan_of(3, world_size=9)
    spec = plan.spec
    clamp = Clamp(scale=1 / 3, limit=1 / 3)
    report = FinishReport(step=big, attempt=1 << 30, rank=8, counts=(1 << 20,) * len(spec.layout.units), clamp=clamp)
    inputs = StepInputs(edits=(Edit(EditKind.CLIP_NORM, 1e-300 / 3),) * 8, hyper=spec.hyper)
    finish = pb.FinishRequest(report=translate.report_to_pb(report), inputs=translate.inputs_to_pb(inputs))
    assert finish.ByteSize() + 20 <= plan.question_bytes
    unlike = [replace(report, rank=rank, attempt=report.attempt + rank) for rank in range(spec.world_size)]
    collect = pb.CollectRequest(step=big, reports=translate.reports_to_pb(unlike))
    assert len(collect.reports) == spec.world_size
    assert collect.ByteSize() + 20 <= plan.order_bytes
    decision = Decision(
        step=big, attempts=(1 << 30,) * 9, action=Action.APPLY, scale=1 / 3, norm=1 / 3, hyper=spec.hyper
    )
    assert pb.ApplyRequest(decision=translate.decision_to_pb(decision)).ByteSize() + 20 <= plan.order_bytes
    assert translate.decision_to_pb(decision).ByteSize() <= Cell.capacity_in(stride_of(plan, "record"))
    assert pb.CommitResponse(decision=translate.decision_to_pb(decision)).ByteSize() + 20 <= plan.answer_bytes
    parts = [(s.index, p.slot, 1 / 3) for s in spec.layout.shards for p in spec.layout.slices(s)]
    reply = translate.parts_to_pb(NormParts(step=big, parts=tuple(parts)))
    assert reply.ByteSize() + 20 <= plan.reply_bytes


def stride_of(plan: SharedPlan, kind: str) -> int:
    return next(stride for name, _, stride in plan.owner_control(plan.shard_map.owner(0), 1) if name == kind)


# ---- page locks


def test_more_to_lock_than_the_limit_is_told_with_the_sum() -> None:
    assert beyond_limit(3 << 30, 1 << 30, 4 << 30) is None
    assert beyond_limit(3 << 30, 1 << 30, -1) is None  # RLIM_INFINITY
    told = beyond_limit(3 << 30, 1 << 30, 8 << 20)
    assert told is not None
    assert "4 GiB = parameters 3 GiB + gradients 1 GiB, but RLIMIT_MEMLOCK is 8 MiB; if CUDA refuses" in told


def test_what_a_rank_locks_is_its_gradients_and_the_parameters_of_its_hosts_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(2)
    params = [sum(plan.params(owner).slabs) for owner in range(2)]
    for pooled in (True, False):
        gradients = plan.gradient_bytes(pooled=pooled)
        for owners, needed in (([0], params[0] + gradients), ([0, 1], sum(params) + gradients)):
            monkeypatch.setattr(resource, "getrlimit", lambda _, limit=needed: (limit, limit))
            assert doubt_of_locks(plan, owners, pooled=pooled) is None
            monkeypatch.setattr(resource, "getrlimit", lambda _, limit=needed - 1: (limit, limit))
            assert doubt_of_locks(plan, owners, pooled=pooled) is not None


# ---- where tensors lie


@needs_signals
def test_a_rank_maps_each_shard_where_its_owner_says_it_lies(slabs: ExitStack, slab_dir: Path) -> None:
    plan = plan_of(1, shard_numel=1024)
    facts = plan.facts("params", 0, "test", 1)
    pieces = [
        SlabGroup(pieces=(SlabPiece(key=s.index, numel=s.numel, dtype=torch.float32),)) for s in plan.shards_of(0)
    ]
    arena = Arena.create(plan_arena(pieces[::-1]), facts, slab_dir)  # not where an owner would put them
    slabs.callback(arena.close)
    control = Slab.create(lay_out_slab(plan.facts("control", 0, "test", 1), plan.owner_control(0, 1)), slab_dir)
    slabs.callback(control.close)
    ShardLines(control, plan.shards_of(0)).describe(plan.first_tiles(0))
    rank = SharedRank(0, plan, slab_dir)
    slabs.callback(lambda: rank.close(StoreClosedError("the test has ended")))
    at = arena.plan.places
    places = tuple((shard.index, at[shard.index].slab, at[shard.index].offset) for shard in plan.shards_of(0))
    files = tuple(str(slab.path) for slab in arena.slabs)
    for wrong, said in (
        (places[1:], "optimizer 0 says where"),
        ((*places[1:], (*places[0][:2], 1 << 40)), "has no such tensors"),
        ((*places[1:], (places[0][0], 7, 0)), "a slab that is not there"),
    ):
        with pytest.raises(HandshakeError, match=said):
            rank.meet({0: SharedPaths(str(control.path), files, wrong)})
    fill(plan, {0: arena})
    rank.meet({0: SharedPaths(str(control.path), files, places)})
    for shard in plan.spec.layout.shards:
        assert torch.equal(rank.shard(0, shard.index), arena.tensor(shard.index))


def test_mailboxes_take_memory_once_somebody_opens_them(slab_dir: Path) -> None:
    spec, models = make_spec(200), HostedModels(0, 40, share=slab_dir)
    hosted = models[0]
    try:
        hosted.service.attach(0, spec, own_gradients=True)
        assert hosted.shared is not None
        plan, path = SharedPlan.of(spec, 40), Path(hosted.shared.offer().control)
        everything = sum(size for _, size, _ in plan.owner_control(0, 1))
        empty = path.stat().st_blocks * 512
        assert (path.stat().st_size >= everything, empty < everything / 50) == (True, True)
        with closing(plan.attach(str(path), "rank 7", writable=True)) as control:
            cells = cells_of(control, "answers", 7, plan.answer_bytes)
            room = path.stat().st_blocks * 512 - empty
            assert Cells.bytes_for(plan.answer_bytes) <= room <= Cells.bytes_for(plan.answer_bytes) + 2 * PAGE
            for cell in cells.cells():
                cell.write(b"x" * plan.answer_bytes)
            assert path.stat().st_blocks * 512 == empty + room  # none of it was made by these writes
            cells_of(control, "answers", 7, plan.answer_bytes)
            assert [cell.read()[1] for cell in cells.cells()] == [b"x" * plan.answer_bytes] * SLOTS
    finally:
        models.close()
