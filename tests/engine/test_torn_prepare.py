"""A prepare() that fails half-way: earlier models train on, and no later one is trained from its values."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.context import RankContext
from rayzero.engine.optimizer.zero_optimizer import ZeroOptimizer
from rayzero.errors import ConfigError, RankLeftError, UnsupportedError
from rayzero.testing import run_ranks

from .models import same_bits

PREPARE = importlib.import_module("rayzero.engine.prepare")  # rayzero.engine.prepare is the function


def prepared(value: float) -> tuple[nn.Module, ZeroOptimizer]:
    model = nn.Linear(4, 4)
    for param in model.parameters():
        nn.init.constant_(param, value)
    return rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fail(*_: object) -> None:
    raise MemoryError("out of device memory")


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("part", ["_make_units", "_move_buffers"])
def test_after_a_prepare_that_failed_half_way_the_first_model_trains_on_and_another_is_refused(
    transport, part, monkeypatch
):
    def loop(ctx: RankContext) -> dict[str, torch.Tensor]:
        model, optimizer = prepared(0.5)
        step(model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(PREPARE, part, fail)
            with pytest.raises(MemoryError):
                prepared(1.0)
        step(model, optimizer)
        with pytest.raises(UnsupportedError, match=r"an earlier rayzero\.prepare\(\).*MemoryError: out of device"):
            prepared(2.0)  # the owners would say 1.0
        return rayzero.full_state_dict(model)

    def whole(ctx: RankContext) -> dict[str, torch.Tensor]:
        model, optimizer = prepared(0.5)
        for _ in range(2):
            step(model, optimizer)
        return rayzero.full_state_dict(model)

    (got,), (want,) = (run_ranks(fn, 1, 2, transport) for fn in (loop, whole))
    assert same_bits(got, want)


@pytest.mark.parametrize("transport", ["inproc", "grpc", "shm"])
@pytest.mark.parametrize("earlier", [0, 1])
def test_what_rank_0_did_not_give_is_waited_for_by_nobody(transport, earlier, monkeypatch):
    """Rank 0 fails after the first unit, lives on, and steps the earlier model no more."""
    others_know = threading.Event()

    def broken(*_: object) -> Iterator[tuple[str, torch.Tensor]]:
        yield "0.weight", torch.zeros(4, 4)
        raise MemoryError("out of memory")

    def loop(ctx: RankContext) -> str:
        for _ in range(earlier):
            step(*prepared(0.5))
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
        optimizer, config = torch.optim.SGD(model.parameters(), lr=0.1), rayzero.ZeroConfig(min_unit_bytes=1)
        if ctx.rank == 0:
            with pytest.raises(MemoryError):
                rayzero.prepare(model, optimizer, config, units=["Linear"], weights=broken())
            return str(others_know.wait(30))
        with pytest.raises(RankLeftError) as caught:
            step(*rayzero.prepare(model, optimizer, config, units=["Linear"]))
        others_know.set()
        return str(caught.value)

    knew, said = run_ranks(loop, 2, 2, transport)
    assert knew == "True"
    assert re.search(
        r"rank 0 left before it had loaded all values of optimizer \d \(prepare failed: out of memory\)", said
    ), said


def test_a_prepare_that_failed_before_the_owners_had_anything_may_be_tried_again(alone):
    def loop(ctx: RankContext) -> float:
        model = nn.Linear(4, 4)
        wrong = rayzero.ZeroConfig(offload_activations=("nothing.*",))
        with pytest.raises(ConfigError):
            rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), wrong)
        return float(rayzero.full_state_dict(prepared(2.0)[0])["bias"][0])

    assert run_ranks(loop, 1, 1) == [2.0]


def test_alone_each_model_has_owners_of_its_own_and_may_be_tried_again(alone, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(PREPARE, "_make_units", fail)
        with pytest.raises(MemoryError):
            prepared(1.0)
    assert float(rayzero.full_state_dict(prepared(2.0)[0])["bias"][0]) == 2.0
