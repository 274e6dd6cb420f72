"""What a rank's loop needs to go on is kept where it outlives the rank, over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayzero.errors import StoreClosedError
from rayzero.protocol.messages import AT_COMMIT, AT_FORWARD, LoopState, MeanInput, ModelSpec
from rayzero.store.rank.shared_memory import SharedRank
from rayzero.store.shm import recovery
from rayzero.store.shm.recovery import LoopSlab, loop_states, remove_former_lives
from rayzero.store.shm.shared_plan import SharedPlan, life_of, of_lineage, rank_incarnation
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


# ---- a rank's slab, alone

PLAN = SharedPlan.of(make_spec(world_size=2), 1)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedRank]:
    made = SharedRank(1, PLAN, tmp_path, life=1)
    yield made
    made.close(StoreClosedError("closed"))


def left(directory: Path, life: int, *states: LoopState) -> None:
    """What a life has left whose process was killed."""
    slab = LoopSlab.create(PLAN, 1, rank_incarnation(life), 100, directory)
    for each in states:
        slab.write(each)
    slab.slab.close(unlink=False)


def test_what_a_former_life_has_left_goes_once_nobody_needs_it(shared: SharedRank, tmp_path: Path) -> None:
    """It is found until a step is decided behind those of that life."""
    left(tmp_path, 0, state(4), state(5))
    assert shared.kept() == [state(4), state(5)]
    shared.back_at, there = 6, []
    for step in (7, 8, 9):
        shared.keep(state(step))
        there.append(any(life_of(facts.incarnation) == 0 for _, facts in of_lineage(PLAN.spec, tmp_path)))
    assert there == [True, True, False]
    assert shared.kept() == [state(7), state(8), state(9)]


def test_only_the_newest_steps_count_each_part_once_as_the_last_life_has_it(tmp_path: Path) -> None:
    older = LoopState(step=4, part=AT_COMMIT, content=b"older")
    left(tmp_path, 1, state(6), state(4))
    left(tmp_path, 0, older, state(3), state(6, AT_FORWARD))
    assert loop_states(PLAN, 1, tmp_path) == [state(4), state(6), state(6, AT_FORWARD)]
    assert loop_states(PLAN, 0, tmp_path) == []


def test_a_state_whose_life_ends_meanwhile_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes its slab, as this one looks."""
    for life in (0, 1):
        left(tmp_path, life, state(5 + life))

    def listed(spec: ModelSpec, directory: Path) -> list[Any]:
        monkeypatch.setattr(recovery, "of_lineage", of_lineage)  # what removes lists them, too
        found = of_lineage(spec, directory)
        remove_former_lives(spec, 1, 1, directory)
        return found

    monkeypatch.setattr(recovery, "of_lineage", listed)
    assert loop_states(PLAN, 1, tmp_path) == [state(6)]
