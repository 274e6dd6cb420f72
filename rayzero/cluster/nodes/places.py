"""Places of a run's processes: reserved as it begins, in one Ray placement group for each group of processes, and found
for optimizer actors that join while it goes on.

An actor that joins with a number that the run began with goes back to the place that is reserved for it. Any other
gets a placement group of its own, on one node, so that its CPUs are free again when it parts. Where the run's CPU
counts are set by nobody, it may have divided all CPUs among its processes: then a new actor shares those of one that is
there.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayzero.cluster.nodes.resources import Node, ResourceGroup, ResourcePlan, Share, matches, missing_resources
from rayzero.cluster.nodes.session import alive_nodes, free_resources, ray_answers, started_here
from rayzero.elastic.reform import hosts_without_owner
from rayzero.errors import ConfigError
from rayzero.protocol.ownership import Ownership
from rayzero.quantities import count, format_bytes

_NODE_LABEL = "ray.io/node-id"
_PROCESS_BYTES = 100 << 20  # of an optimizer actor that owns nothing: what it does not share (docs/scaling.md)
_FREE_S = 1  # how long Ray may take to reserve CPUs that are free


def _in_bundle(share: Share, group: Any, bundle: int = 0) -> dict[str, Any]:
    """Ray actor options of a process that uses what a placement group has reserved."""
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
    )
    options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "scheduling_strategy": strategy}
    return options | ({"memory": share.memory} if share.memory else {})


def _beside(options: Mapping[str, Any]) -> dict[str, Any]:
    """Ray actor options of a process that shares a place, and reserves nothing."""
    return {name: value for name, value in options.items() if name != "memory"} | {"num_cpus": 0, "num_gpus": 0}


@contextmanager
def placed(plan: ResourcePlan, *, timeout_s: float) -> Iterator[Places]:
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
        yield Places(plan, groups)
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


# ---- optimizer actors that join -------------------------------------------------------------------------------------


def check_nodes(named: Collection[str], nodes: Sequence[Node]) -> None:
    """Raise ConfigError if something is named that is no node of the cluster, by id or address."""
    known = {name for node in nodes for name in (node.id, node.address)}
    strangers = sorted(set(named) - known)
    if strangers:
        raise ConfigError(
            f"{strangers[0]!r} is no node of the cluster; it has {', '.join(sorted(node.address for node in nodes))} "
            f"(ids {', '.join(sorted(node.id for node in nodes))})"
        )


def check_memory(more: int, nodes: Sequence[Node]) -> None:
    """Raise ConfigError if so many more processes do not fit into the cluster's memory, whatever they own."""
    memory, needed = sum(node.memory for node in nodes), more * _PROCESS_BYTES
    if needed > memory:
        raise ConfigError(
            f"{count(more, 'more optimizer')} would need {format_bytes(needed)} for their processes alone, "
            f"{format_bytes(_PROCESS_BYTES)} each, and the cluster has {format_bytes(int(memory))}: ask for fewer"
        )


def choose(
    there: Sequence[str],
    nodes: Sequence[Node],
    *,
    rank_nodes: Sequence[str],
    placement: str,
    labels: Mapping[str, str],
    avoid: Collection[str] = (),
) -> str:
    """The node for one more optimizer actor. ``there``: the node of each that there is, ``rank_nodes``: of each rank;
    ``placement``, ``labels``: see ``ZeroConfig.placement`` and ``ScalingConfig.optimizer_labels``; ``avoid``: ids or
    addresses of nodes that it must not be on. Raises ConfigError if there is none."""
    wanted = labels if placement == "cpu_nodes" else {}
    free = [node for node in nodes if node.id not in avoid and node.address not in avoid]
    fitting = [node for node in free if matches(wanted, node.labels)]
    if not fitting:
        but = f" other than {', '.join(sorted(avoid))}" if avoid else ""
        that = f" that carries {dict(wanted)}" if wanted else ""
        raise ConfigError(f"of {count(len(nodes), 'node')}, there is none{but}{that} for another optimizer")
    owners, near = Counter(there), Counter(rank_nodes if placement == "beside_rank" else there)
    if placement == "cpu_nodes":  # spread
        return min(fitting, key=lambda node: owners[node.id]).id
    return min(fitting, key=lambda node: (not near[node.id], owners[node.id])).id


def is_placed(node: Node, *, rank_nodes: Collection[str], placement: str, labels: Mapping[str, str]) -> bool:
    """Whether an optimizer actor on ``node`` is where ``placement`` wants it; see ``choose``."""
    if placement == "cpu_nodes":
        return matches(labels, node.labels)
    return placement == "packed" or node.id in rank_nodes


@dataclass(frozen=True, slots=True)
class OwnerPlace:
    """Where an optimizer actor is that has joined."""

    options: dict[str, Any]  # Ray actor options
    group: Any = None  # the placement group that was made for it; None: it uses what was there


def door_place(node: str) -> OwnerPlace:
    """The place of an optimizer actor without shards, beside the ranks of ``node`` (id). It reserves nothing."""
    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    return OwnerPlace({"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": on_node})


