"""What a rank's loop needs to go on is kept where it outlives the rank, over every transport."""

from __future__ import annotations

import pytest

from rayzero.protocol.messages import AT_COMMIT, AT_FORWARD, LoopState, MeanInput
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
