"""Matrices that ranks multiply for an owner, at the owner: what it gives, waits for, and does itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from store.toy import WAIT, PlainAdamW, equal, random_grads
from torch import Tensor

from rayzero.errors import StoreError
from rayzero.kernels.newton_schulz import as_product, newton_schulz
from rayzero.owner import products
from rayzero.protocol.messages import MASTER, PRODUCT, Action, ModelSpec
from rayzero.protocol.products import matrices_of, multiplying_ranks
from rayzero.telemetry.names import MATRIX_PRODUCT_SECONDS, MATRIX_PRODUCTS
from rayzero.telemetry.recorder import MemoryRecorder
from tests.support.waiting import until

from .owner import Owner, owner_of
from .test_class_rule import NEWTON, Muons, whole_spec

RANKS = 2


class Divided(Muons):
    """With the entries of torch's Muon, by which ranks know how to multiply."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9, **newton: Any) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "momentum": momentum, **OPTIONS, **newton})


OPTIONS = {"ns_coefficients": NEWTON, "ns_steps": 5, "eps": 1e-7}


def divided(**given: Any) -> ModelSpec:
    return replace(whole_spec(Divided, RANKS), matrix_updates="rank", **given)


@contextmanager
def owning(spec: ModelSpec, **given: Any) -> Iterator[tuple[Owner, list[int], PlainAdamW]]:
    """An owner, its shards with matrices, and the same in plain torch."""
    with owner_of(spec, **given) as owner:
        yield owner, list(multiplying_ranks(spec)), PlainAdamW(spec, Divided)


def step(owner: Owner, plain: PlainAdamW, number: int) -> None:
    grads = [random_grads(owner.spec, 10 * number + rank) for rank in range(RANKS)]
    owner.take_step(grads, number)
    plain.step(grads)


def multiply(spec: ModelSpec, shard: int, given: Tensor) -> Tensor:
    """What a rank does."""
    made = given.clone()
    for matrix in matrices_of(spec, shard):
        flat = made[matrix.start : matrix.stop]
        as_product(flat, matrix.shape).copy_(newton_schulz(flat.view(matrix.shape).clone(), OPTIONS))
    return made


def answer(owner: Owner, shard: int, version: int) -> Future[Tensor]:
    """Ask, and answer when it comes."""

    def came(asked: Future[Tensor]) -> None:
        if asked.exception() is None:
            made = multiply(owner.spec, shard, asked.result())
            owner.service.stage(shard, version, PRODUCT, made)

    asked = owner.service.read(shard, version, PRODUCT)
    asked.add_done_callback(came)
    return asked


def same_masters(owner: Owner, version: int, plain: PlainAdamW) -> bool:
    """Whether the owner has plain torch's values."""
    found = {}
    for unit in owner.spec.layout.units:
        flat = torch.cat([owner.read(s.index, version, MASTER) for s in owner.spec.layout.shards_by_unit[unit.index]])
        for slot in unit.slots:
            found[slot.name] = flat[slot.start : slot.start + slot.numel].view(slot.shape).clone()
    return equal(found, plain.values)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_PATIENCE_S", 0.2)


def test_each_shard_with_a_matrix_has_a_rank_and_all_ranks_have_some() -> None:
    rank_of = multiplying_ranks(divided())
    assert set(rank_of.values()) == set(range(RANKS))
    assert all(matrices_of(divided(), shard) for shard in rank_of)
    assert not multiplying_ranks(replace(divided(), matrix_updates="owner"))


@pytest.mark.promise("exact", "optimizers")
def test_an_update_with_answers_of_ranks_has_the_bits_of_plain_torch() -> None:
    spec = divided()
    with owning(spec) as (owner, shards, plain):
        for number in range(3):
            asked = [answer(owner, shard, number + 1) for shard in shards]
            step(owner, plain, number)
            assert same_masters(owner, number + 1, plain)
            assert all(each.result(WAIT).dtype is torch.bfloat16 for each in asked)


@pytest.mark.promise("observable", "optimizers")
@pytest.mark.parametrize("where", ["owner", "rank"])
def test_an_owner_counts_the_matrices_that_it_multiplies_and_none_that_ranks_do(where: str) -> None:
    recorder, spec = MemoryRecorder(), divided()
    matrices = sum(len(matrices_of(spec, shard)) for shard in multiplying_ranks(spec))

    def counted() -> tuple[float, float]:
        values = recorder.counters()
        return tuple(sum(values.get(each, {}).values()) for each in (MATRIX_PRODUCTS, MATRIX_PRODUCT_SECONDS))

    with owning(replace(spec, matrix_updates=where), recorder=recorder) as (owner, shards, plain):
        asked = [answer(owner, shard, 1) for shard in shards]
        step(owner, plain, 0)
        assert same_masters(owner, 1, plain)
        assert all(each.result(WAIT) is not None for each in asked)
        assert bool(asked) == (where == "rank")
        number, seconds = counted()
        assert number == (0 if asked else matrices)
        assert (seconds > 0) == (where == "owner")
        step(owner, plain, 1)  # no rank asks
        assert same_masters(owner, 2, plain)
        assert counted()[0] == number + matrices
        assert counted()[1] > seconds


