"""A rank's gradients in its own memory, and what an owner makes of what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rayzero.concurrency.futures import Gather, settled
from rayzero.errors import AccumulationError, StoreClosedError, StoreError
from rayzero.owner.memory import carve
from rayzero.owner.service import ShardService
from rayzero.protocol.gradient_sum import POOL_ALIGN, GradientMemory, gradient_sizes, pool_room
from rayzero.protocol.messages import AT_HOME, IN_TOTAL, Contribution, FinishReport, ModelSpec, Pushed, pack_presence
from rayzero.store.host.waits import PublishBoard
from rayzero.store.rank.connection import Announce, Epochs, GradientSender, Joined, nothing
from rayzero.store.rank.gradient_region import GradientPool, GradientRegion, gradient_region
from rayzero.store.rank.pushes import Pushes, Route
from rayzero.telemetry.recorder import NullRecorder
from tests.support.waiting import until

from .toy import WAIT, flatten, make_spec, random_grads

UNIT = 1  # of the toy's: four slots


def push_of(seq: int = 0, *, attempt: int = 0, step: int = 0, present: tuple[bool, ...] = (True,) * 4) -> Contribution:
    return Contribution(step=step, attempt=attempt, rank=0, unit=UNIT, seq=seq, presence=pack_presence([*present]))


def region_of(spec: ModelSpec) -> GradientRegion:
    blocks = [carve(sizes, dtype) for dtype, sizes in gradient_sizes(spec).items()]
    return gradient_region(spec, GradientMemory({unit: flat for block in blocks for unit, flat in block.items()}))


def grads_of(spec: ModelSpec, seed: int) -> Tensor:
    unit = spec.layout.units[UNIT]
    return flatten(unit, random_grads(spec, seed), unit.dtype)


def test_gathering_in_place_copies_nothing_and_a_repeat_is_dropped() -> None:
    spec = make_spec(1)
    region = region_of(spec)
    landing = region.landing(push_of(0))
    assert landing is not None
    assert landing.data_ptr() == region.memory.homes[UNIT].data_ptr()
    landing.fill_(3.0)
    assert region.put(push_of(0), landing)
    assert region.landing(push_of(0)) is None
    assert not region.put(push_of(0), torch.zeros_like(landing))
    assert region.memory.homes[UNIT].eq(3.0).all()
    assert region.landing(push_of(1)) is None, "a later push is added, not gathered in place"
    assert region.landing(push_of(0, attempt=1)) is not None


def test_what_cannot_be_written_is_refused_by_name() -> None:
    spec = make_spec(1, dtypes=[torch.bfloat16] * 3, frozen=[0])
    region = region_of(spec)
    region.put(push_of(0), grads_of(spec, 1))
    with pytest.raises(AccumulationError, match=r"'layers.0' 2 times in step 0.*set gradient_accumulation_steps"):
        region.put(push_of(1), grads_of(spec, 1))
    frozen = Contribution(step=0, attempt=0, rank=0, unit=0, seq=0, presence=b"\x01")
    with pytest.raises(StoreError, match="pushed unit 0 with 1 presence bytes: it is not trained"):
        region.is_stale(frozen)
    with pytest.raises(StoreError, match=r"pushed unit 1 with 2 presence bytes: 'layers\.0' has 1"):
        region.is_stale(Contribution(step=0, attempt=0, rank=0, unit=1, seq=0, presence=b"\x01\x00"))


def pushes_over(
    region: GradientRegion,
    published: Callable[[int, int], Future[int]],
    announce: Announce = nothing,
    note: Announce = nothing,
    *,
    needed: bool = False,
) -> Pushes:
    """Pushes into a region. ``needed``: no owner has anything in its totals."""
    connection: Any = SimpleNamespace(
        rank=0,
        recorder=NullRecorder(),
        epochs=Epochs(change=False),
        in_totals=lambda unit, pushed: not needed,
        on_bell=lambda look: None,
    )
    pushes = Pushes(connection, published)
    joined = SimpleNamespace(gradients=region, announce=announce, note=note, gradient_tier="ram", pages=None)
    pushes.join(cast("Joined", joined), [route_of(make_spec(1))] * (UNIT + 1))
    return pushes


def route_of(spec: ModelSpec, away: Sequence[GradientSender] = ()) -> Route:
    """A unit of which owners of this host, and perhaps others, get the gradients."""
    unit = spec.layout.units[UNIT]
    shards = list(spec.layout.shards_by_unit[UNIT])
    return Route(
        unit,
        [],
        [(sender, shards) for sender in away],
        keeps=False,
        here_by={"shm": unit.numel},
        shards=[],
        versions=PublishBoard(),
    )


class HeldSender:
    """Sends nothing before ``go``."""

    def __init__(self) -> None:
        self.held: list[Gather] = []

    def push(self, gather: Gather, *_: object) -> None:
        self.held.append(gather)

    def go(self) -> None:
        for gather in self.held:
            gather.start()
            gather.end(None)


def test_a_push_is_written_when_its_range_is_free_and_told_after_that() -> None:
    spec = make_spec(1)
    region = region_of(spec)
    told: list[tuple[int, float]] = []
    asked: list[tuple[int, int]] = []
    frees: list[Future[int]] = [Future(), Future()]

    def published(unit: int, version: int) -> Future[int]:
        asked.append((unit, version))
        return frees[version]

    def announce(unit: int, pushed: Sequence[Pushed]) -> None:
        told.append((pushed[-1].count, float(region.memory.homes[unit][0])))

    def note(unit: int, pushed: Sequence[Pushed]) -> None:
        raise AssertionError(unit)

    pushes, route = pushes_over(region, published, announce, note, needed=True), route_of(spec)
    landed: list[int] = []
    ones = torch.ones(spec.layout.units[UNIT].numel)
    assert pushes.landing(push_of(0)) is None, "not free yet"
    later = [
        pushes.push(route, push_of(1), ones, lambda: landed.append(1)),
        pushes.push(route, push_of(0), 2 * ones, lambda: landed.append(0)),
    ]
    assert told == []
    assert region.memory.homes[UNIT][0] == 0
    frees[0].set_result(0)
    for done in later:
        done.result(WAIT)
    assert told == [(1, 2.0), (2, 3.0)]
    assert asked == [(UNIT, 0)], "once a step"
    until(lambda: landed == [0, 1], WAIT, "both are said to have landed, after what waits for them goes on")
    pushes.close()
    waiting = pushes.push(route, push_of(0, step=1), ones, lambda: landed.append(2))
    frees[1].set_result(0)  # too late: the store was closed
    with pytest.raises(StoreClosedError):
        waiting.result(WAIT)
    assert landed == [0, 1]


def test_a_range_that_is_being_sent_elsewhere_is_neither_added_to_nor_gathered_in() -> None:
    spec = make_spec(1)
    region = region_of(spec)
    pushes, sender = pushes_over(region, lambda unit, version: settled(0)), HeldSender()
    here, also_away = route_of(spec), route_of(spec, [sender])
    pushes.join(cast("Joined", SimpleNamespace(gradients=region, pages=None)), [also_away] * (UNIT + 1))
    first, ones = push_of(0), torch.ones(spec.layout.units[UNIT].numel)
    landing = pushes.landing(first)
    assert landing is not None
    sending = pushes.push(also_away, first, landing.fill_(2.0), lambda: None)
    assert (len(sender.held), sending.done()) == (1, False)
    second = pushes.push(here, push_of(1), ones, lambda: None)
    assert pushes.landing(push_of(0, attempt=1)) is None
    assert (region.memory.homes[UNIT][0], second.done()) == (2.0, False)
    sender.go()
    for done in (sending, second):
        done.result(WAIT)
    assert region.memory.homes[UNIT][0] == 3.0
    assert pushes.landing(push_of(0, attempt=1)) is not None
    assert not pushes.push(also_away, push_of(2), ones, lambda: None).done()
    last = pushes.push(here, push_of(3), ones, lambda: None)
    assert last.done(), "the sending of what lies elsewhere keeps no range"
    pushes.close()


# ---- an owner that is told


def test_a_report_of_a_rank_that_has_not_attached_here_waits_for_its_pushes() -> None:
    spec = make_spec(1)
    service = ShardService(0, 1)
    other = make_spec(2)
    try:
        service.attach(0, other, own_gradients=True)
        service.map_gradients(0, region_of(other).memory)
        none = (0,) * len(spec.layout.units)
        reports = [FinishReport(step=0, attempt=0, rank=rank, counts=none) for rank in range(2)]
        late = FinishReport(step=0, attempt=0, rank=1, counts=(0, 1, 0))
        assert service.collect(0, tuple(reports)).result(WAIT).parts == ()
        assert not service.collect(0, (reports[0], late)).done()
    finally:
        service.close()


def test_a_home_has_no_pages_taken_from_it_once_it_may_be_written_again() -> None:
    """Another thread gives ranges back: between its look and its act, the next push must not get the same home."""
    spec = make_spec(2)
    homes = region_of(spec).memory.homes
    waits = threading.Event()

    class Pages:
        def __init__(self) -> None:
            self.said: list[str] = []

        def allocate(self, unit: int, number: int) -> None:
            self.said.append("allocated")

        def give_back(self, unit: int, number: int) -> None:
            waits.set()
            time.sleep(0.2)  # the push has as much time to come between
            self.said.append("given back")

    pages = Pages()
    region = gradient_region(spec, GradientMemory(homes, torch.zeros(0, dtype=torch.uint8)), pages)
    (pushed,) = region.put(push_of(), grads_of(spec, 1))
    assert region.given(UNIT, 1) is None, "owners know nothing of it yet"
    region.announced(UNIT)
    assert (region.held(), region.given(UNIT, 1)) == ([(UNIT, 1)], pushed)
    giving = threading.Thread(target=region.give_back, args=(UNIT, pushed, lambda _: None))
    giving.start()
    assert waits.wait(WAIT)
    region.put(push_of(step=1), grads_of(spec, 2))
    giving.join()
    assert pages.said == ["allocated", "given back", "allocated"]
    assert torch.equal(homes[UNIT], grads_of(spec, 2))


# ---- one of several ranks: each push by itself


def rounds_region(steps: int) -> tuple[GradientRegion, list[str]]:
    """Over a pool with room for one push of the unit, and what is said of the pages of homes."""
    spec, said = make_spec(2, accumulation_steps=steps), list[str]()
    homes = region_of(spec).memory.homes
    made = {(UNIT, number): torch.zeros_like(homes[UNIT]) for number in range(1, steps + 1)}

    class Pages:
        def allocate(self, unit: int, number: int) -> None:
            said.append(f"allocated {number}")

        def give_back(self, unit: int, number: int) -> None:
            said.append(f"gave back {number}")

    pool = torch.zeros(pool_room(homes[UNIT].nbytes), dtype=torch.uint8)
    memory = GradientMemory(homes, pool, lambda unit, number: made[unit, number])
    return gradient_region(spec, memory, Pages()), said


def test_each_push_has_a_place_of_its_own_until_it_is_in_totals() -> None:
    region, said = rounds_region(3)
    told = [region.put(push_of(seq), grads_of(make_spec(2), seq)) for seq in range(3)]
    assert [[each.count for each in pushes] for pushes in told] == [[1], [1, 2], [1, 2, 3]]
    assert [each.place for each in told[-1]] == [0, AT_HOME, AT_HOME - 1]
    for seq, each in enumerate(told[-1]):
        memory = region.memory.at(UNIT, each.place)
        assert memory is not None
        assert torch.equal(memory, grads_of(make_spec(2), seq))
    region.announced(UNIT)
    noted: list[Sequence[Pushed]] = []
    region.give_back(UNIT, told[-1][1], noted.append)
    assert [each.place for each in noted[-1]] == [0, IN_TOTAL, AT_HOME - 1]
    assert (region.given(UNIT, 1), region.given(UNIT, 2)) == (told[-1][0], None)
    (*_, fourth) = region.put(push_of(3), grads_of(make_spec(2), 3))
    assert fourth.place == AT_HOME, "where the second one was"
    assert said == ["allocated 0", "allocated 1", "gave back 0", "allocated 0"]
    with pytest.raises(AccumulationError, match=r"'layers.0' 5 times in step 0, but 3 backwards a step were planned"):
        region.put(push_of(4), grads_of(make_spec(2), 4))


def test_a_newer_attempt_takes_the_places_of_the_last_one() -> None:
    region, said = rounds_region(2)
    for seq in range(2):
        region.put(push_of(seq), grads_of(make_spec(2), seq))
    landing = region.landing(push_of(attempt=1))
    assert landing is not None
    (told,) = region.put(push_of(attempt=1), landing.fill_(3.0))
    assert (told.place, told.count, said) == (0, 1, ["allocated 0", "gave back 0"])
    assert not region.put(push_of(1), landing), "of the attempt before"
    copy = region.copy(UNIT, told, make_spec(2).layout.shards_by_unit[UNIT])
    assert copy is not None
    assert copy.eq(3.0).all()


# ---- the pool: ranges, never two at once in one place

POOL_SIZE = 16 * POOL_ALIGN


def test_the_lowest_free_range_is_given_first() -> None:
    pool = GradientPool(POOL_SIZE)
    first, second = pool.take(3 * POOL_ALIGN), pool.take(1)
    assert (first, second) == (0, 3 * POOL_ALIGN)
    pool.give_back(0, 3 * POOL_ALIGN)
    assert pool.take(2 * POOL_ALIGN) == 0
    assert pool.take(2 * POOL_ALIGN) == 4 * POOL_ALIGN, "one is left before the second"


def test_an_empty_pool_has_no_range() -> None:
    assert GradientPool(0).take(1) is None


@given(st.lists(st.tuples(st.integers(1, POOL_SIZE), st.integers(0, 5)), max_size=60))
def test_ranges_never_meet_and_what_is_given_back_is_whole_again(moves: list[tuple[int, int]]) -> None:
    pool, taken = GradientPool(POOL_SIZE), list[tuple[int, int]]()
    for size, back in moves:
        start = pool.take(size)
        if start is not None:
            assert start + size <= POOL_SIZE
            assert all(start + size <= at or at + length <= start for at, length in taken)
            taken.append((start, size))
        if taken and (back < 2 or start is None):
            pool.give_back(*taken.pop(back % len(taken)))
    for each in taken:
        pool.give_back(*each)
    assert pool.take(POOL_SIZE) == 0
