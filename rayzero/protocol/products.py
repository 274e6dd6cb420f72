"""Which matrices an update multiplies, where they lie, what that costs in operations, and which of them ranks multiply
for owners (``ZeroConfig.matrix_updates``).

[Note: update work] An element-wise update reads and writes memory, so its shards are balanced by bytes. An iteration of
Newton-Schulz on an m x n matrix (m <= n) is two products of m x m x n and one of m x m x m (Jordan et al., Muon, 2024),
thousands of times what its bytes cost.

[Note: products on ranks] An owner computes what a class feeds into Newton-Schulz, in bf16, and lets the rank that has
the shard's products fetch it (kind ``PRODUCT``, at the version that the update makes). The rank runs torch's own
function and stages what comes out, under the same kind and version. Either is a vector: 1D, the shard's elements, each
matrix where its parameter lies. The owner then makes the update as a whole, as if it had multiplied itself. Nothing
that outlives a process depends on it: an owner without an answer multiplies itself, on a CPU with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from rayzero.layout.model_layout import ModelLayout, UnitLayout
from rayzero.protocol.messages import COMPUTE, PRODUCT, ModelSpec

STEPS = "ns_steps"  # the option of a group by which a class says how many iterations it makes
PRODUCT_DTYPE = torch.bfloat16  # that torch's Newton-Schulz computes in
_MOST_AHEAD = 4
_ELEMENT = 100  # operations in the time in which an element-wise update moves an element's 30 bytes


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter that Newton-Schulz is computed for."""

    slice: int  # its number among those of its shard
    start: int  # in the shard
    shape: tuple[int, int]
    group: int  # its parameter group at prepare(), which has the options

    @property
    def stop(self) -> int:
        """Its end in the shard."""
        return self.start + self.shape[0] * self.shape[1]


def multiplying_ranks(spec: ModelSpec) -> dict[int, int]:
    """Shard -> the rank that multiplies its matrices, in forward order; none where owners do. The same on ranks and
    owners."""
    if spec.matrix_updates == "owner":
        return {}
    return product_ranks(product_work(spec.layout, spec.hyper, spec.group_of), spec.world_size)


def matrices_of(spec: ModelSpec, shard: int) -> tuple[Matrix, ...]:
    """A shard's."""
    cut = spec.layout.shards[shard]
    slots, groups = spec.layout.units[cut.unit].slots, spec.group_of[cut.unit]
    return tuple(
        Matrix(index, part.start, (slots[part.slot].shape[0], slots[part.slot].shape[1]), groups[part.slot])
        for index, part in enumerate(spec.layout.slices(cut))
        if groups[part.slot] >= 0 and STEPS in spec.hyper[groups[part.slot]] and len(slots[part.slot].shape) == 2
    )


def dtype_of(unit: UnitLayout, kind: str) -> torch.dtype:
    """In which values of a kind are staged."""
    return unit.dtype if kind == COMPUTE else PRODUCT_DTYPE if kind == PRODUCT else torch.float32


def shards_ahead(world_size: int) -> int:
    """How many shards an owner lets ranks multiply beside the one that it waits for."""
    return min(world_size, _MOST_AHEAD)


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
