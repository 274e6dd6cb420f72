"""Computes which owner has which shard of a model in training."""

from __future__ import annotations

from rayzero.layout.shard_map import ShardMap, shard_map_for
from rayzero.protocol.messages import ModelSpec


def owner_map(spec: ModelSpec, num_owners: int) -> ShardMap:
    """The owner of every shard. ``num_owners``: all owners, including :func:`device_owners`, which come last, in rank
    order."""
    return shard_map_for(
        spec.layout,
        num_owners,
        spec.shard_map,
        num_device_owners=device_owners(spec.world_size, spec.offload_fraction),
        offload_fraction=spec.offload_fraction,
    )


def device_owners(world_size: int, offload_fraction: float) -> int:
    """How many owners keep their states on a rank's device: one beside each rank, or none."""
    return world_size if offload_fraction < 1 else 0
