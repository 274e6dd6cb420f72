"""One sum for both ends: an owner that adds a remote rank's pushes gets the bits of a rank that adds its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayzero.layout.model_layout import UnitLayout
from rayzero.protocol.gradient_sum import GradientSum, gradient_dtype
from rayzero.protocol.messages import Contribution, ModelSpec, Pushed, pack_presence

from .toy import flatten, make_spec, random_grads

UNIT = 1  # of the toy's: four slots, seven shards
SCHEDULES = (  # per push of an attempt: which slots have a gradient
    [(True, True, True, True)] * 3,
    [(True, False, True, False), (True, True, False, False), (False, True, True, False)],
    [(False, False, False, True), (True, True, True, True), (True, True, True, True)],
)


def push_of(seq: int, present: tuple[bool, ...], attempt: int = 0) -> Contribution:
    return Contribution(step=0, attempt=attempt, rank=0, unit=UNIT, seq=seq, presence=pack_presence([*present]))


def grads_of(spec: ModelSpec, seed: int) -> Tensor:
    unit = spec.layout.units[UNIT]
    flat = flatten(unit, random_grads(spec, seed), unit.dtype)
    for slot in unit.slots:
        flat[slot.stop : slot.padded_stop] = 5.0  # what a rank leaves in the padding counts for nothing
    return flat


def of_shards(spec: ModelSpec, memory: Tensor) -> list[tuple[GradientSum, slice]]:
    unit, found = spec.layout.units[UNIT], []
    for shard in spec.layout.shards_by_unit[UNIT]:
        where = slice(shard.start, shard.stop)
        found.append((GradientSum(unit, memory[where], spec.layout.slices(shard)), where))
    return found


def expected(unit: UnitLayout, pushes: list[Tensor], schedule: list[tuple[bool, ...]], index: int) -> Tensor:
    """Slot ``index`` of what was pushed, added in fp32 in the order of the pushes."""
    slot, total = unit.slots[index], None
    for grads, present in zip(pushes, schedule, strict=True):
        if present[index]:
            values = grads[slot.start : slot.stop].float()
            total = values if total is None else total + values
    assert total is not None
    return total


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sum_is_the_same_over_a_unit_and_over_its_shards(
    schedule: list[tuple[bool, ...]], dtype: torch.dtype
) -> None:
    spec = make_spec(1, dtypes=[dtype] * 3, accumulation_steps=3)
    unit = spec.layout.units[UNIT]
    whole, cut = (torch.full((unit.numel,), 9.0, dtype=gradient_dtype(unit, True)) for _ in range(2))
    of_unit, shards = GradientSum.of_unit(unit, whole), of_shards(spec, cut)
    pushes = [grads_of(spec, seed) for seed in range(len(schedule))]
    for seq, (grads, present) in enumerate(zip(pushes, schedule, strict=True)):
        push = push_of(seq, present)
        for each, where in (*shards, (of_unit, slice(None))):
            each.open(push)
            each.add(push, grads[where])
            told = each.close(push)
        assert (told.count, of_unit.count_of(0, 0)) == (seq + 1, seq + 1)
    for index, slot in enumerate(unit.slots):
        if any(present[index] for present in schedule):
            for memory in (whole, cut):
                assert torch.equal(memory[slot.start : slot.stop], expected(unit, pushes, schedule, index))
        for memory in (whole, cut):
            assert not memory[slot.stop : slot.padded_stop].any()


def test_a_push_counts_once_and_a_newer_attempt_begins_from_nothing() -> None:
    spec = make_spec(1, accumulation_steps=2)
    unit = spec.layout.units[UNIT]
    found = GradientSum.of_unit(unit, torch.zeros(unit.numel))
    everything, first = (True,) * 4, torch.full((unit.numel,), 2.0)
    for seq in range(2):
        found.open(push_of(seq, everything))
        found.add(push_of(seq, everything), first)
        found.close(push_of(seq, everything))
    assert [found.is_stale(push_of(seq, everything)) for seq in range(3)] == [True, True, False]
    again = push_of(0, (True, False, False, False), attempt=1)
    assert not found.is_stale(again)
    found.open(again)
    found.add(again, first)
    assert found.close(again) == Pushed(step=0, attempt=1, count=1, presence=b"\x01")
    assert found.memory[0] == 2.0
    assert (found.count_of(0, 0), found.is_stale(push_of(2, everything))) == (0, True)
