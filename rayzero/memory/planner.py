"""Sums up what an owner will keep on its host before anything is allocated, and checks that it fits."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rayzero.codecs.record import kept_bytes
from rayzero.errors import MemoryPlanError
from rayzero.layout.model_layout import ModelLayout, Shard, UnitLayout
from rayzero.layout.shard_map import ShardMap
from rayzero.memory.process_memory import HostLimits, host_limits, ray_memory_threshold
from rayzero.protocol.gradient_sum import adds_up, gradient_dtype, has_totals, pool_bytes
from rayzero.protocol.products import PRODUCT_DTYPE, shards_ahead
from rayzero.quantities import count, format_bytes

FP32 = 4  # bytes
SERVED_AT_ONCE = 4  # followers on other hosts that an owner gives shards
SERVED_BYTES = 4 << 20  # at most this much is on its way to one of them before its last shard, which comes whole


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPlan:
    """The bytes that a host keeps for one owner's shards, by purpose."""

    owner: int
    num_owners: int
    world_size: int
    params: int  # published parameters, at most, except fp32 trained units, which publish their masters
    master: int  # of trained units, and of frozen ones that the compute dtype would round: fp32, or split
    moments: int  # optimizer states
    gradients: int  # totals and the ranks' pools, or each rank's own gradients; of all ranks, in any process
    staging: int  # of all ranks: pushes that have landed and are not yet added to earlier ones
    undo: int = 0  # what a torch class's update is about to overwrite: the largest shard, [Note: undo copy]
    norms: int = 0  # to measure norms by layer group: the largest shard in fp32; in no slab
    products: int = 0  # what ranks multiply for it, on its way to them and back; in no slab
    copies: int = 0  # of shards that change while a checkpoint is written, at most; in no slab
    followers: int = 0  # for those on other hosts, at most; not planned for: changes are fewer where there is no room
    on_device: int = 0  # masters and states of an owner beside a rank, in that rank's device memory

    @property
    def who(self) -> str:
        return f"optimizer {self.owner} of {self.num_owners}"

    @property
    def total(self) -> int:
        """All bytes on the host; ``on_device`` and ``followers`` do not count."""
        return self.params + self.master + self.moments + self.gradients + self.staging + self.undo + self.private

    @property
    def steady(self) -> int:
        return self.total - self.copies

    @property
    def private(self) -> int:
        """Bytes that the owner's process has alone and products, a checkpoint or a measurement need for a while."""
        return self.norms + self.products + self.copies

    def describe(self) -> str:
        """The sum, term by term, for messages."""
        terms = {
            "parameters": self.params,
            "master": self.master,
            "moments": self.moments,
            f"gradients of {count(self.world_size, 'rank')}": self.gradients,
            "staging": self.staging,
            "undo": self.undo,
            "norms": self.norms,
            "products": self.products,
            "checkpoint copies": self.copies,
        }
        return f"{format_bytes(self.total)} = " + " + ".join(f"{k} {format_bytes(v)}" for k, v in terms.items() if v)


