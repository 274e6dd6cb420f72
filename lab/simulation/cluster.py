"""A whole run in simulated time: who runs where, some steps of it, and what they took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.simulation.fluid import Fluid
from lab.simulation.groups import group, parts_of
from lab.simulation.lead import Lead
from lab.simulation.machines import Costs, Machine, Options
from lab.simulation.owners import Owners, Update
from lab.simulation.program import record_steps
from lab.simulation.ranks import Compute, Ranks
from lab.simulation.resources import Resources
from rayzero.config import ZeroConfig
from rayzero.errors import ConfigError, RunFailedError, UnsupportedError
from rayzero.layout.model_layout import ModelLayout
from rayzero.layout.shard_map import ShardMap, shard_map_for
from rayzero.protocol.gradient_sum import has_totals
from rayzero.protocol.messages import ModelSpec
from rayzero.quantities import count

__all__ = ["Run", "Simulated", "simulate"]

_HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is simulated."""

    layout: ModelLayout
    root: frozenset[int]  # units of the root module
    zero: ZeroConfig
    compute: Compute
    rank_hosts: tuple[int, ...]  # rank -> host
    owner_hosts: tuple[int, ...]
    machine: Machine
    costs: Costs
    options: Options
    state_bytes: float = 8.0  # of the optimizer's states, per element
    part_s: float = 0.0  # seconds of the lead for each part of a norm
    unread: frozenset[int] = frozenset()  # units whose parameters no backward reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What the last simulated step took; seconds and bytes."""

    seconds: float
    waits: dict[str, float]  # of the slowest rank, by cause
    bound: float  # the busiest resource of the step alone
    binds: str  # that resource
    busy: dict[str, float]  # by resource: what was taken of it over what it has, in the step
    lead: float  # share of the step in which the lead handles messages
    lead_messages: int
    fetched: int  # by one rank, from owners, over streams
    pushed: int
    kinds: int  # of hosts
    events: int = field(compare=False)

    def to_json(self) -> dict[str, Any]:
        """As plain values, with the eight busiest resources."""
        busiest = sorted(self.busy.items(), key=lambda pair: -pair[1])[:8]
        return asdict(self) | {"busy": dict(busiest), "of_bound": self.of_bound}

    @property
    def of_bound(self) -> float:
        """The step over its bound."""
        return self.seconds / self.bound if self.bound else math.inf


def simulate(run: Run, *, steps: int = 3, full: bool = False, resolution: float = 0.0) -> Simulated:
    """Simulate so many steps, and describe the last one.

    full: every rank, owner and host by itself, instead of one of each kind. resolution: see ``Fluid``. Raises
    ConfigError or UnsupportedError, with the setting, for what cannot be simulated."""
    _check(run, steps)
    program = record_steps(run.layout, run.root, run.zero, unread=run.unread)
    shards = shard_map_for(run.layout, len(run.owner_hosts), run.zero.shard_map)
    resources = _resources(run, shards, full=full)
    groups = resources.groups
    fluid = Fluid(resources.capacities, resolution=resolution)
    pushes = run.zero.gradient_accumulation_steps if run.zero.offload_grads else 1
    owners = _owners(run, fluid, resources, pushes)
    lead = Lead(fluid, resources, _spec(run), shards, owners, pushes, run.part_s)
    marks: list[_Mark] = []
    ranks = [
        Ranks(
            fluid,
            resources,
            which,
            run.layout,
            owners,
            run.compute,
            program,
            overlaps=_overlaps(run),
            finish=lead.finish,
            ended=(lambda: marks.append(_Mark.of(fluid, lead, ranks[0]))) if which == 0 else None,
        )
        for which in range(len(groups.ranks))
    ]
    for each in ranks:
        each.start(steps)
    fluid.run()
    if len(marks) != steps:
        raise RunFailedError(
            f"the simulated ranks ended {len(marks)} of {count(steps, 'step')}: nothing was left to happen"
        )
    return _describe(run, resources, ranks, marks, fluid.events)


@dataclass(frozen=True, slots=True)
class _Mark:
    """What was taken so far when the first group of ranks ended a step."""

    used: Sequence[float]
    lead: float
    messages: float
    fetched: int
    pushed: int

    @classmethod
    def of(cls, fluid: Fluid, lead: Lead, ranks: Ranks) -> _Mark:
        return cls(fluid.used.tolist(), lead.line.seconds, lead.messages, ranks.fetched, ranks.pushed)


