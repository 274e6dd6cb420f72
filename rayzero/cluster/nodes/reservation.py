"""Reserves resources on the cluster: one Ray placement group for each group of processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayzero.cluster.nodes.resources import ResourceGroup, ResourcePlan, Share, missing_resources
from rayzero.cluster.nodes.session import alive_nodes, free_resources, ray_answers, started_here
from rayzero.elastic.doors import hosts_without_owner
from rayzero.errors import ConfigError
from rayzero.quantities import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Reserved places, and the actor options that use them."""

    plan: ResourcePlan
    groups: tuple[Any, ...]  # Ray placement groups, one for each of the plan's

    def worker_options(self, rank: int) -> dict[str, Any]:
        """Ray actor options of a rank worker: bundle 0 of its group."""
        return self._options(self.plan.worker, rank, bundle=0)

    def optimizer_options(self, owner: int) -> dict[str, Any]:
        """Ray actor options of an optimizer actor."""
        return self._options(self.plan.optimizer, *self.plan.place_of_optimizer(owner))

    def spare_options(self, owner: int) -> dict[str, Any]:
        """Ray actor options of a process that waits at the place of an optimizer actor: it reserves nothing, and later
        uses what a dead one leaves."""
        options = self.optimizer_options(owner) | {"num_cpus": 0, "num_gpus": 0}
        options.pop("memory", None)
        return options

    def nodes(self) -> dict[tuple[int, int], str]:
        """The node (id) of every reserved place, by group and bundle."""
        table = placement_group_table()
        bundles = {index: table[group.id.hex()]["bundles_to_node_id"] for index, group in enumerate(self.groups)}
        return {(group, bundle): node for group, found in bundles.items() for bundle, node in found.items()}

    def rank_nodes(self) -> list[str]:
        """The node (id) of every rank."""
        at = self.nodes()
        return [at[rank, 0] for rank in range(self.plan.num_workers)]

    def nodes_without_optimizer(self, rank_nodes: Sequence[str]) -> list[str]:
        """The nodes (ids) with ranks and without an optimizer actor. ``rank_nodes``: of each rank."""
        at, plan = self.nodes(), self.plan
        owners = [at[plan.place_of_optimizer(owner)] for owner in range(plan.num_optimizers)]
        return hosts_without_owner(rank_nodes, owners)

    def _options(self, share: Share, group: int, bundle: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.groups[group],
            placement_group_bundle_index=bundle,
            placement_group_capture_child_tasks=False,
        )
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "scheduling_strategy": strategy}
        return options | ({"memory": share.memory} if share.memory else {})


@contextmanager
def placed(plan: ResourcePlan, *, timeout_s: float) -> Iterator[Reservation]:
    """Reserve the resources of the plan for the length of the block; also releases them if they cannot all be had.

    Raises ConfigError, naming what is missing: at once on a cluster that this process started; after ``timeout_s`` on
    any other, which may grow, or on which others may release CPUs.
    """
    if started_here() and (missing := missing_resources(plan, alive_nodes())):
        raise ConfigError(missing)
    groups: list[Any] = []
    try:
        for group in plan.groups:
            groups.append(_reserve(group))
        _wait_placed(plan, groups, timeout_s)
        yield Reservation(plan=plan, groups=tuple(groups))
    finally:
        for reserved in groups if ray_answers() else ():  # a Ray that is gone has none, and the call would wait for it
            remove_placement_group(reserved)


def _reserve(group: ResourceGroup) -> Any:
    bundles = [_bundle(share) for share in group.shares]
    selectors = [dict(group.labels) for _ in bundles] if group.labels else None
    return placement_group(bundles, strategy=group.strategy, bundle_label_selector=selectors)


def _bundle(share: Share) -> dict[str, float]:
    wanted = {"CPU": share.cpus, "GPU": float(share.gpus), "memory": float(share.memory)}
    return {resource: amount for resource, amount in wanted.items() if amount}


def _wait_placed(plan: ResourcePlan, groups: list[Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    ready = [group.wait(math.ceil(max(0.0, deadline - time.monotonic()))) for group in groups]  # Ray cuts to seconds
    if not all(ready):
        raise ConfigError(missing_resources(plan, alive_nodes()) or _busy(plan, sum(ready), timeout_s))


def _busy(plan: ResourcePlan, num_ready: int, timeout_s: float) -> str:
    free = free_resources()
    return (
        f"only {num_ready} of {len(plan.groups)} groups of processes found a place within {timeout_s:g} s: the run "
        f"needs {count(plan.cpus, 'CPU')} and {count(plan.gpus, 'GPU')} in all, and "
        f"{count(free.cpus, 'CPU')} and {count(free.gpus, 'GPU')} are free besides those that it has already; other "
        f"programs use the rest. Wait for them, lower scaling_config.cpus_per_worker and "
        "cpus_per_optimizer, or raise scaling_config.placement_timeout"
    )