def test_it_is_the_answer_that_is_used() -> None:
    with owning(divided()) as (owner, shards, plain):
        asked = [owner.service.read(shard, 1, PRODUCT) for shard in shards]
        for shard, each in zip(shards, asked, strict=True):
            each.add_done_callback(
                functools.partial(
                    lambda done, at: owner.service.stage(at, 1, PRODUCT, torch.zeros_like(done.result())), at=shard
                )
            )
        before = {shard: owner.read(shard, 0, MASTER).clone() for shard in shards}
        step(owner, plain, 0)
        for shard in shards:
            matrix, *_ = matrices_of(owner.spec, shard)
            there = slice(matrix.start, matrix.stop)
            assert torch.equal(owner.read(shard, 1, MASTER)[there], before[shard][there]), "it was told: no change"


def test_a_rank_that_does_not_answer_is_waited_for_once(hasty: None, caplog: pytest.LogCaptureFixture) -> None:
    with owning(divided()) as (owner, shards, plain):
        for shard in shards:
            owner.service.read(shard, 1, PRODUCT)
        step(owner, plain, 0)
        assert same_masters(owner, 1, plain)
        assert sorted(line[:6] for line in caplog.messages if "has not multiplied" in line) == ["rank 0", "rank 1"]
        owner.service.stage(shards[0], 1, PRODUCT, torch.zeros(owner.service.shard(shards[0]).shard.numel).bfloat16())
        asked = [answer(owner, shard, 2) for shard in shards]  # it is back: too late for one, in time for others
        step(owner, plain, 1)
        assert same_masters(owner, 2, plain)
        assert all(each.done() for each in asked)


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    with owning(divided()) as (owner, shards, plain):
        asked = [owner.service.read(shard, 1, PRODUCT) for shard in shards]
        step(owner, plain, 0)
        until(lambda: any(each.done() for each in asked))
        for rank in range(RANKS):
            owner.service.left(rank, "tired")
        assert same_masters(owner, 1, plain)


def test_what_is_not_there_any_more_is_refused_by_name_and_a_late_answer_is_dropped() -> None:
    with owning(divided()) as (owner, shards, plain):
        asked = [answer(owner, shard, 1) for shard in shards]
        early = owner.service.read(shards[0], 2, PRODUCT)
        step(owner, plain, 0)
        assert same_masters(owner, 1, plain)
        assert all(each.result(WAIT) is not None for each in asked)
        late = owner.service.read(shards[0], 1, PRODUCT)
        with pytest.raises(StoreError, match=rf"shard {shards[0]} v1 has nothing to multiply, or has it no more"):
            late.result(WAIT)
        owner.service.stage(shards[0], 1, PRODUCT, torch.zeros(1).bfloat16())
        owner.collect(1)
        owner.service.apply(owner.decision(1, Action.SKIP)).result(WAIT)
        with pytest.raises(StoreError, match="v2 has nothing to multiply"):
            early.result(WAIT)
        assert same_masters(owner, 2, plain)


def test_the_end_of_the_run_ends_every_wait() -> None:
    with owning(divided()) as (owner, shards, plain):
        ahead = owner.service.read(shards[0], 7, PRODUCT)
        owner.service.read(shards[-1], 1, PRODUCT)
        step(owner, plain, 0)
    with pytest.raises(StoreError, match="nothing to multiply"):
        ahead.result(WAIT)


def test_an_owner_that_multiplies_itself_gives_nothing() -> None:
    with owner_of(replace(divided(), matrix_updates="owner")) as owner:
        with pytest.raises(StoreError, match="shard 0 v1 has nothing to multiply"):
            owner.service.read(0, 1, PRODUCT).result(WAIT)
        owner.service.stage(0, 1, PRODUCT, torch.zeros(1))  # nobody waits for it


def test_what_is_on_its_way_is_in_the_plan() -> None:
    ours = []
    for where in ("owner", "rank"):
        with owner_of(replace(divided(), matrix_updates=where)) as owner:
            ours.append(owner.service.planned_bytes)
    spec = divided()
    sizes = sorted((spec.layout.shards[shard].numel for shard in multiplying_ranks(spec)), reverse=True)
    assert ours[1] - ours[0] == 4 * sum(sizes[: 1 + RANKS]) + 4 * sizes[0]
