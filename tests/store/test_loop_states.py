"""What a rank's loop needs to go on is kept where it outlives the rank, over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rayzero.concurrency.futures import settled
from rayzero.errors import StoreClosedError
from rayzero.protocol.messages import AT_COMMIT, AT_FORWARD, LoopState, MeanInput, ModelSpec
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.rank.shared_memory import SharedRank
from rayzero.store.remote.lead_line import LoopHistory, newest
from rayzero.store.shm import recovery
from rayzero.store.shm.recovery import LoopSlab, remove_former_lives
from rayzero.store.shm.shared_plan import SharedPlan, life_of, of_lineage, rank_incarnation
from rayzero.store.wire import translate
from store.stores import StoreFactory
from store.toy import WAIT, make_spec, random_grads, start, take_step


def state(step: int, part: int = AT_COMMIT, size: int = 100) -> LoopState:
    return LoopState(step=step, part=part, content=bytes([step % 256, part]) * (size // 2))


@pytest.mark.parametrize("size", [2, 40_000, 3_000_000])
def test_the_parts_of_the_latest_three_steps_are_kept(make_stores: StoreFactory, size: int) -> None:
    with make_stores(2, 3) as stores:
        spec = make_spec(world_size=2)
        ranks = start(stores, spec)
        assert stores[0].kept() == []
        for step in range(1, 5):
            stores[0].keep(state(step, AT_COMMIT, size))
            stores[0].keep(state(step, AT_FORWARD, size))
        stores[1].keep(state(9, AT_COMMIT, size))
        take_step(ranks, [random_grads(spec, 0), random_grads(spec, 1)])  # a commit waits until they are kept
        assert stores[0].kept() == [state(step, part, size) for step in (2, 3, 4) for part in (AT_COMMIT, AT_FORWARD)]
        assert stores[1].kept() == [state(9, AT_COMMIT, size)]


def test_a_new_life_removes_the_states_of_its_rank_that_dead_ones_have_left(tmp_path: Path) -> None:
    """Nobody sweeps on hosts other than the driver's when the run ends."""
    spec = make_spec(world_size=2)
    for rank, life in ((0, 0), (1, 0), (1, 1)):
        slab = LoopSlab.create(SharedPlan.of(spec, 1), rank, rank_incarnation(life), 100, tmp_path).slab
        slab.close(unlink=False)  # as if its process were killed
    remove_former_lives(spec, 1, 1, tmp_path)
    assert sorted((facts.index, life_of(facts.incarnation)) for _, facts in of_lineage(spec, tmp_path)) == [
        (0, 0),
        (1, 1),
    ]


def test_a_state_that_outgrows_its_room_is_kept_beside_the_earlier_one(make_stores: StoreFactory) -> None:
    with make_stores(1, 1) as stores:
        spec = make_spec(world_size=1)
        ranks = start(stores, spec)
        stores[0].keep(state(1))
        stores[0].keep(state(2, size=900_000))
        take_step(ranks, [random_grads(spec, 0)])
        assert stores[0].kept() == [state(1), state(2, size=900_000)]


def test_the_number_of_means_is_known(make_stores: StoreFactory) -> None:
    with make_stores(1, 1) as stores:
        start(stores, make_spec(world_size=1))
        assert stores[0].means == 0
        stores[0].mean(MeanInput(values=(1.0,), weight=1.0)).result(WAIT)
        assert stores[0].means == 1


# ---- a rank's end, alone


class Keeper:
    """An owner that keeps what it gets."""

    def __init__(self) -> None:
        self.states: list[LoopState] = []
        self.slabs: list[str] = []

    def ask(self, method: str, request: Any) -> Future[Any]:
        if method == "GetKept":
            return settled(pb.GetKeptResponse(states=map(translate.loop_state_to_pb, self.states)))
        if request.HasField("slab"):
            self.slabs.append(request.slab)
        else:
            self.states.append(translate.loop_state_from_pb(request.state))
        return settled(pb.KeepResponse())


def states_of(
    keeper: Keeper, shared: SharedRank | None = None, directory: Path | None = None, **how: Any
) -> LoopHistory:
    said = {"maps": False, "back_at": None} | how
    return LoopHistory(1, keeper, PLAN, shared, directory, **said)


