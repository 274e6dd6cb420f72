"""What an owner tells of itself: decisions, updates, and what it holds when somebody looks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from rayzero.messages import Action, Decision, Edit
from rayzero.optimizer.contributions import Contributors
from rayzero.optimizer.decide import clip_factor, unscaling
from rayzero.optimizer.model import OwnedModel
from rayzero.optimizer.rules import ShardWork
from rayzero.optimizer.state import OwnedShard
from rayzero.telemetry.names import (
    CLIP_FACTOR,
    CLIPPED_STEPS,
    DECIDED_STEPS,
    GRAD_NORM,
    LOSS_SCALE,
    MEMORY_BYTES,
    OPTIMIZER_BYTES,
    OPTIMIZER_PARAMS,
    OPTIMIZER_QUEUE_BYTES,
    OPTIMIZER_QUEUE_DEPTH,
    PARAM_VERSION,
    SHARDS,
    SKIPPED_STEPS,
)
from rayzero.telemetry.recorder import Reading, Recorder

_ROUNDING = 1e-9  # of a clip factor that is 1


def tell_decision(recorder: Recorder, decision: Decision, edits: Sequence[Edit], world_size: int) -> None:
    """What a step was decided to be, of gradients that ranks edited so; the lead alone tells it: once a run."""
    recorder.add(DECIDED_STEPS)
    recorder.set(GRAD_NORM, decision.norm)
    back = unscaling(edits)
    recorder.set(LOSS_SCALE, 1 / back if back else math.inf)
    recorder.add(SKIPPED_STEPS, decision.action is Action.SKIP, reason="nonfinite")
    if decision.action is Action.SKIP:
        return
    factor = clip_factor(decision, edits, world_size)
    recorder.set(CLIP_FACTOR, factor)
    recorder.add(CLIPPED_STEPS, factor < 1 - _ROUNDING)


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
