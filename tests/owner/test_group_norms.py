"""Norms by layer group are those of the tensors themselves, measured when asked for, and change no weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from store.toy import Grads, flatten, make_spec, random_grads
from torch import Tensor

from owner.owner import owner_of
from rayzero.owner.updates import GroupNorms
from rayzero.protocol.messages import MASTER, Action, ModelSpec
from rayzero.telemetry.metric import Metric
from rayzero.telemetry.names import GROUP_GRAD_NORM, GROUP_PARAM_NORM, GROUP_UPDATE_NORM
from rayzero.telemetry.recorder import MemoryRecorder

WORLD = 2


def norms(recorder: MemoryRecorder, metric: Metric) -> dict[str, float]:
    return {dict(labels)["group"]: value for labels, value in recorder.gauges().get(metric, {}).items()}


def by_unit(spec: ModelSpec, shards: Sequence[Tensor]) -> dict[str, float]:
    """The norm of each trained unit, from its shards."""
    squares: dict[str, float] = {}
    for cut, values in zip(spec.layout.shards, shards, strict=True):
        unit = spec.layout.units[cut.unit]
        if unit.trainable:
            squares[unit.name] = squares.get(unit.name, 0.0) + values.double().square().sum().item()
    return {name: math.sqrt(square) for name, square in squares.items()}


def grads_of(spec: ModelSpec, step: int = 0) -> list[Grads]:
    return [random_grads(spec, 10 * step + rank) for rank in range(spec.world_size)]


def averaged(spec: ModelSpec, grads: Sequence[Grads]) -> list[Tensor]:
    """Every shard's mean gradient over ranks, as ranks send it."""
    found = []
    for cut in spec.layout.shards:
        unit = spec.layout.units[cut.unit]
        parts = [flatten(unit, mine, unit.dtype).double()[cut.start : cut.stop] for mine in grads]
        found.append(sum(parts, torch.zeros(cut.numel, dtype=torch.float64)) / len(grads))
    return found


@pytest.mark.promise("observable", "optimizers")
def test_each_groups_norms_are_those_of_its_gradients_its_weights_and_their_change() -> None:
    spec, recorder = make_spec(WORLD), MemoryRecorder()
    with owner_of(spec, recorder=recorder, norms_every=1) as owner:
        before = owner.read_all(0, MASTER)
        owner.take_step(grads_of(spec))
        after = owner.read_all(1, MASTER)
    changes = [new - old for new, old in zip(after, before, strict=True)]
    assert norms(recorder, GROUP_GRAD_NORM) == pytest.approx(by_unit(spec, averaged(spec, grads_of(spec))), rel=1e-5)
    assert norms(recorder, GROUP_PARAM_NORM) == pytest.approx(by_unit(spec, after), rel=1e-5)
    assert norms(recorder, GROUP_UPDATE_NORM) == pytest.approx(by_unit(spec, changes), rel=1e-5)
    assert all(norm > 0 for norm in norms(recorder, GROUP_UPDATE_NORM).values())


def weights_after(steps: int, norms_every: int | None) -> list[Tensor]:
    with owner_of(make_spec(WORLD), recorder=MemoryRecorder(), norms_every=norms_every) as owner:
        for step in range(steps):
            owner.take_step(grads_of(owner.spec, step), step)
        return owner.read_all(steps, MASTER)


def test_measuring_changes_no_bit_of_the_weights() -> None:
    assert all(torch.equal(a, b) for a, b in zip(weights_after(3, 1), weights_after(3, None), strict=True))


def test_only_every_so_many_steps_are_measured() -> None:
    spec, recorder = make_spec(WORLD), MemoryRecorder()
    with owner_of(spec, recorder=recorder, norms_every=2) as owner:
        owner.take_step(grads_of(spec))
        first = by_unit(spec, owner.read_all(1, MASTER))
        owner.take_step(grads_of(spec, 1), 1)
        owner.read_all(2, MASTER)
    assert norms(recorder, GROUP_PARAM_NORM) == pytest.approx(first, rel=1e-5), "step 0 is, step 1 is not"


def test_a_skipped_step_is_not_measured() -> None:
    spec, recorder = make_spec(WORLD), MemoryRecorder()
    with owner_of(spec, recorder=recorder, norms_every=1) as owner:
        for rank, mine in enumerate(grads_of(spec)):
            owner.push(rank, mine)
        owner.collect().result(20)
        owner.service.apply(owner.decision(action=Action.SKIP)).result(20)
        owner.read_all(1, MASTER)
    assert norms(recorder, GROUP_GRAD_NORM) == {}


def test_what_it_keeps_is_the_largest_trained_shard_in_fp32() -> None:
    with owner_of(make_spec(WORLD)) as owner:
        model = owner.service._attached().model
        trained = [cut.numel for cut in owner.spec.layout.shards if owner.spec.layout.units[cut.unit].trainable]
        assert GroupNorms(model, MemoryRecorder()).scratch_bytes == 4 * max(trained)
