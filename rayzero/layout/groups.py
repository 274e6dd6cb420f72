"""Layer groups: a few labels for many units, so that metrics have few series."""

from __future__ import annotations

from itertools import pairwise

from rayzero.layout.model_layout import ModelLayout


def layer_groups(layout: ModelLayout, most: int) -> tuple[str, ...]:
    """The group of each unit: itself, or, where there are more than ``most`` units, it and its neighbours in forward
    order, groups as even as they can be: ``"blocks.0..blocks.3"``."""
    names = [unit.name for unit in layout.units]
    count = min(most, len(names))
    bounds = [len(names) * group // count for group in range(count + 1)] if names else []
    found: list[str] = []
    for start, stop in pairwise(bounds):
        label = names[start] if stop == start + 1 else f"{names[start]}..{names[stop - 1]}"
        found += [label] * (stop - start)
    return tuple(found)
