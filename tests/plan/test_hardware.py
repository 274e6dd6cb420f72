"""What is measured of a host is its own speed, also while others use it."""

from __future__ import annotations

import time

import pytest
import torch

from rayzero.lanes.lane import fastest
from rayzero.plan import hardware
from rayzero.plan.hardware import _cores, _product_speed, _undisturbed

CPU = torch.device("cpu")


def test_time_in_which_others_had_the_core_does_not_count() -> None:
    """A sleep stands for them: the thread is off its core in both."""

    def off_the_core() -> None:
        time.sleep(0.03)

    assert fastest(off_the_core, CPU) >= 0.03
    assert _undisturbed(off_the_core, CPU) < 0.02


def test_one_thread_is_measured_alone_and_the_others_are_given_back() -> None:
    before, seen = torch.get_num_threads(), set[int]()
    _undisturbed(lambda: seen.add(torch.get_num_threads()), CPU)
    assert seen == {1}
    assert torch.get_num_threads() == before


def test_products_are_told_of_all_cores() -> None:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    alone = _undisturbed(lambda: torch.mm(a, b), CPU)
    assert _product_speed(CPU, torch.float32) > 0.3 * _cores() * 2 * 1024**3 / alone


@pytest.mark.parametrize(
    ("speeds", "fastest"),
    [
        ({128: 5e8, 256: 4e8}, 5e8),  # bf16 without instructions for it: 512 would take half a second, six times
        ({128: 5e10, 256: 2e11, 512: 4e11, 1024: 3e11}, 4e11),
    ],
)
def test_the_best_size_counts_and_none_that_takes_long_is_tried(
    speeds: dict[int, float], fastest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def speed_at(size: int, device: torch.device, dtype: torch.dtype) -> float:
        tried.append(size)
        return speeds[size]

    monkeypatch.setattr(hardware, "_speed_at", speed_at)
    assert _product_speed(CPU, torch.bfloat16) == fastest
    assert tried == list(speeds)
