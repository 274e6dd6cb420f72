"""Layer groups: gives many units a few labels, so that metrics have few series."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rayzero.layout.model_layout import UnitLayout


def layer_groups(units: Sequence[UnitLayout], most: int) -> tuple[str, ...]:
    """The label of each unit's group. Up to ``most`` units are groups by themselves; more are grouped with their
    neighbours in forward order, as evenly as possible, with labels such as ``"blocks.0..blocks.3"``."""
    names = [unit.name for unit in units]
    count = min(most, len(names))
    bounds = [len(names) * group // count for group in range(count + 1)] if names else []
    found: list[str] = []
    for start, stop in pairwise(bounds):
        label = names[start] if stop == start + 1 else f"{names[start]}..{names[stop - 1]}"
        found += [label] * (stop - start)
    return tuple(found)
