"""Loops around several prepared models, and what a loop does that only a prepared optimizer could get wrong."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from store.toy import make_spec
from torch import nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.errors import (
    CheckpointError,
    HandshakeError,
    MemoryPlanError,
    RankLeftError,
    StoreClosedError,
    StoreError,
)
from rayzero.owner.owned_model import OwnerTerms
from rayzero.store.owner.hosted import HostedModels
from rayzero.telemetry.names import LEARNING_RATE, STEP, STEP_SECONDS
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import run_ranks

from .models import VOCAB, Critic, Net, same_bits, seeded, tokens

adamw = partial(torch.optim.AdamW, lr=1e-2, fused=True)


MODELS = [seeded(Net), seeded(Critic)]


def prepared() -> list[tuple[nn.Module, Any]]:
    return [rayzero.prepare(model, adamw(model.parameters())) for model in copy.deepcopy(MODELS)]


def step(model: nn.Module, optimizer: Any) -> None:
    inputs = tokens(0)[0] if hasattr(model, "embed") else torch.ones(4, 8, VOCAB)
    model(inputs).float().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.last_decision().result()


def test_models_that_ranks_prepare_in_another_order_are_told_apart_by_name() -> None:
    def loop(context: RankContext) -> None:
        for model in copy.deepcopy(MODELS)[:: 1 if context.rank else -1]:
            rayzero.prepare(model, adamw(model.parameters()))

    with pytest.raises(HandshakeError, match=r"optimizer \d: rank \d differs from rank \d in layout"):
        run_ranks(loop, 2, 2)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_both_models_of_a_run_are_saved_to_one_checkpoint_and_resume(transport: Any, tmp_path: Path) -> None:
    place = tmp_path / "step-1"

    def states(pairs: list[tuple[nn.Module, Any]]) -> list[Any]:
        return [(rayzero.full_state_dict(model), optimizer.state_dict()["state"]) for model, optimizer in pairs]

    def train(context: RankContext) -> list[Any]:
        pairs = prepared()
        for pair in pairs:
            step(*pair)
        with pytest.raises(CheckpointError, match=r"model 1 to .*step-1, which is not a checkpoint yet; save"):
            rayzero.save_checkpoint(pairs[1][1], place, {})
        told = [rayzero.save_checkpoint(optimizer, place, {"model": i}) for i, (_, optimizer) in enumerate(pairs)]
        assert [info.path for info in told] == [str(place), str(place / "model-1")]
        return states(pairs)

    def resume(context: RankContext) -> list[Any]:
        pairs = prepared()
        assert context.loop_state == {"model": 1}, "of the model prepared last"
        return states(pairs)

    trained = run_ranks(train, 2, 2, transport)
    for rank, resumed in enumerate(run_ranks(resume, 2, 3, transport, resume=place)):
        for (state, moments), (its, its_moments) in zip(resumed, trained[rank], strict=True):
            assert same_bits(state, its)
            assert all(same_bits(moments[key], its_moments[key]) for key in its_moments)


def test_a_run_that_ended_between_two_saves_says_so_when_it_is_resumed(tmp_path: Path) -> None:
    def loop(context: RankContext) -> None:
        rayzero.save_checkpoint(prepared()[0][1], tmp_path / "step-0", {})

    run_ranks(loop, 1, 2)
    with pytest.raises(CheckpointError, match=r"step-0 holds no prepared model 1.*; resume from an earlier checkpoint"):
        run_ranks(loop, 1, 2, resume=tmp_path / "step-0")


def test_a_rank_that_dies_between_two_models_fails_both_by_name() -> None:
    def loop(context: RankContext) -> list[str]:
        pairs = prepared()
        if context.rank:
            context.close("gone for lunch")
            return []
        said = []
        for pair in pairs:
            with pytest.raises(RankLeftError) as failure:
                step(*pair)
            said.append(str(failure.value))
        return said

    said, _ = run_ranks(loop, 2, 2, "grpc")
    assert len(said) == 2
    assert all("rank 1" in text and "gone for lunch" in text for text in said)


def test_the_models_of_a_run_share_an_owners_memory_budget() -> None:
    spec = make_spec(1)
    owner = HostedModels(0, 1)
    owner[0].service.attach(0, spec)
    need = owner.planned_bytes
    owner.close()
    owner = HostedModels(0, 1, OwnerTerms(memory_budget=int(1.5 * need)))
    owner[0].service.attach(0, spec)
    with pytest.raises(MemoryPlanError, match=r"cpu_memory_budget is .*, of which other prepared models have .*;"):
        owner[1].service.attach(0, spec)
    assert owner.planned_bytes == need
    with pytest.raises(StoreError, match="no prepared model 3: the next one is 2"):
        owner[3]
    owner.close()
    with pytest.raises(StoreClosedError, match="model 2 comes too late"):
        owner[2]


def test_numbers_of_a_run_are_its_first_models_and_counts_are_of_all() -> None:
    def loop(context: RankContext) -> tuple[float, float, int, int]:
        for model, lr in zip(copy.deepcopy(MODELS), (0.25, 0.5), strict=True):
            pair = rayzero.prepare(model, adamw(model.parameters(), lr=lr))
            for _ in range(3):
                step(*pair)
        recorder = context.recorder
        assert isinstance(recorder, MemoryRecorder)
        return recorder.gauge(LEARNING_RATE), recorder.gauge(STEP), recorder.timing(STEP_SECONDS).count

    (told,) = run_ranks(loop, 1, 1)
    assert told == (0.25, 3, 3)
