"""What an update costs an owner in operations, where that is not its bytes: Muon's Newton-Schulz iterations.

An element-wise update reads and writes memory, so its shards are balanced by bytes. An iteration of Newton-Schulz on an
m x n matrix (m <= n) is two products of m x m x n and one of m x m x m (Jordan et al., Muon, 2024), thousands of times
what its bytes cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from rayzero.layout.model_layout import ModelLayout

STEPS = "ns_steps"  # the option of a group by which a class says how many iterations it makes
_ELEMENT = 100  # operations in the time in which an element-wise update moves an element's 30 bytes


def newton_schulz(rows: int, columns: int, steps: int) -> int:
    """Multiplications and additions of ``steps`` iterations on one matrix."""
    short, long = sorted((rows, columns))
    return 2 * steps * (2 * short * short * long + short**3)


def shard_work(
    layout: ModelLayout, hyper: Sequence[Mapping[str, Any]], group_of: Sequence[Sequence[int]]
) -> list[int] | None:
    """Operations of one update of each shard. None: all classes are element-wise, and bytes say it.

    hyper: the options of each group. group_of: by unit and slot, its group; -1: none. A parameter of more than two
    dimensions counts as a matrix of its first one and all others."""
    products = product_work(layout, hyper, group_of)
    if not layout.whole_parameters or not any(int(options.get(STEPS, 0)) for options in hyper):
        return None
    return [
        products[shard.index]
        + sum(_ELEMENT * piece.numel for piece in layout.slices(shard) if group_of[shard.unit][piece.slot] >= 0)
        for shard in layout.shards
    ]


def product_work(
    layout: ModelLayout, hyper: Sequence[Mapping[str, Any]], group_of: Sequence[Sequence[int]]
) -> list[int]:
    """Of these, the operations of Newton-Schulz. Arguments as of ``shard_work``."""
    steps = [int(options.get(STEPS, 0)) for options in hyper]
    return [
        sum(
            _matrix(layout.units[shard.unit].slots[piece.slot].shape, steps[group])
            for piece in layout.slices(shard)
            if (group := group_of[shard.unit][piece.slot]) >= 0
        )
        for shard in layout.shards
    ]


def product_ranks(work: Sequence[int], num_ranks: int) -> dict[int, int]:
    """Shard -> the rank that computes its products, of shards that have some: in forward order, the rank that has least
    so far. work: see ``product_work``."""
    found, has = dict[int, int](), [0] * num_ranks
    for shard, operations in enumerate(work):
        if operations:
            found[shard] = rank = min(range(num_ranks), key=has.__getitem__)
            has[rank] += operations
    return found


def _matrix(shape: Sequence[int], steps: int) -> int:
    return newton_schulz(shape[0], prod(shape[1:]), steps) if steps and len(shape) > 1 else 0
