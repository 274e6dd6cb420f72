"""Plans the resources of a run's processes, and finds what a cluster lacks. Pure arithmetic, no Ray.

A run is placed as *groups* of processes that are reserved together. With ``placement="beside_rank"`` a group is a rank
worker and the optimizer actors beside it on the same node (optimizer ``k`` beside rank ``k % num_workers``); otherwise
every rank is a group of its own and all optimizer actors are another, close together (``"packed"``) or spread over the
nodes that carry the labels of ``scaling_config.optimizer_labels`` (``"cpu_nodes"``).

[Note: open files] Each process raises its own limit of open files as it starts (concurrency/processes.py) and says
what it may open then; the driver compares that with what the run needs at most before the first port is open, and
before it lets other owners in: a connection that cannot be opened in the middle of training looks like a broken
network. In these sums ``num_owners`` are all, of which ``num_doors`` have no shards, and ``neighbours`` other processes
of the run on the host, of which ``ranks_here`` are ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rayzero.cluster.run import Member, optimizer_name, rank_name
from rayzero.config import ScalingConfig
from rayzero.config.zero import Placement
from rayzero.quantities import count, format_bytes
from rayzero.store.host.door import DOOR_TRANSFERS
from rayzero.store.host.transfer_calls import most_transfers
from rayzero.store.owner.tensor_port import CONNECTIONS, ENTERING

_LEAST_CPUS = 0.01  # Ray counts CPUs in steps of 0.0001; a bundle with none may be placed anywhere
_CALLS_OF_RAY = 2  # connections between the driver or the coordinator and each other process
_LOWER = "lower scaling_config.cpus_per_worker, cpus_per_optimizer, num_workers or num_optimizers"
_LESS_MEMORY = "lower scaling_config.memory_per_worker, memory_per_optimizer, num_workers or num_optimizers"

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD"]  # Ray's words: one node; few nodes; many nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """All resources of one node of the cluster, used or not."""

    id: str = ""
    address: str = ""
    cpus: float = 0.0
    gpus: float = 0.0
    memory: float = 0.0  # bytes that Ray gives out
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The resources of one process."""

    cpus: float  # that Ray reserves
    gpus: int  # that Ray reserves
    threads: int  # computing threads
    memory: int = 0  # bytes that Ray reserves; 0: none are asked for