PLAN = SharedPlan.of(make_spec(world_size=2), 1)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedRank]:
    made = SharedRank(1, PLAN, tmp_path, life=1)
    yield made
    made.close(StoreClosedError("closed"))


def test_a_successor_gets_what_the_loop_may_go_back_to() -> None:
    first, successor = Keeper(), Keeper()
    loop = states_of(first)
    for step in range(1, 5):
        loop.keep(state(step)).result(WAIT)
    assert loop.is_with(first)
    loop.give(lambda sent: successor.ask("Keep", sent).result())
    assert first.states == [state(step) for step in (1, 2, 3, 4)]
    assert successor.states == [state(3), state(4)]


def test_a_keeper_that_maps_the_slab_gets_its_name_once(shared: SharedRank) -> None:
    keeper, successor = Keeper(), Keeper()
    loop = states_of(keeper, shared, maps=True)
    for step in range(1, 4):
        loop.keep(state(step)).result(WAIT)
    loop.give(lambda sent: successor.ask("Keep", sent).result())
    path, kept = shared.kept()
    assert keeper.slabs == successor.slabs == [path]
    assert (keeper.states, successor.states) == ([], [])
    assert sorted(kept, key=lambda each: each.step) == [state(step) for step in (1, 2, 3)]


@pytest.mark.parametrize("maps", [True, False])
def test_a_keeper_of_the_next_epoch_gets_everything(maps: bool, shared: SharedRank) -> None:
    before, now = Keeper(), Keeper()
    loop = states_of(before, shared, maps=not maps)
    for step in (1, 2, 3):
        loop.keep(state(step)).result(WAIT)
    loop.enter(now)
    assert not loop.is_with(before)
    loop.give_all(PLAN, maps=maps)
    assert now.slabs == [shared.kept()[0]] * maps
    assert sorted(each.step for each in now.states) == [1, 2, 3] * (not maps)
    loop.keep(state(4)).result(WAIT)
    assert [each.step for each in now.states[3:]] == [4] * (not maps)


def test_what_a_former_life_has_left_goes_once_nobody_needs_it(shared: SharedRank, tmp_path: Path) -> None:
    """It is found beside what the keeper has until a step is decided behind those of that life."""
    left = LoopSlab.create(PLAN, 1, rank_incarnation(0), 100, tmp_path)
    left.write(state(5))
    left.slab.close(unlink=False)  # as if its process were killed
    keeper = Keeper()
    keeper.states = [state(4), state(6)]
    loop = states_of(keeper, shared, tmp_path, back_at=6)
    assert loop.kept() == [state(4), state(5), state(6)]
    there = []
    for step in (7, 8, 9):
        loop.keep(state(step)).result(WAIT)
        there.append(any(life_of(facts.incarnation) == 0 for _, facts in of_lineage(PLAN.spec, tmp_path)))
    assert there == [True, True, False]


def test_only_the_newest_steps_count_each_part_once() -> None:
    older = LoopState(step=4, part=AT_COMMIT, content=b"older")
    found = newest([older, state(6, AT_FORWARD), state(2), state(6), state(4), state(3)])
    assert found == [state(4), state(6), state(6, AT_FORWARD)]
    assert newest([]) == []


def test_a_state_that_its_rank_removes_meanwhile_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's present life removes those of its former ones; a successor of its keeper may look at that moment."""
    for life in (0, 1):
        slab = LoopSlab.create(PLAN, 1, rank_incarnation(life), 100, tmp_path)
        slab.write(state(5 + life))
        slab.slab.close(unlink=False)

    def listed(spec: ModelSpec, directory: Path) -> list[Any]:
        monkeypatch.setattr(recovery, "of_lineage", of_lineage)  # what removes lists them, too
        found = of_lineage(spec, directory)
        remove_former_lives(spec, 1, 1, directory)
        return found

    monkeypatch.setattr(recovery, "of_lineage", listed)
    found = recovery.loop_slabs(PLAN, "optimizer 0", tmp_path, lambda _: True)
    assert [list(each.states()) for each in found[1]] == [[state(6)]]
    for each in found[1]:
        each.close()
