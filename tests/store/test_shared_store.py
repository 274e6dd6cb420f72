"""What only the store over shared memory promises: no RPC within a step, no copy, nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked

from rayzero.config import ZeroConfig
from rayzero.errors import HandshakeError, MemoryPlanError, StoreError, UnsupportedError
from rayzero.kernels import splits_masters
from rayzero.layout.model_layout import ModelLayout, lay_out_unit
from rayzero.layout.shard_map import shard_map_for
from rayzero.memory.planner import plan_owner
from rayzero.owner.gradients import shard_sums
from rayzero.protocol.messages import MEAN_BYTES, MeanInput, ModelSpec
from rayzero.slabs.sweep import SHARED_MEMORY, list_slabs
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.owner.handlers import ModelCalls
from rayzero.store.owner.memory.shared_owner import SharedOwner
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.owner_table import OwnerTable, connect_store
from rayzero.store.shm.lines import Line
from rayzero.store.shm.shared_plan import SharedPlan
from rayzero.store.shm.signals import Bell
from rayzero.store.shm.words import Stamps
from rayzero.telemetry.names import TRANSFER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder, NullRecorder
from tests.support import needs
from tests.support.waiting import until

from .stores import TOKEN, connected, serving
from .toy import WAIT, PlainAdamW, Rank, equal, make_spec, masters, random_grads, started, take_step

pytestmark = needs.signals_between_processes


def served(
    stack: ExitStack,
    num_owners: int,
    *,
    sharing: bool = True,
    directory: Path = SHARED_MEMORY,
    directories: Sequence[Path] = (),
) -> list[str]:
    """Addresses of owners that share memory. ``directories``: of each, on hosts of their own."""
    shares = directories or [directory if sharing else None] * num_owners
    return [server.address for server in stack.enter_context(serving(shares=shares))]


def ranks_of(
    stack: ExitStack, addresses: list[str], world_size: int, *, share: Path = SHARED_MEMORY, **options: Any
) -> list[Rank]:
    stores = connected(addresses, world_size, share=share, **options)
    return stack.enter_context(started(stores, make_spec(world_size)))


def test_no_call_is_made_within_a_step(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gRPC, or over a line."""
    calls, answer = list[str](), ModelCalls.answer

    async def counted(self: ModelCalls, service: str, method: str, request: Any, context: Any) -> Any:
        calls.append(method)
        return await answer(self, service, method, request, context)

    monkeypatch.setattr(ModelCalls, "answer", counted)
    ranks = ranks_of(stack, served(stack, 3), 2)
    assert set(calls) >= {"Attach", "Share", "Load"}
    take_step(ranks, [random_grads(ranks[0].spec, rank) for rank in range(2)])
    for rank in ranks:
        rank.fetch(1)
    calls.clear()
    for step in range(1, 4):
        take_step(ranks, [random_grads(ranks[0].spec, 10 * step + rank) for rank in range(2)])
        for rank in ranks:
            rank.fetch(step + 1)
        given = MeanInput(shape=(MEAN_BYTES // 8,), values=(1.0,) * (MEAN_BYTES // 8), weight=1.0)
        for mean in [rank.store.mean(given) for rank in ranks]:
            assert mean.result(WAIT) == given.values
    assert calls == []


@pytest.mark.parametrize(("world_size", "all_cores", "wakes"), [(1, True, False), (1, False, True), (2, True, True)])
def test_only_a_lone_rank_on_all_cores_lets_owners_sleep_until_its_finish(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, world_size: int, all_cores: bool, wakes: bool
) -> None:
    """[Note: all cores] in engine/units/transfers.py. What was dropped by zero_grad() does not count."""
    rung, ring = list[Bell](), Bell.ring
    attach = RankStore.attach
    monkeypatch.setattr(Bell, "ring", lambda bell: (rung.append(bell), ring(bell)))
    monkeypatch.setattr(RankStore, "attach", lambda store, spec: attach(store, spec, all_cores=all_cores))
    ranks = ranks_of(stack, served(stack, 2), world_size)
    plain = PlainAdamW(ranks[0].spec, fused=True)
    for step in range(3):
        for rank in ranks:
            rank.fetch()
            rank.push(random_grads(rank.spec, 50 + step), units=[0])
            rank.zero_grad()
        grads = [random_grads(rank.spec, 10 * step + rank.rank) for rank in ranks]
        rung.clear()
        for rank, mine in zip(ranks, grads, strict=True):
            rank.push(mine)
        assert bool(rung) is wakes
        for norm in [rank.finish() for rank in ranks]:
            norm.result(WAIT)
        plain.step(grads)
    for name, value in masters(ranks[0], 3).items():
        torch.testing.assert_close(value, plain.values[name], rtol=1e-6, atol=1e-7)


def test_a_message_of_another_rank_is_refused_over_a_line_too(stack: ExitStack) -> None:
    ranks = ranks_of(stack, served(stack, 1), 2)
    link = ranks[0].store.connection._links[0]  # type: ignore[attr-defined]
    with pytest.raises(HandshakeError, match="Leave of rank 1 was sent by rank 0"):
        link.ask("Leave", pb.LeaveRequest(rank=1)).result(WAIT)


def test_a_rank_opens_no_connection_to_owners_of_its_host(stack: ExitStack) -> None:
    program = """
import sys
from contextlib import ExitStack
import psutil
from store.test_shared_store import ranks_of
from store.toy import masters, random_grads, take_step
with ExitStack() as stack:
    (rank,) = ranks_of(stack, sys.argv[1:], 1)
    take_step([rank], [random_grads(rank.spec, 0)])
    masters(rank)  # states, which no memory shows
    print(len(psutil.Process().net_connections("inet")), flush=True)
"""
    with forked(program, *served(stack, 2)) as process:
        assert process.said() == "0"


@pytest.mark.parametrize("error", [MemoryPlanError("no room"), OSError("too many files")])
def test_a_rank_that_gets_no_line_calls_over_grpc(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_line(*_: object) -> None:
        raise error

    monkeypatch.setattr(Line, "make", no_line)
    (rank,) = ranks_of(stack, served(stack, 1), 1)
    take_step([rank], [random_grads(rank.spec, 0)])
    assert masters(rank)


def test_what_a_rank_said_before_it_left_is_heard_by_owners_that_were_slow_to_look(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaver, other = ranks_of(stack, served(stack, 2), 2)
    with monkeypatch.context() as slow:
        slow.setattr(SharedOwner, "_look", lambda _: None)
        leaver.push(random_grads(leaver.spec, 1))
        leaver.finish()
        leaver.store.close("end of the training loop")
    other.push(random_grads(other.spec, 2))
    assert other.finish().result(WAIT).finite
    other.fetch(1)


def test_who_asks_an_owner_that_cannot_hear_is_told_and_the_log_once(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Stamps) -> None:
        raise ValueError("stamps that cannot be read")

    ranks = ranks_of(stack, served(stack, 1), 3)
    monkeypatch.setattr(Stamps, "news", fail)
    finishing = []
    for rank in ranks:
        rank.push(random_grads(rank.spec, 1))
        finishing.append(rank.finish())
    ranks[2].store.close("end of the training loop")
    for finished in finishing[:2]:
        assert "stamps that cannot be read" in str(finished.exception(WAIT))
    assert caplog.text.count("cannot go on") == 1


def test_gradients_are_gathered_where_owners_read_and_parameters_read_where_owners_write(stack: ExitStack) -> None:
    there = {slab.path for slab in list_slabs()}
    (rank,) = ranks_of(stack, served(stack, 1), 1)
    store, spec = rank.store, rank.spec
    slabs = [slab for slab in list_slabs() if slab.path not in there and slab.header and slab.header.pid == os.getpid()]
    roles = sorted(slab.header.facts.role for slab in slabs if slab.header is not None)
    assert roles == ["control", "control", "grads", "lobby", "params", "state", "state"]
    assert all(slab.alive and slab.path.stat().st_mode & 0o777 == 0o600 for slab in slabs)
    mapped = store.mapped(0)
    assert mapped is not None
    before = mapped.clone()
    take_step([rank], [random_grads(spec, 1)])
    assert store.published(0, 1).result(20) == 1
    assert not torch.equal(mapped, before), "the same memory shows the new version"


@pytest.mark.promise("observable", "transports")
def test_bytes_are_counted_as_shared_memory(stack: ExitStack) -> None:
    recorder = MemoryRecorder()
    (rank,) = ranks_of(stack, served(stack, 2), 1, recorder=recorder)
    take_step([rank], [random_grads(rank.spec, 1)])
    size = sum(unit.size_bytes for unit in rank.spec.layout.units)
    before = recorder.total(TRANSFER_BYTES, direction="fetch", transport="shm")
    rank.fetch(1)
    assert recorder.total(TRANSFER_BYTES, direction="fetch", transport="shm") - before == size
    assert recorder.total(TRANSFER_BYTES, direction="push", transport="shm") == size
    assert recorder.total(TRANSFER_BYTES, direction="push", transport="grpc") == 0


def test_transport_shm_refuses_owners_elsewhere_and_auto_takes_them(stack: ExitStack) -> None:
    addresses = served(stack, 1, sharing=False)
    config = ZeroConfig(transport="shm")
    forced = connect_store(0, OwnerTable(addresses), token=TOKEN, config=config, recorder=NullRecorder())
    stack.callback(forced.close)
    with pytest.raises(UnsupportedError, match=r"transport='shm', but optimizers \[0\] share no memory with rank 0"):
        forced.attach(make_spec(1))


PLANNED = f"planned {os.getpid()}"  # this process's run: others may measure theirs beside it


def planned(stack: ExitStack, dtype: torch.dtype, accumulation_steps: int = 1) -> list[Rank]:
    """Two ranks and two owners of 5.3M parameters."""
    shapes = ((700, 1024), (1024, 1031), (3, 5))
    units = tuple(
        lay_out_unit(i, f"u{i}", dtype, True, [(f"u{i}.{k}", shape) for k, shape in enumerate(shapes)])
        for i in range(3)
    )
    base = make_spec(2)
    spec = ModelSpec(
        run=PLANNED,
        layout=ModelLayout(units=units, shard_numel=1 << 18),
        world_size=2,
        optimizer=base.optimizer,
        hyper=base.hyper,
        group_of=((0,) * len(shapes),) * len(units),
        accumulation_steps=accumulation_steps,
    )
    return stack.enter_context(started(connected(served(stack, 2), 2, share=SHARED_MEMORY), spec))


def planned_pages() -> int:
    """Bytes of the pages that exist, not what sizes say."""
    slabs = [s for s in list_slabs() if s.header is not None and s.header.facts.run == PLANNED and s.alive]
    return sum(slab.path.stat().st_blocks * 512 for slab in slabs)


@pytest.mark.promise("bounded", "transports")
@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_a_run_is_the_plans_within_5_percent(
    stack: ExitStack, dtype: torch.dtype, accumulation_steps: int
) -> None:
    [rank, _] = planned(stack, dtype, accumulation_steps)
    there, spec = planned_pages(), rank.spec
    shard_map = shard_map_for(spec.layout, 2, spec.shard_map)
    splits = splits_masters("auto", "fp32")
    plans = [
        plan_owner(spec.layout, shard_map, k, 2, accumulation_steps, splits=splits, own_gradients=True)
        for k in range(2)
    ]
    assert there == pytest.approx(sum(plan.total for plan in plans), rel=0.05)


@pytest.mark.promise("bounded")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_owners_that_stand_still_have_no_memory_for_totals(
    stack: ExitStack, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for idle_s in (3600.0, 0.05):
        monkeypatch.setattr(shard_sums, "IDLE_S", idle_s)
        with ExitStack() as run:
            ranks = planned(run, dtype)
            totals = 4 * sum(shard.numel for shard in ranks[0].spec.layout.shards)
            for step in range(3):
                take_step(ranks, [random_grads(ranks[0].spec, 10 * step + rank) for rank in range(2)])
                rest = planned_pages() - 0.95 * totals
                if idle_s < 1:
                    until(lambda most=rest: planned_pages() < most, WAIT, "totals were not given back")
            found.append(masters(ranks[0], 3))
    assert equal(*found)


# ---- processes


@pytest.mark.timeout(20)
def test_a_file_that_is_no_slab_is_not_opened(tmp_path: Path) -> None:
    """A rank says which files are its slabs: an owner that opens a FIFO to read it waits for ever."""
    os.mkfifo(tmp_path / "pipe")
    plan = SharedPlan.of(make_spec(1), 1)
    for path, said in ((tmp_path / "pipe", "it is a FIFO"), (Path("/dev/zero"), "it is a device")):
        with pytest.raises(StoreError, match=rf"optimizer 0 cannot map {path}: {said}, not a regular file"):
            plan.attach(str(path), "optimizer 0", writable=False)
    with pytest.raises(HandshakeError, match="is not there"):
        plan.attach(str(tmp_path / "none"), "optimizer 0", writable=False)
