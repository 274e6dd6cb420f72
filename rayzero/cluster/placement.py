"""Places on the cluster: one placement group per rank, with the optimizer actors beside it on the same node."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayzero.cluster.resources import Group, ResourcePlan, Share, missing_resources
from rayzero.cluster.session import alive_nodes, free_resources, started_here
from rayzero.errors import ConfigError

__all__ = ["Placement", "placed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Reserved places, and the actor options that use them."""

    plan: ResourcePlan
    groups: tuple[Any, ...]  # Ray placement groups, by rank

    def worker_options(self, rank: int) -> dict[str, Any]:
        """Ray actor options of a rank worker: bundle 0 of its group."""
        return self._options(self.plan.worker, rank, bundle=0)

    def optimizer_options(self, owner: int) -> dict[str, Any]:
        """Ray actor options of an optimizer actor: a bundle after the rank's own."""
        rank = self.plan.group_of_optimizer(owner)
        return self._options(self.plan.optimizer, rank, 1 + self.plan.groups[rank].optimizers.index(owner))

    def _options(self, share: Share, rank: int, bundle: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.groups[rank],
            placement_group_bundle_index=bundle,
            placement_group_capture_child_tasks=False,
        )
        return {"num_cpus": share.cpus, "num_gpus": share.gpus, "scheduling_strategy": strategy}


@contextmanager
def placed(plan: ResourcePlan, *, timeout_s: float) -> Iterator[Placement]:
    """Reserve every place of the plan; given back at the end, and when it cannot be had.

    Raises ConfigError naming what is missing: at once on a cluster that this process started, after ``timeout_s``
    on another, which may grow or have its CPUs taken by others.
    """
    if started_here() and (missing := missing_resources(plan, alive_nodes())):
        raise ConfigError(missing)
    groups: list[Any] = []
    try:
        for group in plan.groups:
            groups.append(placement_group(_bundles(plan, group), strategy="STRICT_PACK"))
        _wait_placed(plan, groups, timeout_s)
        yield Placement(plan=plan, groups=tuple(groups))
    finally:
        for reserved in groups:
            remove_placement_group(reserved)


def _bundles(plan: ResourcePlan, group: Group) -> list[dict[str, float]]:
    worker: dict[str, float] = {"CPU": plan.worker.cpus}
    if plan.worker.gpus:
        worker["GPU"] = plan.worker.gpus
    return [worker] + [{"CPU": plan.optimizer.cpus} for _ in group.optimizers]


def _wait_placed(plan: ResourcePlan, groups: list[Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    ready = [group.wait(math.ceil(max(0.0, deadline - time.monotonic()))) for group in groups]  # Ray cuts to seconds
    if not all(ready):
        raise ConfigError(missing_resources(plan, alive_nodes()) or _busy(plan, sum(ready), timeout_s))


def _busy(plan: ResourcePlan, num_ready: int, timeout_s: float) -> str:
    free = free_resources()
    return (
        f"only {num_ready} of {len(plan.groups)} ranks found a place within {timeout_s:g} s: the run needs "
        f"{plan.cpus:g} CPUs and {plan.gpus} GPUs in all, and {free.cpus:g} CPUs and {free.gpus:g} GPUs are free "
        "beside what it has already; others use the rest. Wait for them, lower scaling_config.cpus_per_worker and "
        "cpus_per_optimizer, or raise scaling_config.placement_timeout"
    )
