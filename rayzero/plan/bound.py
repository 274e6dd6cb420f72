"""A lower bound on the time of a step, and the stage that sets it: each stage's work over its hardware's peak.

At best all stages overlap, so the bound is the longest one (with ``overlap="none"`` the update is added). Everything it
leaves out makes real steps longer: latencies, kernel launches, cache misses, and the copies of activation offload, of
which late ones are skipped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.layout.model_layout import ModelLayout
from rayzero.layout.shard_map import shard_map_for
from rayzero.memory.pool import buffer_bytes
from rayzero.plan.hardware import Hardware, Hosts
from rayzero.plan.tiers import FP32, hosts_of_owners, hosts_of_ranks, summed_groups
from rayzero.plan.work import Work
from rayzero.protocol.gradient_sum import has_totals
from rayzero.protocol.products import product_ranks
from rayzero.store.shm.words import GradientBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """What one step moves and computes; bytes."""

    flops: int  # of one rank
    fetch: int  # of one rank: parameters that must be fetched again
    gradients: GradientBytes
    published: int  # parameters that change, once
    update: int  # of all owners: what the norm and the update read and write
    products: tuple[int, ...] = ()  # of each owner: operations of its updates, if these are more than that
    multiplied: int = 0  # of the rank with most: operations that it makes for owners (matrix_updates="rank")

    @property
    def push(self) -> int:
        """Gradients of one rank."""
        return self.gradients.pushed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """The least seconds of each stage, where it is busiest."""

    compute: float
    fetch: float  # host to device
    push: float  # device to host
    network: float  # between hosts
    update: float  # host memory: norm, Adam; a host's CPUs: Muon's products
    exposed: float  # of the update, if it has to wait for the step's end

    @property
    def seconds(self) -> float:
        """The least seconds of a step."""
        stages = self.stages
        return max(stages.values()) if not self.exposed else max(stages["compute"] + self.exposed, *stages.values())

    @property
    def binds(self) -> str:
        """The stage that takes longest."""
        return max(self.stages, key=lambda name: self.stages[name])

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage."""
        return {name: getattr(self, name) for name in ("compute", "fetch", "push", "network", "update")}

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"seconds": self.seconds, "binds": self.binds}


def step_traffic(
    layout: ModelLayout,
    work: Work,
    zero: ZeroConfig,
    scaling: ScalingConfig,
    *,
    state_bytes: float,
    splits: bool,
    update_work: Sequence[int] | None = None,
    product_work: Sequence[int] = (),
) -> StepTraffic:
    """Count one step's bytes and operations. Parameters beyond the budget are fetched in each forward and each
    backward; what fits stays. state_bytes: of the optimizer's states, per element. splits: see ``plan_owner``.
    update_work: see protocol/products.py. product_work: what ranks multiply of each shard."""
    backwards = zero.gradient_accumulation_steps
    sizes = [buffer_bytes(unit.size_bytes) for unit in layout.units]
    trained = [unit for unit in layout.units if unit.trainable]
    beyond = max(0, sum(sizes) - zero.gpu_param_memory_budget)
    elements, gradients = sum(unit.numel for unit in trained), sum(unit.size_bytes for unit in trained)
    unsplit = [unit for unit in trained if not (splits and unit.can_split)]
    published = sum(unit.size_bytes for unit in unsplit if unit.dtype is not torch.float32)
    states = int(elements * 2 * (FP32 + state_bytes))  # with the master, one half of which a split one publishes
    ranks, pushes = scaling.num_workers, backwards if zero.offload_grads else 1
    if has_totals(ranks):  # the last round's pass reads and writes a total, which the update reads
        summed = ranks * gradients + (2 if pushes == 1 else 3) * FP32 * elements
    else:
        summed = 2 * ranks * gradients
    owned = shard_map_for(layout, scaling.num_optimizers, zero.shard_map, work=update_work)
    on_ranks = Counter[int]()
    for shard, rank in product_ranks(product_work, ranks).items():
        on_ranks[rank] += product_work[shard]
    return StepTraffic(
        flops=(work.forward_flops + work.backward_flops) * backwards,
        fetch=gradients + (2 * backwards - 1) * beyond,
        gradients=GradientBytes.of(layout.units, pushes),
        published=gradients,
        update=summed + states + published,
        products=() if update_work is None else tuple(map(owned.weight_of, range(owned.num_owners))),
        multiplied=max(on_ranks.values(), default=0),
    )


def bound_step(traffic: StepTraffic, zero: ZeroConfig, scaling: ScalingConfig, hardware: Hardware) -> StepBound:
    """The bound on these hosts."""
    hosts = hardware.hosts
    ranks, owners = hosts_of_ranks(scaling, hosts), Counter(hosts_of_owners(zero, scaling, hosts))
    crowded = max(Counter(ranks).values())
    update = traffic.update * max(owners.values()) / scaling.num_optimizers / hardware.memory
    update += max(products_by_host(traffic, zero, scaling, hosts).values(), default=0) / hardware.host_flops
    update += seconds_on_ranks(traffic, zero, scaling, hardware)
    return StepBound(
        compute=traffic.flops / hardware.flops * (1 if hosts.on_gpu else crowded),
        fetch=traffic.fetch / hardware.link,
        push=traffic.push / hardware.link,
        network=_between_hosts(traffic, ranks, owners, zero) / hardware.network,
        update=update,
        exposed=update if zero.overlap == "none" or not zero.overlap_computation else 0.0,
    )


def seconds_on_ranks(traffic: StepTraffic, zero: ZeroConfig, scaling: ScalingConfig, hardware: Hardware) -> float:
    """The least seconds of what the rank with most multiplies for owners, in bf16. On GPUs that were measured in fp32,
    whose speed in bf16 is not known: 0."""
    if not hardware.hosts.on_gpu:
        crowded = max(Counter(hosts_of_ranks(scaling, hardware.hosts)).values())
        return traffic.multiplied * crowded / hardware.host_flops
    return traffic.multiplied / hardware.flops if zero.precision != "fp32" else 0.0


def products_by_host(traffic: StepTraffic, zero: ZeroConfig, scaling: ScalingConfig, hosts: Hosts) -> dict[int, int]:
    """Operations of the updates of each host's owners."""
    found = defaultdict[int, int](int)
    for host, products in zip(hosts_of_owners(zero, scaling, hosts), traffic.products, strict=False):
        found[host] += products
    return dict(found)


def _between_hosts(traffic: StepTraffic, ranks: Sequence[int], owners: Counter[int], zero: ZeroConfig) -> float:
    """The most bytes that a host receives or sends. ``ranks``: their hosts. ``owners``: how many each host has."""
    here, groups = Counter(ranks), summed_groups(ranks, zero, traffic.gradients)
    fetched = {
        host: count * traffic.fetch if zero.shared_directory is None else traffic.published
        for host, count in here.items()
    }
    pushed = {
        host: (count - sum(map(len, groups[host]))) * traffic.push + len(groups[host]) * traffic.gradients.summed
        for host, count in here.items()
    }

    def most(host: int) -> float:
        local = owners[host] / owners.total()  # share of every rank's bytes that stays on its host
        others = [other for other in here if other != host]
        received = fetched.get(host, 0) * (1 - local) + sum(pushed[other] for other in others) * local
        sent = pushed.get(host, 0) * (1 - local) + sum(fetched[other] for other in others) * local
        return max(received, sent)

    return max(most(host) for host in {*here, *owners})