class Places:
    """The places of a run's processes: those that were reserved when it began, and those of optimizer actors that are
    there without shards, or join later.

    Knows placement groups; not actors."""

    def __init__(self, plan: ResourcePlan, groups: Sequence[Any]) -> None:
        """``groups``: Ray placement groups, one for each of the plan's."""
        self.plan, self._groups = plan, groups
        # by owner: not where the plan has it. freed by: free(), close()
        self._taken: dict[int, OwnerPlace] = {}

    def worker_options(self, rank: int) -> dict[str, Any]:
        """Ray actor options of a rank worker: bundle 0 of its group."""
        return _in_bundle(self.plan.worker, self._groups[rank])

    def options(self, owner: int) -> dict[str, Any]:
        """Ray actor options of an optimizer actor."""
        place = self._taken.get(owner)
        return self._reserved(owner) if place is None else place.options

    def _reserved(self, owner: int) -> dict[str, Any]:
        group, bundle = self.plan.place_of_optimizer(owner)
        return _in_bundle(self.plan.optimizer, self._groups[group], bundle)

    def spare_options(self, owner: int) -> dict[str, Any]:
        """Ray actor options of a process that waits at the place of an optimizer actor: it reserves nothing, and later
        uses what a dead one leaves."""
        return _beside(self._reserved(owner))

    def _nodes(self) -> dict[tuple[int, int], str]:
        table = placement_group_table()
        bundles = {index: table[group.id.hex()]["bundles_to_node_id"] for index, group in enumerate(self._groups)}
        return {(group, bundle): node for group, found in bundles.items() for bundle, node in found.items()}

    def rank_nodes(self) -> list[str]:
        at = self._nodes()
        return [at[rank, 0] for rank in range(self.plan.num_workers)]

    def nodes_without_optimizer(self, rank_nodes: Sequence[str]) -> list[str]:
        """The nodes (ids) with ranks and without an optimizer actor. ``rank_nodes``: of each rank."""
        at, plan = self._nodes(), self.plan
        owners = [at[plan.place_of_optimizer(owner)] for owner in range(plan.num_optimizers)]
        return hosts_without_owner(rank_nodes, owners)

    def find(self, owner: int, node: str, there: Mapping[int, str], coming: Mapping[str, OwnerPlace]) -> OwnerPlace:
        """A place on ``node`` for an owner that joins; Ray may take its time to reserve it. ``there``: the node of each
        owner that there is. ``coming``: by node, the place of another one that joins."""
        is_free = owner < self.plan.num_optimizers and (owner not in there or owner in self._taken)
        if is_free and self._nodes().get(self.plan.place_of_optimizer(owner)) == node:
            return OwnerPlace(self._reserved(owner))
        share = self.plan.optimizer
        group = placement_group([_bundle(share)], bundle_label_selector=[{_NODE_LABEL: node}])
        beside = next((self.options(other) for other, at in there.items() if at == node), None)
        if beside is None and node in coming:
            beside = coming[node].options
        if self.plan.cpus_are_set or beside is None or group.wait(_FREE_S):
            return OwnerPlace(_in_bundle(share, group), group)
        remove_placement_group(group)
        return OwnerPlace(_beside(beside))

    def add_doors(self, nodes: Sequence[str], goes_on: Ownership | None, here: str) -> Ownership:
        """As the run begins: optimizer actors without shards are on these nodes (ids), numbered behind the others.
        Returns who owns what. ``goes_on``: who owned what in the run that this one continues from memory, all of which
        is on the host of the node ``here``: there are as many doors as before; None: the run continues no other."""
        first = self.plan.num_optimizers
        ownership = goes_on or Ownership(first + len(nodes), doors=len(nodes))
        doors = len(ownership.door_numbers)
        at = [*nodes, *[here] * doors][:doors]
        self._taken |= {first + i: door_place(node) for i, node in enumerate(at)}
        return ownership

    def take(self, owner: int, place: OwnerPlace | None) -> OwnerPlace | None:
        """An owner is at ``place`` now; None: there is no such owner any more. Returns where it was before, if that was
        found here: ``free`` it once its process has ended."""
        before = self._taken.pop(owner, None)
        if place is not None:
            self._taken[owner] = place
        return before

    def free(self, place: OwnerPlace | None) -> None:
        """Give a place back that nobody uses, unless others are beside it."""
        if place is None or place.group is None or not ray_answers():
            return
        strategies = [taken.options["scheduling_strategy"] for taken in self._taken.values() if taken is not place]
        if all(getattr(strategy, "placement_group", None) != place.group for strategy in strategies):
            remove_placement_group(place.group)

    @property
    def needs(self) -> str:
        share = self.plan.optimizer
        return count(share.cpus, "CPU") + (f" and {format_bytes(share.memory)} of memory" if share.memory else "")

    def close(self) -> None:
        taken, self._taken = self._taken, {}
        for place in taken.values():
            self.free(place)
