"""The height of a rank's heap, and what a rank says before it gives its model away."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import rayzero
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.engine_memory import HeapPeak
from rayzero.memory.malloc import heap_use
from rayzero.telemetry.names import HEAP_BYTES
from rayzero.telemetry.recorder import MemoryRecorder

MIB = 1 << 20


def test_it_is_the_most_of_the_first_steps() -> None:
    gc.collect()  # else what earlier tests left may go meanwhile
    peak = HeapPeak(5)
    peak.look(5)
    first = peak.peak
    held = torch.empty(64 * MIB, dtype=torch.uint8)
    peak.look(8)
    assert peak.peak == first, "later steps are not looked at"
    peak.look(7)
    assert peak.peak - first == pytest.approx(held.nbytes, abs=4 * MIB)
    most = peak.peak
    del held
    peak.look(7)
    assert peak.peak == most


def test_who_has_no_heap_to_tell_of_never_looks() -> None:
    peak = HeapPeak(None)
    peak.look(0)
    assert peak.peak == 0


class Keeps(nn.Module):
    """Has 64 MiB alive from its forward to its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4 * MIB))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values * self.weight).exp().sum()


def test_a_cpu_ranks_heap_at_its_height_is_told() -> None:
    recorder = MemoryRecorder()
    with running_in(RankContext(recorder=recorder)):
        model = Keeps()
        model, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        gc.collect()  # else what earlier tests left may go meanwhile
        before = heap_use()
        assert before is not None
        model(torch.zeros(4, 4 * MIB)).backward()  # exp keeps its result, the product its factor
        optimizer.step()
        optimizer.zero_grad()
        peak = recorder.gauge(HEAP_BYTES, kind="peak")
    assert 64 * MIB + 64 * MIB <= peak - before.used < 260 * MIB


@pytest.mark.parametrize(("tied", "meta"), [(False, False), (True, False), (False, True)])
def test_before_it_gives_its_model_away_a_rank_says_how_large_that_is_in_its_memory(tied: bool, meta: bool) -> None:
    told: list[int] = []
    with running_in(RankContext(handing_over=told.append)):
        with torch.device("meta" if meta else "cpu"):
            model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
        if tied:
            model[1].weight = model[0].weight

        def init(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.ones_(module.weight)

        rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), init=init if meta else None)
    assert told == [0 if meta else 4 * 900 * (1 if tied else 2)]
