"""Which matrices ranks multiply for owners, and where they lie (``ZeroConfig.matrix_updates``).

[Note: products on ranks] An owner computes what a class feeds into Newton-Schulz, in bf16, and lets the rank that has
the shard's products fetch it (kind ``PRODUCT``, at the version that the update makes). The rank runs torch's own
function and stages what comes out, under the same kind and version. Either is a vector: 1D, the shard's elements, each
matrix where its parameter lies. The owner then makes the update as a whole, as if it had multiplied itself. Nothing
that outlives a process depends on it: an owner without an answer multiplies itself, on a CPU with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rayzero.layout.model_layout import UnitLayout
from rayzero.layout.update_work import STEPS, product_ranks, product_work
from rayzero.protocol.messages import COMPUTE, PRODUCT, ModelSpec

PRODUCT_DTYPE = torch.bfloat16  # that torch's Newton-Schulz computes in
_MOST_AHEAD = 4


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


@dataclass(frozen=True)
class ProductPlan:
    """The same on ranks and owners."""

    rank_of: Mapping[int, int]  # by shard, in forward order; only those with products
    work: Mapping[int, int]  # by shard: operations

    @classmethod
    def of(cls, spec: ModelSpec) -> ProductPlan:
        """Without shards where owners multiply themselves."""
        if spec.matrix_updates == "owner":
            return cls({}, {})
        work = product_work(spec.layout, spec.hyper, spec.group_of)
        return cls(product_ranks(work, spec.world_size), dict(enumerate(work)))


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
