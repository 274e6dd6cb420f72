"""What each process of a run gets, and what is missing when a cluster is too small. Pure arithmetic, no Ray.

A run is placed as one *group* per rank: the rank worker and the optimizer actors that stand beside it, on one
node. Optimizer ``k`` stands beside rank ``k % num_workers``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rayzero.config import ScalingConfig

__all__ = ["Group", "Node", "ResourcePlan", "Share", "describe_nodes", "missing_resources", "plan_resources"]

_LEAST_CPUS = 0.01  # Ray counts CPUs in steps of 0.0001; a bundle with none may be placed anywhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one node of the cluster has in all, used or not."""

    cpus: float
    gpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one process gets."""

    cpus: float  # that Ray reserves
    gpus: int  # that Ray reserves
    threads: int  # that compute in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What must be on one node: a rank worker and the optimizer actors beside it."""

    rank: int
    optimizers: tuple[int, ...]
    cpus: float
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePlan:
    """The share of every process of a run, and which processes stand together."""

    worker: Share
    optimizer: Share
    groups: tuple[Group, ...]  # in rank order

    @property
    def cpus(self) -> float:
        """CPUs of all processes."""
        return math.fsum(group.cpus for group in self.groups)

    @property
    def gpus(self) -> int:
        """GPUs of all processes."""
        return sum(group.gpus for group in self.groups)

    def group_of_optimizer(self, optimizer: int) -> int:
        """The rank that an optimizer actor stands beside."""
        return optimizer % len(self.groups)


def plan_resources(scaling: ScalingConfig, nodes: Sequence[Node]) -> ResourcePlan:
    """Shares for every process of a run on these nodes.

    CPUs that the config leaves open are the largest equal share with which all groups fit (whole CPUs, or
    hundredths of one on a small cluster); where nothing fits it is one CPU, so that ``missing_resources`` can say
    what one would need.
    """

    def planned(share: float) -> ResourcePlan:
        return _plan(scaling, share)

    return planned(_largest_share(scaling, nodes, planned))


def missing_resources(plan: ResourcePlan, nodes: Sequence[Node]) -> str | None:
    """What the nodes lack for the plan, and the setting to change; None when every group has a place."""
    if _fits(plan.groups, nodes):
        return None
    if plan.gpus > (gpus := sum(node.gpus for node in nodes)):
        need = f"{plan.gpus} GPUs (scaling_config.use_gpu: 1 for each of {len(plan.groups)} ranks)"
        return f"the run needs {need}, the cluster has {gpus:g}; lower num_workers or set use_gpu=False"
    if plan.cpus > (cpus := sum(node.cpus for node in nodes)):
        return f"the run needs {_demand(plan)}, the cluster has {cpus:g} CPUs; {_LOWER}"
    return (
        f"the run needs {_demand(plan)}, and a rank and the optimizers beside it need one node: no way to place "
        f"{_groups_in_words(plan)} on {describe_nodes(nodes)}; {_LOWER}"
    )


def describe_nodes(nodes: Sequence[Node]) -> str:
    """``2 nodes (8 CPUs, 1 GPU; 4 CPUs)``: for error messages."""
    inside = "; ".join(f"{node.cpus:g} CPUs" + (f", {node.gpus:g} GPUs" if node.gpus else "") for node in nodes)
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} ({inside})"


_LOWER = "lower scaling_config.cpus_per_worker, cpus_per_optimizer, num_workers or num_optimizers"


def _demand(plan: ResourcePlan) -> str:
    optimizers = sum(len(group.optimizers) for group in plan.groups)
    return (
        f"{plan.cpus:g} CPUs ({len(plan.groups)} ranks x {plan.worker.cpus:g} + "
        f"{optimizers} optimizers x {plan.optimizer.cpus:g})"
    )


def _groups_in_words(plan: ResourcePlan) -> str:
    def words(group: Group) -> str:
        return f"{group.cpus:g} CPUs" + (f" and {group.gpus} GPU" if group.gpus else "")

    return ", ".join(dict.fromkeys(words(group) for group in plan.groups))


def _plan(scaling: ScalingConfig, share: float) -> ResourcePlan:
    """The plan in which open CPU counts are ``share``."""
    worker = _share(scaling.cpus_per_worker or share, scaling.threads_per_worker, gpus=int(scaling.use_gpu))
    optimizer = _share(scaling.cpus_per_optimizer or share, scaling.threads_per_optimizer, gpus=0)
    ranks = range(scaling.num_workers)
    beside = [tuple(range(rank, scaling.num_optimizers, scaling.num_workers)) for rank in ranks]
    groups = tuple(
        Group(
            rank=rank,
            optimizers=optimizers,
            cpus=round(worker.cpus + len(optimizers) * optimizer.cpus, 4),
            gpus=worker.gpus,
        )
        for rank, optimizers in zip(ranks, beside, strict=True)
    )
    return ResourcePlan(worker=worker, optimizer=optimizer, groups=groups)


def _share(cpus: float, threads: int | None, *, gpus: int) -> Share:
    return Share(cpus=round(cpus, 4), gpus=gpus, threads=threads or max(1, math.floor(cpus)))


def _largest_share(scaling: ScalingConfig, nodes: Sequence[Node], planned: Callable[[float], ResourcePlan]) -> float:
    """The largest CPU share with which the groups fit; a node's CPUs split among 1, 2, ... processes are tried."""
    processes = range(1, scaling.num_workers + scaling.num_optimizers + 1)
    shares = {_round_down(node.cpus / count) for node in nodes for count in processes}
    fitting = (share for share in sorted(shares, reverse=True) if _fits(planned(share).groups, nodes))
    return next(fitting, 1.0)


def _round_down(cpus: float) -> float:
    """Whole CPUs, or hundredths of one below that; never 0."""
    return float(math.floor(cpus)) if cpus >= 1 else max(math.floor(cpus * 100) / 100, _LEAST_CPUS)


def _fits(groups: Iterable[Group], nodes: Sequence[Node]) -> bool:
    """First fit, largest group first: True when every group has a node."""
    free = [[node.cpus, node.gpus] for node in nodes]
    for group in sorted(groups, key=lambda group: (group.gpus, group.cpus), reverse=True):
        place = next((have for have in free if have[0] + 1e-9 >= group.cpus and have[1] >= group.gpus), None)
        if place is None:
            return False
        place[0] -= group.cpus
        place[1] -= group.gpus
    return True
