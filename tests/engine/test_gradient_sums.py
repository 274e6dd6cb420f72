"""Sums of gradients over the backwards of a step, where they stay on the device until then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rayzero.engine.autograd.gradients import GradientSums


def test_gradients_of_16_bits_are_added_in_32() -> None:
    """In bfloat16 257 small gradients would stay at the first one's 1.0, and the second would be written into the
    first."""
    unit: Any = SimpleNamespace(index=0, layout=SimpleNamespace(dtype=torch.bfloat16))
    sums, first = GradientSums(), torch.ones(4, dtype=torch.bfloat16)
    sums.add(unit, [first, None])
    for _ in range(256):
        sums.add(unit, [torch.full((4,), 2.0**-9, dtype=torch.bfloat16), None])
    assert sums.slots(0) == {0}
    total, nothing = sums.take(unit)
    assert nothing is None
    assert total is not None
    assert total.tolist() == [1.5] * 4
    assert total.dtype is torch.bfloat16
    assert first.tolist() == [1.0] * 4
    assert 0 not in sums
