"""Simulates a planned run's step: what the bound leaves out, from queues and latencies to the order of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from lab.simulation.cluster import Run, Simulated, simulate
from lab.simulation.machines import Costs, Measured, Options, Transport
from lab.simulation.ranks import Compute
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.errors import ConfigError
from rayzero.layout.model_layout import ModelLayout
from rayzero.plan.bound import StepTraffic, step_traffic
from rayzero.plan.hardware import Hardware
from rayzero.plan.tiers import hosts_of_owners, hosts_of_ranks, summed_groups
from rayzero.plan.work import Work

__all__ = ["simulate_step"]


def simulate_step(
    layout: ModelLayout,
    root: Collection[int],
    work: Work,
    zero: ZeroConfig,
    scaling: ScalingConfig,
    hardware: Hardware,
    measured: Measured,
    *,
    state_bytes: float,
    splits: bool,
) -> Simulated:
    """Simulate a step on these hosts. measured: kernels and RayZero's own code; speeds of the hosts are the plan's. A
    unit computes by its share of the elements, at the hosts' peak. Between hosts bytes are encrypted, as by default.
    state_bytes: of the optimizer's states, per element. splits: see ``plan_owner``.
    Raises ConfigError if costs of the transport were not measured, UnsupportedError for what cannot be simulated."""
    hosts = hardware.hosts
    ranks, owners = tuple(hosts_of_ranks(scaling, hosts)), tuple(hosts_of_owners(zero, scaling, hosts))
    traffic = step_traffic(layout, work, zero, scaling, state_bytes=state_bytes, splits=splits)
    alone = len({*ranks, *owners}) == 1
    transport: Transport = "shm" if zero.shared_directory is not None else "grpc"
    machine = replace(
        measured.machine,
        memory=hardware.memory,
        network=hardware.network,
        link=hardware.link,
        owner_threads=scaling.threads_per_optimizer or measured.machine.owner_threads,
        gpus=hosts.on_gpu,
    )
    run = Run(
        layout=layout,
        root=frozenset(root),
        zero=zero,
        compute=_compute(layout, work, hardware.flops),
        rank_hosts=ranks,
        owner_hosts=owners,
        machine=machine,
        costs=_costs(measured, transport if alone else "grpc"),
        options=Options(
            transport=transport,
            encrypted=not alone,
            compute_threads=machine.cores,
            fetch_once_per_host=zero.shared_directory is not None,
            ask_once_per_host=zero.shared_directory is not None,
            push_once_per_host=_all_add_up(ranks, zero, traffic),
        ),
        state_bytes=state_bytes,
        part_s=measured.part_s,
    )
    return simulate(run)


def _all_add_up(ranks: Sequence[int], zero: ZeroConfig, traffic: StepTraffic) -> bool:
    """Whether all ranks of hosts that have several add up their gradients before these travel. ``ranks``:
    their hosts."""
    groups, here = summed_groups(ranks, zero, traffic.gradients), Counter(ranks)
    return all(sum(map(len, groups[host])) == count for host, count in here.items() if count > 1)


def _costs(measured: Measured, transport: Transport) -> Costs:
    if transport not in measured.costs:
        raise ConfigError(
            f"the figures have no costs of {transport}; measure them: python -m lab simulation --save FILE"
        )
    return measured.costs[transport]


def _compute(layout: ModelLayout, work: Work, speed: float) -> Compute:
    total = sum(unit.numel for unit in layout.units)
    shares = [unit.numel / total for unit in layout.units]
    return Compute(
        forward=tuple(share * work.forward_flops / speed for share in shares),
        backward=tuple(share * work.backward_flops / speed for share in shares),
    )