def bitmap_bytes(shard: Shard) -> int:
    """Of a bit for each of a shard's words, in which an update notes what it changes (owner/changes.py)."""
    return -(-shard.numel // 8)


def plan_owner(
    layout: ModelLayout,
    shard_map: ShardMap,
    owner: int,
    world_size: int,
    accumulation_steps: int,
    *,
    state_bytes: float | Callable[[Shard], int] = 8.0,
    splits: bool,
    own_gradients: bool = False,
    measures_norms: bool = False,
    copies: int = 0,
    products: Collection[int] = (),
) -> OwnerPlan:
    """Sum up what the host keeps for ``owner``'s shards.

    state_bytes: of the optimizer's states, per element (8 for Adam in fp32) or of a trained shard. splits: masters of
    bf16 units are split on the host (kernels/split_master.py). own_gradients: this host's ranks keep their gradients
    themselves, so no staging is needed. measures_norms: the owner measures norms by layer group (owner/updates.py).
    copies: ``ZeroConfig.checkpoint_copies``, of which no more is planned than masters and states take. products: shards
    whose matrices ranks multiply."""
    params = master = elements = frozen = gradients = largest = of_class = changes = served = longest = 0
    on_device, mine = shard_map.on_device(owner), list[tuple[Shard, UnitLayout]]()
    for index in shard_map.shards_of(owner):
        shard = layout.shards[index]
        unit = layout.units[shard.unit]
        published, trained = kept_bytes(unit, shard), shard.numel * unit.trainable
        mine += [(shard, unit)] if unit.trainable else []
        params += 0 if unit.trainable and unit.dtype is torch.float32 and not on_device else published
        elements += trained
        master += trained * (2 if splits and unit.can_split and not on_device else FP32)
        frozen += shard.numel * FP32 if unit.frozen_master else 0
        largest = max(largest, trained)
        changes += published + bitmap_bytes(shard) * (unit.dtype.itemsize == 2) if trained else 0
        served, longest = served + published, max(longest, published)
        of_class += state_bytes(shard) if callable(state_bytes) and trained else 0
        gradients += trained * gradient_dtype(unit, adds_up(world_size, accumulation_steps)).itemsize
    states = of_class if callable(state_bytes) else int(elements * state_bytes)
    totals = has_totals(world_size)
    if totals:
        everything = sum(unit.numel * unit.dtype.itemsize for unit in layout.units if unit.trainable)
        pools = world_size * pool_bytes(layout, accumulation_steps)
        gradients = elements * FP32 + pools * gradients // max(1, everything)
        gradients += largest * FP32 if accumulation_steps > 1 else 0  # a total, before a round is added to it
    return OwnerPlan(
        owner=owner,
        num_owners=shard_map.num_owners,
        world_size=world_size,
        params=params,
        master=frozen + (0 if on_device else master),
        moments=0 if on_device else states,
        gradients=gradients,
        staging=0 if own_gradients or totals else math.prod(staging_entries(mine, adds=accumulation_steps > 1)),
        undo=undo_bytes(layout, shard_map, owner, state_bytes) if callable(state_bytes) else 0,
        norms=largest * FP32 if measures_norms else 0,
        products=product_bytes(layout, set(products) & set(shard_map.shards_of(owner)), world_size),
        copies=min(copies, elements * FP32 + states),
        followers=changes + SERVED_AT_ONCE * min(served, SERVED_BYTES + longest),
        on_device=master + states if on_device else 0,
    )


def product_bytes(layout: ModelLayout, shards: Collection[int], world_size: int) -> int:
    """What goes in and what comes out, 2 bytes an element each, of as many of ``shards`` as ranks have at once, and a
    momentum in fp32 of the largest."""
    sizes = sorted((layout.shards[shard].numel for shard in shards), reverse=True)[: 1 + shards_ahead(world_size)]
    return 2 * PRODUCT_DTYPE.itemsize * sum(sizes) + FP32 * max(sizes, default=0)


def undo_bytes(layout: ModelLayout, shard_map: ShardMap, owner: int, state_bytes: Callable[[Shard], int] | None) -> int:
    """What a torch class's update is about to overwrite, at most: masters and states of the largest shard. 0 for the
    kernels (``state_bytes`` None), which have a log, and on a device, whose memory ends with the process."""
    if state_bytes is None or shard_map.on_device(owner):
        return 0
    shards = [layout.shards[index] for index in shard_map.shards_of(owner)]
    trained = [shard for shard in shards if layout.units[shard.unit].trainable]
    return max((FP32 * shard.numel + state_bytes(shard) for shard in trained), default=0)


def staging_entries(trained: Sequence[tuple[Shard, UnitLayout]], *, adds: bool) -> tuple[int, int]:
    """(how many pushes of a single rank wait with an owner until they are added to earlier ones, the bytes of one).
    ``trained``: the owner's shards. ``adds``: there is room for those of two of the largest units; else for two
    shards if there are fp32 units, whose memory can add a push that was not planned, and none if all are 16-bit."""
    if not trained or not (adds or any(unit.dtype is torch.float32 for _, unit in trained)):
        return 0, 0
    largest_unit = max(Counter(unit.index for _, unit in trained).values())
    entries = 2 * largest_unit if adds else 2
    return entries, max(shard.numel * unit.dtype.itemsize for shard, unit in trained)


def check_host(plan: OwnerPlan, limits: HostLimits) -> None:
    """Raise MemoryPlanError, with the sum and the setting to change, if the plan does not fit the host."""
    if plan.total > limits.available:
        raise MemoryPlanError(
            f"{plan.who} needs {plan.describe()}, but its host has {format_bytes(limits.available)} free, measured by "
            f"{limits.source}; raise num_optimizers and spread them over more hosts, or lower num_workers"
        )


def check_budget(plan: OwnerPlan, budget: int, *, taken: int = 0) -> None:
    """Raise MemoryPlanError, with the sum, if the plan needs more than ``cpu_memory_budget`` has left. It does not look
    at the host, so it can be called before anything runs. taken: bytes of it that the owner's other models have."""
    if plan.total > budget - taken:
        others = f", of which other prepared models have {format_bytes(taken)}" if taken else ""
        raise MemoryPlanError(
            f"{plan.who} needs {plan.describe()}, but cpu_memory_budget is {format_bytes(budget)}{others}; "
            "raise cpu_memory_budget or num_optimizers"
        )


def check_device(plan: OwnerPlan, device: torch.device) -> None:
    """Raise MemoryPlanError, with the setting to change, if the owner keeps more on its rank's CUDA device than is free
    there now."""
    free = torch.cuda.mem_get_info(device)[0] if plan.on_device and device.type == "cuda" else None
    if free is not None and plan.on_device > free:
        raise MemoryPlanError(
            f"{plan.who} keeps {format_bytes(plan.on_device)} of masters and states "
            f"on {device}, which has {format_bytes(free)} free; raise offload_fraction"
        )


def check_shared(
    plan_bytes: int, slab_dir: Path, *, limits: HostLimits | None = None, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise MemoryPlanError, with the sum and the setting to change, if the shared memory of all of this host's owners
    and ranks does not fit ``slab_dir``, or would fill the host so far that Ray kills processes.

    limits: what was measured on a host; None: measure here and now. environment: has Ray's settings."""
    if plan_bytes > shutil.disk_usage(slab_dir).free:
        raise no_room(plan_bytes, slab_dir, "too small")
    host = limits or host_limits()
    threshold = ray_memory_threshold(environment)
    used = host.total - host.available
    room = max(0, int(host.total * threshold) - used)
    if plan_bytes > room:
        raise MemoryPlanError(
            f"shared memory needs {format_bytes(plan_bytes)}, but this host has {format_bytes(room)} for it: "
            f"{format_bytes(host.total)} ({host.source}) x {threshold:g} (where Ray kills processes) - "
            f"{format_bytes(used)} in use; lower num_workers, spread owners over more hosts with num_optimizers, "
            "or raise RAY_memory_usage_threshold"
        )


def no_room(size: int, slab_dir: Path | None, why: str) -> MemoryPlanError:
    """The error if ``slab_dir`` (None: no directory) has no room for ``size`` bytes of shared memory."""
    free = f"{slab_dir} has {format_bytes(shutil.disk_usage(slab_dir).free)} free" if slab_dir else "there is less"
    return MemoryPlanError(
        f"shared memory needs {format_bytes(size)}, but {free} ({why}); "
        "train a smaller model, set slab_dir to a directory with room, or give the container more with --shm-size"
    )
