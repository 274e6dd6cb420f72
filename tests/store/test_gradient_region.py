"""A rank's gradients in its own memory, and what an owner makes of what it is told."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from rayzero.concurrency.futures import settled
from rayzero.errors import AccumulationError, StepMismatchError, StoreClosedError, StoreError
from rayzero.owner.memory import carve
from rayzero.owner.service import ShardService
from rayzero.protocol.gradient_sum import GradientMemory, gradient_sizes
from rayzero.protocol.messages import Contribution, FinishReport, ModelSpec, Pushed, pack_presence
from rayzero.store.rank.memory.gradient_region import GradientRegion
from rayzero.store.rank.memory.gradient_writer import GradientWriter

from .toy import WAIT, flatten, initial_values, make_spec, random_grads

UNIT = 1  # of the toy's: four slots


def push_of(seq: int = 0, *, attempt: int = 0, step: int = 0, present: tuple[bool, ...] = (True,) * 4) -> Contribution:
    return Contribution(step=step, attempt=attempt, rank=0, unit=UNIT, seq=seq, presence=pack_presence([*present]))


def region_of(spec: ModelSpec) -> GradientRegion:
    blocks = [carve(sizes, dtype) for dtype, sizes in gradient_sizes(spec).items()]
    return GradientRegion(spec, GradientMemory({unit: flat for block in blocks for unit, flat in block.items()}))


def grads_of(spec: ModelSpec, seed: int) -> Tensor:
    unit = spec.layout.units[UNIT]
    return flatten(unit, random_grads(spec, seed), unit.dtype)


@pytest.mark.parametrize("steps", [1, 3])
def test_later_pushes_are_added_in_fp32_in_their_order(steps: int) -> None:
    spec = make_spec(1, dtypes=[torch.bfloat16 if steps > 1 else torch.float32] * 3, accumulation_steps=steps)
    region = region_of(spec)
    expected = torch.zeros(spec.layout.units[UNIT].numel)
    for seq in range(3):
        grads = grads_of(spec, seq)
        expected = expected + torch.nan_to_num(grads.float()) if seq else torch.nan_to_num(grads.float())
        told = region.put(push_of(seq), grads)
        assert told == Pushed(step=0, attempt=0, count=seq + 1, presence=b"\x0f")
    for slot in spec.layout.units[UNIT].slots:
        assert torch.equal(region.memory.homes[UNIT][slot.start : slot.stop], expected[slot.start : slot.stop])


def test_a_slot_that_only_a_later_push_has_is_not_added_to_what_lay_there() -> None:
    spec = make_spec(1)
    region = region_of(spec)
    region.memory.homes[UNIT].fill_(7.0)  # of an earlier step
    first, second = grads_of(spec, 1), grads_of(spec, 2)
    region.put(push_of(0, present=(True, False, True, False)), first)
    told = region.put(push_of(1, present=(True, True, True, False)), second)
    assert told is not None
    assert told.presence == b"\x07"
    weight, bias = spec.layout.units[UNIT].slots[:2]
    got = region.memory.homes[UNIT]
    both = first[weight.start : weight.stop] + second[weight.start : weight.stop]
    assert torch.equal(got[weight.start : weight.stop], both)
    assert torch.equal(got[bias.start : bias.stop], second[bias.start : bias.stop])


def test_gathering_in_place_copies_nothing_and_a_repeat_is_dropped() -> None:
    spec = make_spec(1)
    region = region_of(spec)
    landing = region.landing(push_of(0))
    assert landing is not None
    assert landing.data_ptr() == region.memory.homes[UNIT].data_ptr()
    landing.fill_(3.0)
    assert region.put(push_of(0), landing) is not None
    assert region.landing(push_of(0)) is None
    assert region.put(push_of(0), torch.zeros_like(landing)) is None
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


def test_a_push_is_written_when_its_range_is_free_and_told_after_that() -> None:
    spec = make_spec(1)
    region = region_of(spec)
    told: list[tuple[int, float]] = []
    asked: list[tuple[int, int]] = []
    frees: list[Future[int]] = [Future(), Future()]

    class Readers:
        def published(self, unit: int, version: int) -> Future[int]:
            asked.append((unit, version))
            return frees[version]

        def need(self, unit: int, pushed: Pushed) -> bool:
            return True

        def note(self, unit: int, pushed: Pushed) -> None:
            raise AssertionError(unit)

        def announce(self, unit: int, pushed: Pushed) -> None:
            told.append((pushed.count, float(region.memory.homes[unit][0])))

    writer = GradientWriter(region, Readers(), "test")
    ones = torch.ones(spec.layout.units[UNIT].numel)
    assert writer.landing(push_of(0)) is None, "not free yet"
    later = [writer.push(push_of(1), ones), writer.push(push_of(0), 2 * ones)]
    assert told == []
    assert region.memory.homes[UNIT][0] == 0
    frees[0].set_result(0)
    for done in later:
        done.result(WAIT)
    assert told == [(1, 2.0), (2, 3.0)]
    assert asked == [(UNIT, 0)], "once a step"
    writer.close()
    waiting = writer.push(push_of(0, step=1), ones)
    frees[1].set_result(0)  # too late: the store was closed
    with pytest.raises(StoreClosedError):
        waiting.result(WAIT)


class Idle:
    """Owners that have read everything."""

    def published(self, unit: int, version: int) -> Future[int]:
        return settled(0)

    def announce(self, unit: int, pushed: Pushed) -> None:
        pass


def test_a_range_that_is_being_sent_elsewhere_is_neither_added_to_nor_gathered_in() -> None:
    spec = make_spec(1)
    region = region_of(spec)
    writer = GradientWriter(region, Idle(), "test")
    first, ones = push_of(0), torch.ones(spec.layout.units[UNIT].numel)
    landing = writer.landing(first)
    assert landing is not None
    sent: Future[None] = Future()
    assert writer.push(first, landing.fill_(2.0), sent).done()
    second = writer.push(push_of(1), ones)
    assert writer.landing(push_of(0, attempt=1)) is None
    assert (region.memory.homes[UNIT][0], second.done()) == (2.0, False)
    sent.set_result(None)
    second.result(WAIT)
    assert region.memory.homes[UNIT][0] == 3.0
    assert writer.landing(push_of(0, attempt=1)) is not None
    assert writer.push(push_of(2), ones, Future()).done()
    assert writer.push(push_of(3), ones).done(), "the sending of what lies elsewhere keeps no range"
    writer.close()


# ---- an owner that is told


def owner_with(spec: ModelSpec) -> tuple[ShardService, list[GradientRegion]]:
    service = ShardService(0, 1)
    regions = [region_of(spec) for _ in range(spec.world_size)]
    for rank, region in enumerate(regions):
        service.attach(rank, spec, own_gradients=True)
        service.map_gradients(rank, region.memory)
    values = initial_values(spec)
    for shard in spec.layout.shards:
        unit = spec.layout.units[shard.unit]
        service.load(shard.index, flatten(unit, values, unit.dtype).float()[shard.start : shard.stop])
    return service, regions


def report(spec: ModelSpec, counts: int, attempt: int = 0) -> FinishReport:
    return FinishReport(
        step=0, attempt=attempt, rank=0, counts=tuple(counts * (u.index == UNIT) for u in spec.layout.units)
    )


def norm_of(service: ShardService, spec: ModelSpec, counts: int, attempt: int = 0) -> float:
    parts = service.collect(0, (report(spec, counts, attempt),)).result(WAIT).parts
    return sum(square for _, _, square in parts)


def test_what_was_told_counts_and_a_lower_attempt_does_not() -> None:
    spec = make_spec(1)
    service, (region,) = owner_with(spec)
    try:
        for attempt, value in ((0, 1.0), (1, 2.0)):
            grads = torch.full((spec.layout.units[UNIT].numel,), value)
            told = region.put(push_of(0, attempt=attempt), grads)
            assert told is not None
            service.observe(0, UNIT, told)
        service.observe(0, UNIT, Pushed(step=0, attempt=0, count=9, presence=b"\x0f"))  # late news of the first
        elements = sum(slot.numel for slot in spec.layout.units[UNIT].slots)
        assert norm_of(service, spec, 1, attempt=1) == 4.0 * elements
    finally:
        service.close()


def test_news_may_skip_pushes_and_more_than_were_counted_is_an_error() -> None:
    spec = make_spec(1)
    service, (region,) = owner_with(spec)
    try:
        ones = torch.ones(spec.layout.units[UNIT].numel)
        told = [region.put(push_of(seq), ones) for seq in range(3)][-1]
        assert told is not None
        parts = service.collect(0, (report(spec, 3),))
        assert not parts.done()
        service.observe(0, UNIT, told)  # of three pushes at once
        parts.result(WAIT)
        with pytest.raises(StepMismatchError, match=r"with 2 pushes of 'layers\.0', but 3 arrived"):
            service.collect(0, (report(spec, 2),)).result(WAIT)
    finally:
        service.close()


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

        def allocate(self, unit: int) -> None:
            self.said.append("allocated")

        def give_back(self, unit: int) -> None:
            waits.set()
            time.sleep(0.2)  # the push has as much time to come between
            self.said.append("given back")

    pages = Pages()
    region = GradientRegion(spec, GradientMemory(homes, torch.zeros(0, dtype=torch.uint8)), pages)
    pushed = region.put(push_of(), grads_of(spec, 1))
    assert pushed is not None
    assert region.given(UNIT) is None, "owners know nothing of it yet"
    region.announced(UNIT)
    assert (region.held, region.given(UNIT)) == ((UNIT,), pushed)
    giving = threading.Thread(target=region.give_back, args=(UNIT, pushed, lambda _: None))
    giving.start()
    assert waits.wait(WAIT)
    region.put(push_of(step=1), grads_of(spec, 2))
    giving.join()
    assert pages.said == ["allocated", "given back", "allocated"]
    assert torch.equal(homes[UNIT], grads_of(spec, 2))