def _check(run: Run, steps: int) -> None:
    if steps < 2:
        raise ConfigError(f"steps is {steps} but must be at least 2: the first one has nothing to wait for")
    if run.zero.host_fraction < 1:
        raise UnsupportedError(
            f"zero.offload_fraction is {run.zero.host_fraction:g}, but only 1 can be simulated: owners beside ranks "
            "use the ranks' devices"
        )
    if run.options.transport == "inproc" and len({*run.rank_hosts, *run.owner_hosts}) > 1:
        raise ConfigError('transport is "inproc", so ranks and owners must be on one host; use "shm" or "grpc"')
    if run.zero.wire_compression != "none" or run.zero.cpu_compression.value != "none":
        raise UnsupportedError("only wire_compression and cpu_compression none can be simulated; leave them out")
    lengths = {len(run.compute.forward), len(run.compute.backward), len(run.layout.units)}
    if len(lengths) > 1:
        raise ConfigError(
            f"compute has seconds for {sorted(lengths)} of the layout's units, but must have as many as the layout"
        )


def _resources(run: Run, shards: ShardMap, *, full: bool) -> Resources:
    def of(full: bool) -> Resources:
        groups = group(parts_of(run.layout, shards), run.rank_hosts, run.owner_hosts, full=full)
        return Resources(groups, run.machine, run.costs, run.options)

    alike = of(False)
    if full and alike.does_once():
        raise UnsupportedError("what a host does once is simulated with one rank of each kind alone; leave full out")
    return of(True) if full else alike


def _overlaps(run: Run) -> bool:
    """Whether the update runs beside the next forward; see ``Engine``."""
    return run.zero.overlap == "forward" and run.zero.overlap_computation and run.options.transport != "inproc"


def _owners(run: Run, fluid: Fluid, resources: Resources, pushes: int) -> list[Owners]:
    ranks, once = resources.groups.ranks, run.options.push_once_per_host
    senders = len(run.rank_hosts)
    if once:
        senders = sum(resources.sums(each) * len(each.ranks) // each.each for each in ranks)
    sums = any(resources.adds_up(each) for each in ranks)
    total = has_totals(len(run.rank_hosts))
    update = Update(contributions=senders, state_bytes=run.state_bytes, sums=sums, total=total)
    scattered = run.options.transport == "inproc"
    return [
        Owners(fluid, resources, each, run.layout, update, expected=pushes * senders, early=not scattered)
        for each in resources.groups.owners
    ]


def _spec(run: Run) -> ModelSpec:
    return ModelSpec(
        run="simulated",
        layout=run.layout,
        world_size=len(run.rank_hosts),
        optimizer="torch.optim:AdamW",
        hyper=(_HYPER,),
        group_of=tuple((0,) * len(unit.slots) for unit in run.layout.units),
        accumulation_steps=run.zero.gradient_accumulation_steps,
        shard_map=run.zero.shard_map,
    )


def _describe(run: Run, resources: Resources, ranks: Sequence[Ranks], marks: Sequence[_Mark], events: int) -> Simulated:
    before, after = marks[-2:]
    slowest = max(ranks, key=lambda each: each.times[-1].ended)
    last = slowest.times[-1]
    seconds = last.ended - slowest.times[-2].ended
    busy = {
        name: (now - then) / capacity
        for name, now, then, capacity in zip(
            resources.names, after.used, before.used, resources.capacities, strict=True
        )
        if not math.isinf(capacity)
    }
    busy |= _alone(run, resources)
    binds = max(busy, key=lambda name: busy[name])
    return Simulated(
        seconds=seconds,
        waits=dict(last.waits),
        bound=busy[binds],
        binds=binds,
        busy=busy,
        lead=(after.lead - before.lead) / seconds,
        lead_messages=round(after.messages - before.messages),
        fetched=after.fetched - before.fetched,
        pushed=after.pushed - before.pushed,
        kinds=len(resources.groups.hosts),
        events=events,
    )


def _alone(run: Run, resources: Resources) -> dict[str, float]:
    """The least seconds of what only one rank uses: its own computing, and the link of its GPU."""
    passes = run.zero.gradient_accumulation_steps
    found = {"computing of a rank": passes * (sum(run.compute.forward) + sum(run.compute.backward))}
    if run.machine.gpus:
        trained = sum(unit.size_bytes for unit in run.layout.units if unit.trainable)
        found["link of a rank"] = trained / run.machine.link
    return found