@dataclass(frozen=True, kw_only=True)
class ResourceGroup:
    """Processes that are reserved together: a rank worker, if any, then optimizer actors."""

    rank: int | None  # None: optimizer actors alone
    optimizers: tuple[int, ...]
    shares: tuple[Share, ...]  # of the rank first, then of the optimizers
    strategy: Strategy
    labels: Mapping[str, str] = field(default_factory=dict)  # that every node of the group must carry

    def pieces(self) -> Iterator[tuple[Share, ...]]:
        """Its processes, in parts that may be on different nodes."""
        if self.strategy == "STRICT_PACK":
            yield self.shares
        else:
            yield from ((share,) for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePlan:
    """The share of every process of a run, and which processes are placed together."""

    worker: Share
    optimizer: Share
    num_workers: int
    num_optimizers: int
    groups: tuple[ResourceGroup, ...]  # those with ranks first, in rank order
    bind_numa: bool
    cpus_are_set: bool = False  # of optimizers, by ``cpus_per_optimizer``

    @property
    def cpus(self) -> float:
        return math.fsum(_sum(group.shares)[0] for group in self.groups)

    @property
    def gpus(self) -> int:
        return sum(share.gpus for group in self.groups for share in group.shares)

    @property
    def memory(self) -> int:
        return sum(share.memory for group in self.groups for share in group.shares)

    def place_of_optimizer(self, optimizer: int) -> tuple[int, int]:
        """(group, place in the group's shares) of an optimizer actor; a rank's is (rank, 0)."""
        for index, group in enumerate(self.groups):
            if optimizer in group.optimizers:
                return index, group.optimizers.index(optimizer) + (group.rank is not None)
        raise IndexError(f"optimizer {optimizer} of {self.num_optimizers}")


def plan_resources(scaling: ScalingConfig, nodes: Sequence[Node], placement: Placement = "beside_rank") -> ResourcePlan:
    """Shares for every process of a run on these nodes.

    If the config sets no CPU count, every process gets the largest equal share with which all groups fit (whole CPUs,
    or hundredths on a small cluster). If nothing fits, the share is one CPU, so that ``missing_resources`` can name
    what is needed.
    """

    def planned(share: float) -> ResourcePlan:
        return _plan(scaling, share, placement)

    return planned(_largest_share(scaling, nodes, planned))


def rescaled(scaling: ScalingConfig, nodes: Sequence[Node], placement: Placement = "beside_rank") -> ScalingConfig:
    """The same processes, or as many as have a place on these nodes: first as many ranks as can be, then as many
    optimizers. If there is no place for one of each, the config as it is."""
    for workers in range(scaling.num_workers, 0, -1):
        for optimizers in range(scaling.num_optimizers, 0, -1):
            fewer = scaling.replace(num_workers=workers, num_optimizers=optimizers)
            if missing_resources(plan_resources(fewer, nodes, placement), nodes) is None:
                return fewer
    return scaling


def plan_optimizers(scaling: ScalingConfig) -> ResourcePlan:
    """Shares for only the optimizer actors, packed together, for a run whose ranks another library places.
    ``cpus_per_optimizer`` is 1 if the config does not set it."""
    plan = _plan(scaling, 1.0, "packed")
    return replace(plan, num_workers=0, groups=tuple(group for group in plan.groups if group.rank is None))


def missing_resources(plan: ResourcePlan, nodes: Sequence[Node]) -> str | None:
    """What the nodes lack for the plan, and the setting to change; None when every group has a place."""
    if _fits(plan.groups, nodes):
        return None
    if plan.gpus > (gpus := sum(node.gpus for node in nodes)):
        need = f"{count(plan.gpus, 'GPU')} (scaling_config.use_gpu: 1 for each of {count(plan.num_workers, 'rank')})"
        return f"the run needs {need}, but the cluster has {gpus:g}; lower num_workers or set use_gpu=False"
    for group in plan.groups:
        if not any(matches(group.labels, node.labels) for node in nodes):
            return _no_such_node(group, nodes)
    if plan.cpus > (cpus := sum(node.cpus for node in nodes)):
        return f"the run needs {_cpu_demand(plan)}, but the cluster has {count(cpus, 'CPU')}; {_LOWER}"
    if plan.memory > (memory := sum(node.memory for node in nodes)):
        return f"the run needs {_memory_demand(plan)}, but the cluster has {format_bytes(int(memory))}; {_LESS_MEMORY}"
    together = "a rank and the optimizers beside it need one node" if _stand_together(plan) else "each needs one node"
    demand = _cpu_demand(plan) + (f" and {_memory_demand(plan)}" if plan.memory else "")
    return (
        f"the run needs {demand}, and {together}: no way to place {_groups_selector_text(plan)} on "
        f"{describe_nodes(nodes)}; {_LOWER}"
    )


def describe_nodes(nodes: Sequence[Node]) -> str:
    """``2 nodes (8 CPUs, 1 GPU; 4 CPUs)``: for error messages."""
    inside = "; ".join(
        count(node.cpus, "CPU") + (f", {count(node.gpus, 'GPU')}" if node.gpus else "") for node in nodes
    )
    return f"{count(len(nodes), 'node')} ({inside})"


def _no_such_node(group: ResourceGroup, nodes: Sequence[Node]) -> str:
    wanted = ",".join(f"{name}={condition}" for name, condition in group.labels.items())
    seen = sorted({f"{key}={value}" for node in nodes for key, value in node.labels.items() if key in group.labels})
    have = f"they carry {', '.join(seen)}" if seen else "none carries such a label"
    return (
        f"placement='cpu_nodes' puts optimizer actors on nodes with {wanted}, and the cluster's {len(nodes)} have "
        f"none: {have}; start nodes with ray start --labels={wanted}, set scaling_config.optimizer_labels, or use "
        "placement='packed'"
    )


def _stand_together(plan: ResourcePlan) -> bool:
    return any(len(group.shares) > 1 and group.strategy == "STRICT_PACK" for group in plan.groups)


def _cpu_demand(plan: ResourcePlan) -> str:
    return f"{count(plan.cpus, 'CPU')} {_each(plan, f'{plan.worker.cpus:g}', f'{plan.optimizer.cpus:g}')}"


def _memory_demand(plan: ResourcePlan) -> str:
    each = _each(plan, format_bytes(plan.worker.memory), format_bytes(plan.optimizer.memory))
    return f"{format_bytes(plan.memory)} of memory {each}"


def _each(plan: ResourcePlan, worker: str, optimizer: str) -> str:
    return f"({count(plan.num_workers, 'rank')} x {worker} + {count(plan.num_optimizers, 'optimizer')} x {optimizer})"


def _groups_selector_text(plan: ResourcePlan) -> str:
    def words(piece: tuple[Share, ...]) -> str:
        cpus, gpus, memory = _sum(piece)
        parts = [count(cpus, "CPU")] + [count(gpus, "GPU")] * bool(gpus) + [format_bytes(int(memory))] * bool(memory)
        return " and ".join(parts)

    return ", ".join(dict.fromkeys(words(piece) for group in plan.groups for piece in group.pieces()))


def _plan(scaling: ScalingConfig, share: float, placement: Placement) -> ResourcePlan:
    """The plan with ``share`` for CPU counts that the config does not set."""
    worker = _share(
        scaling.cpus_per_worker or share,
        scaling.threads_per_worker,
        gpus=int(scaling.use_gpu),
        memory=scaling.memory_per_worker,
    )
    optimizer = _share(
        scaling.cpus_per_optimizer or share, scaling.threads_per_optimizer, gpus=0, memory=scaling.memory_per_optimizer
    )
    return ResourcePlan(
        worker=worker,
        optimizer=optimizer,
        num_workers=scaling.num_workers,
        num_optimizers=scaling.num_optimizers,
        groups=tuple(_groups(scaling, worker, optimizer, placement)),
        bind_numa=scaling.bind_numa,
        cpus_are_set=scaling.cpus_per_optimizer is not None,
    )


def _groups(scaling: ScalingConfig, worker: Share, optimizer: Share, placement: Placement) -> Iterator[ResourceGroup]:
    beside = placement == "beside_rank"
    for rank in range(scaling.num_workers):
        own = tuple(range(rank, scaling.num_optimizers, scaling.num_workers)) if beside else ()
        shares = (worker, *(optimizer for _ in own))
        yield ResourceGroup(rank=rank, optimizers=own, shares=shares, strategy="STRICT_PACK")
    if not beside:
        everyone = tuple(range(scaling.num_optimizers))
        yield ResourceGroup(
            rank=None,
            optimizers=everyone,
            shares=tuple(optimizer for _ in everyone),
            strategy="PACK" if placement == "packed" else "SPREAD",
            labels={} if placement == "packed" else scaling.optimizer_labels,
        )


def _share(cpus: float, threads: int | None, *, gpus: int, memory: int | None) -> Share:
    return Share(cpus=round(cpus, 4), gpus=gpus, threads=threads or max(1, math.floor(cpus)), memory=memory or 0)


def _largest_share(scaling: ScalingConfig, nodes: Sequence[Node], planned: Callable[[float], ResourcePlan]) -> float:
    """The largest CPU share with which the groups fit; a node's CPUs split among 1, 2, ... processes are tried."""
    processes = range(1, scaling.num_workers + scaling.num_optimizers + 1)
    shares = {_round_down(node.cpus / count) for node in nodes for count in processes}
    left_open = scaling.num_workers * (scaling.cpus_per_worker is None)
    left_open += scaling.num_optimizers * (scaling.cpus_per_optimizer is None)
    cpus = sum(node.cpus for node in nodes)
    possible = [share for share in shares if share * left_open <= cpus + 1e-9]  # planning thousands of groups is slow
    fitting = (share for share in sorted(possible, reverse=True) if _fits(planned(share).groups, nodes))
    return next(fitting, 1.0)


def _round_down(cpus: float) -> float:
    """Whole CPUs, or hundredths of one below that; never 0."""
    return float(math.floor(cpus)) if cpus >= 1 else max(math.floor(cpus * 100) / 100, _LEAST_CPUS)


def _fits(groups: Iterable[ResourceGroup], nodes: Sequence[Node]) -> bool:
    """First fit, those with GPUs and labels first, then the largest: True when every piece has a node."""
    free = [[node.cpus, node.gpus, node.memory] for node in nodes]
    pieces = [(_sum(piece), group.labels) for group in groups for piece in group.pieces()]
    for (cpus, gpus, memory), labels in sorted(pieces, key=lambda p: (p[0][1], bool(p[1]), p[0]), reverse=True):
        for node, have in zip(nodes, free, strict=True):
            if have[0] + 1e-9 >= cpus and have[1] >= gpus and have[2] >= memory and matches(labels, node.labels):
                have[0], have[1], have[2] = have[0] - cpus, have[1] - gpus, have[2] - memory
                break
        else:
            return False
    return True


def _sum(piece: Sequence[Share]) -> tuple[float, int, int]:
    """CPUs, GPUs and bytes."""
    cpus = round(math.fsum(share.cpus for share in piece), 4)
    return cpus, sum(share.gpus for share in piece), sum(share.memory for share in piece)


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels meets every condition of a Ray label selector.

    A selector maps a label's name to a condition: ``"x"`` (is x), ``"!x"`` (is not x), ``"in(a, b)"`` (one of them),
    ``"!in(a, b)"`` (none of them). A node without the label meets only the two with ``!``, as in Ray."""
    return all(_meets(condition, labels.get(name)) for name, condition in selector.items())


def _meets(condition: str, value: str | None) -> bool:
    negated, condition = condition.startswith("!"), condition.removeprefix("!")
    if condition.startswith("in(") and condition.endswith(")"):
        wanted = {choice.strip() for choice in condition[3:-1].split(",")}
    else:
        wanted = {condition}
    return (value in wanted) is not negated


# ---- open files: [Note: open files] -----------------------------------------------------------------------------


def files_needed(
    members: Mapping[str, Member], num_ranks: int, num_owners: int, num_beside: int = 0, num_doors: int = 0
) -> dict[str, int]:
    """By process of a run, how many files it may have open at most. ``members``: ranks, owners alone in their
    processes (``num_owners``), and others, which only call these. ``num_beside``: owners beside ranks. ``num_doors``:
    the last of ``num_owners``, which have no shards."""
    ranks = {rank_name(rank) for rank in range(num_ranks)}
    owners = {optimizer_name(owner) for owner in range(num_owners)}
    doors = {optimizer_name(owner) for owner in range(num_owners - num_doors, num_owners)}
    here = Counter(member.node for who, member in members.items() if who in ranks | owners)
    ranks_on = Counter(member.node for who, member in members.items() if who in ranks)
    unknown = len(ranks - set(members))  # started by another library, on any node

    def needed(who: str) -> int:
        if who not in ranks | owners:
            return PROCESS + _CALLS_OF_RAY * (num_ranks + num_owners)
        neighbours = here[members[who].node] - 1
        ranks_here = ranks_on[members[who].node] + unknown
        if who in doors:
            return files_of_door(num_ranks, num_owners, neighbours + unknown, num_doors, ranks_here)
        of_owner = files_of_owner(num_ranks, num_owners + num_beside, neighbours, num_doors, ranks_here)
        if who in owners:
            return of_owner
        return files_of_rank(num_owners + num_beside, neighbours, num_doors) + (of_owner if num_beside else 0)

    return {who: needed(who) for who in members}


def too_few_files(
    members: Mapping[str, Member], num_ranks: int, num_owners: int, num_beside: int = 0, num_doors: int = 0
) -> str | None:
    """Why a run cannot have so many ranks and owners: the process that lacks most, and what to do; None: it can. What a
    process may open is not looked at if it has not said that. The arguments are those of ``files_needed``."""
    needed = files_needed(members, num_ranks, num_owners, num_beside, num_doors)
    lacks = {
        who: needed[who] - member.open_files
        for who, member in members.items()
        if member.open_files is not None and member.open_files < needed[who]
    }
    if not lacks:
        return None
    who = max(lacks, key=lambda each: lacks[each])
    others = f" (and {count(len(lacks) - 1, 'more process', 'more processes')})" if len(lacks) > 1 else ""
    opened = count(members[who].open_files or 0, "file")
    run = f"{count(num_ranks, 'rank')} and {count(num_owners + num_beside, 'optimizer')}"
    return (
        f"{who} on node {members[who].host} may have {opened} open, connections included{others}, "
        f"but with {run} it may need {needed[who]:,}; raise the hard limit of open files on that node (ulimit -Hn, "
        "LimitNOFILE, docker --ulimit nofile) and start Ray there again, or use fewer ranks or optimizers"
    )


PROCESS = 192
"""Of a process alone: Ray's, gRPC's and torch's own (about 60), exporter, trace, checkpoint, the loop's data."""
_LINKS = 2  # one that has broken, which the other end may not have noticed, and the next one; or those of two epochs
_CALLS = 1  # gRPC's connection
_WAKES = 1  # an eventfd, for each link of a rank, a door or the lead
_OF_A_LINE = 1 + 1  # of a rank of the host to an owner on another one: its memory, the rank's pidfd
_TO_SHARDS = 1  # over which an owner takes shards from another one
_OF_A_NEIGHBOUR = 1 + 4  # a process on the same host: its pidfd, its slabs in two epochs


def tensor_connections(num_owners: int) -> int:
    """The connections for tensors that one rank has with each of some owners."""
    return min(CONNECTIONS, most_transfers(num_owners))


def files_of_owner(num_ranks: int, num_owners: int, neighbours: int, num_doors: int = 0, ranks_here: int = 0) -> int:
    """Of an optimizer actor with shards, which may lead."""
    from_ranks = num_ranks * _LINKS * (_CALLS + tensor_connections(num_owners))
    as_the_lead, from_the_lead = num_owners * _LINKS * (_CALLS + _WAKES), _LINKS * _CALLS
    shards = (num_owners - num_doors) * 2 * _TO_SHARDS  # given and taken
    others = num_owners - 1 if neighbours < num_ranks + num_owners - 1 else 0  # on other hosts, at most
    as_a_door = max(0, others - num_doors) * _of_a_door(ranks_here)
    from_doors = others * _LINKS * (_CALLS + DOOR_TRANSFERS)
    own = PROCESS + ENTERING + as_the_lead + from_the_lead + shards + neighbours * _OF_A_NEIGHBOUR
    return own + from_ranks + as_a_door + from_doors


def _of_a_door(ranks_here: int) -> int:
    """What the door of a host has for each owner on another one: its link, which its ranks' calls use, too, and the
    ranks' lines."""
    return _LINKS * (_CALLS + DOOR_TRANSFERS + _WAKES + ranks_here * _OF_A_LINE)


def files_of_door(num_ranks: int, num_owners: int, neighbours: int, num_doors: int, ranks_here: int = 0) -> int:
    """Of an optimizer actor without shards."""
    here = min(num_ranks, neighbours)
    asking = (num_ranks - here) * _CALLS  # for its host
    from_ranks = here * _LINKS * (_CALLS + tensor_connections(num_owners)) + asking
    links = (num_owners - num_doors) * _of_a_door(ranks_here)
    return PROCESS + ENTERING + _LINKS * _CALLS + from_ranks + links + neighbours * _OF_A_NEIGHBOUR


def files_of_rank(num_owners: int, neighbours: int, num_doors: int = 0) -> int:
    """Of a rank, which has links to the owners with shards and to its host's door. It asks every door once for its
    host."""
    others = max(0, num_doors - 1)
    links = (num_owners - others) * _LINKS * (_CALLS + tensor_connections(num_owners) + _WAKES)
    return PROCESS + links + others * (_CALLS + _WAKES) + neighbours * _OF_A_NEIGHBOUR


def most_ranks(limit: int, num_owners: int) -> int:
    """With how many ranks an optimizer actor gets along that may have ``limit`` files open, and shares its host with
    the other owners."""
    with_one, with_two = (files_of_owner(ranks, num_owners, num_owners - 1) for ranks in (1, 2))
    return max(0, 1 + (limit - with_one) // (with_two - with_one))
