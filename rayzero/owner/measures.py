"""What an owner tells of itself: decisions, updates, and what it holds when somebody looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from torch import Tensor

from rayzero.owner.gradients.contributions import Contributors
from rayzero.owner.model import OwnedModel
from rayzero.owner.shard import OwnedShard
from rayzero.owner.update.rules import ShardWork
from rayzero.telemetry.names import (
    MEMORY_BYTES,
    OPTIMIZER_BYTES,
    OPTIMIZER_PARAMS,
    OPTIMIZER_QUEUE_BYTES,
    OPTIMIZER_QUEUE_DEPTH,
    PARAM_VERSION,
    SHARDS,
)
from rayzero.telemetry.recorder import Reading, Recorder


def tell_update(recorder: Recorder, owned: OwnedShard, work: ShardWork) -> None:
    """A shard was updated."""
    states = 4 * 2 * (1 + len(owned.states))  # master and states: fp32, read and written
    written = 0 if owned.params is owned.master else owned.params.itemsize
    updated = _updated(owned, work.contributors)
    read = {ranks: sum(work.gradients[rank].itemsize for rank in ranks) for ranks in updated}
    recorder.add(OPTIMIZER_PARAMS, updated.total())
    recorder.add(OPTIMIZER_BYTES, sum(count * (states + written + read[ranks]) for ranks, count in updated.items()))


def _updated(owned: OwnedShard, contributors: Contributors) -> Counter[tuple[int, ...]]:
    """Elements by contributors."""
    if len(set(contributors)) == 1:  # as it mostly is; models have many parameters
        return Counter({contributors[0]: owned.filled if contributors[0] else 0})
    updated = Counter[tuple[int, ...]]()
    for part, ranks in zip(owned.slices, contributors, strict=True):
        updated[ranks] += part.numel if ranks else 0
    return updated


def owner_readings(model: OwnedModel, queued: Callable[[], int], scratch: int) -> Iterator[Reading]:
    """What an owner holds and has to do now; from any thread."""
    shards = list(model.shards.values())
    yield Reading(SHARDS, len(shards), {})
    yield Reading(PARAM_VERSION, min((owned.published for owned in shards), default=0), {})
    yield Reading(OPTIMIZER_QUEUE_DEPTH, queued(), {})
    yield Reading(OPTIMIZER_QUEUE_BYTES, sum(owned.params.nbytes for owned in shards if owned.pending), {})
    held = Counter[tuple[str, str]]()
    for owned in shards:
        for kind, tensor in _tensors(owned).items():
            held[kind, model.memory.tier if kind == "param" else model.memory.state_tier] += tensor.nbytes
    for rank in list(model.contributions.ranks.values()):
        held["grad", "ram"] += rank.landing_bytes
        held["staging", "ram"] += rank.staging_bytes
    held["staging", "ram"] += scratch
    for (kind, tier), size in held.items():
        yield Reading(MEMORY_BYTES, size, {"kind": kind, "tier": tier})


def _tensors(owned: OwnedShard) -> dict[str, Tensor]:
    """What a shard keeps; published parameters that are the master are told as that."""
    apart = {} if owned.params is owned.master else {"param": owned.params}
    master = {} if owned.master is None else {"master": owned.master}
    return {**apart, **master, **owned.states}
