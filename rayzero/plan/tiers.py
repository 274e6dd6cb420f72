"""Bytes of a run, per process, per host and per phase of a step. Pure arithmetic over a layout.

::

    device of a rank   gathered parameters (within gpu_param_memory_budget) + buffers + what one micro-batch keeps live
    host of a rank     staging between device and owners in other processes (none where memory is shared) + activations
                       that wait for their backward
    owner              published parameters, masters, moments, every rank's gradients (memory/planner.py)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rayzero.codecs.record import kept_bytes
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.errors import MemoryPlanError
from rayzero.kernels.rank_sum import summed_with
from rayzero.layout.model_layout import ModelLayout, Shard
from rayzero.layout.shard_map import ShardMap, shard_map_for
from rayzero.memory.planner import OwnerPlan, check_budget, plan_owner
from rayzero.memory.pool import buffer_bytes
from rayzero.plan.hardware import Hardware, Hosts
from rayzero.plan.work import Work
from rayzero.protocol.gradient_sum import adds_up, gradient_dtype
from rayzero.protocol.ownership import device_owners
from rayzero.quantities import count, format_bytes
from rayzero.store.host.host_sums import AT_ONCE
from rayzero.store.shm.words import GradientBytes

FP32 = 4  # bytes
_PRODUCT = 10  # bytes an element of a shard: a device has a matrix, its product, two smaller ones and what is added; a
# rank's host two shards, each in its memory and on its way, and one page-locked


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Bytes of a run's processes before they hold anything of the run."""

    rank: int  # heaps and stacks of a rank
    owner: int  # of an optimizer actor
    coordinator: int
    files: int  # code of libraries, shared by all processes of a host

    def of_host(self, ranks: int, owners: int, coordinators: int = 0) -> int:
        """Bytes of all programs on one host, at most: as if each had its own imports. Those of a run on Ray share most
        of theirs with their fork server (cluster/nodes)."""
        programs = ranks * self.rank + owners * self.owner + coordinators * self.coordinator
        return programs + (self.files if ranks + owners + coordinators else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """What one rank has on its device."""

    parameters: int  # the most that is gathered at any time
    buffers: int
    leaving: int  # gradients that wait for their copies to the host's memory for gradients, on a GPU gathered for them
    sums: int  # offload_grads=False: gradients summed in fp32
    states: int  # offload_fraction < 1: its part of masters and optimizer states
    forward: int  # more than those, at the forward's peak
    backward: int
    products: int = 0  # matrix_updates="rank": one shard's, beside the forward

    @property
    def waiting(self) -> int:
        """Of the peak: what is there only where copies are slower than the backward."""
        return self.peak - replace(self, leaving=0).peak

    @property
    def resting(self) -> int:
        """Between steps."""
        return self.parameters + self.buffers + self.states

    @property
    def peak(self) -> int:
        """At the highest point of a step."""
        return self.resting + self.sums + self.products + self._computing

    @property
    def _computing(self) -> int:
        """Activations and gradients. Sums on the device leave when the last backward has ended."""
        return max(self.forward, self.leaving, self.backward + (0 if self.sums else self.leaving))

    def describe(self) -> str:
        """The sum, term by term, for people."""
        terms = {
            "gathered parameters": self.parameters,
            "buffers": self.buffers,
            "masters and states": self.states,
            "gradient sums": self.sums,
            "products for owners": self.products,
            "activations and gradients": self._computing,
        }
        return f"{format_bytes(self.peak)} = " + " + ".join(f"{k} {format_bytes(v)}" for k, v in terms.items() if v)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """The memory that a run's processes take on one host."""

    host: int
    ranks: int
    owners: int
    shared: int  # of the sum: in slab_dir, where owners and ranks of this host share memory
    owner_bytes: int
    staging: int  # of its ranks
    activations: int  # of its ranks: those that wait here for their backward
    compute: int  # of its ranks, where they compute on CPUs: buffers, activations, gradients
    programs: int  # of its processes, without the run's data
    coordinator: bool  # whether the run's coordinator is here
    waiting: int = 0  # of ``compute``: gradients, where copies are slower than the backward
    kept: int = 0  # its ranks' gradients for owners on other hosts; ``shared`` includes them
    beside: int = 0  # owners beside its ranks (offload_fraction < 1); owner_bytes includes their bytes here
    doors: int = 0  # 1: an optimizer actor without shards, for its ranks, which have no other owner
    copied: int = 0  # parameters of owners on other hosts, once for its ranks; ``shared`` includes them. The run does
    # without them where there is no room

    @property
    def _beside(self) -> str:
        return f" and {count(self.beside, 'owner')} beside ranks" if self.beside else ""

    @property
    def of_ranks(self) -> int:
        """What its ranks take besides their programs."""
        return self.staging + self.kept + self.activations + self.compute

    @property
    def total(self) -> int:
        """All of it."""
        return self.owner_bytes + self.of_ranks + self.copied + self.programs

    def describe(self) -> str:
        """The sum, term by term, for people."""
        terms = {
            f"{count(self.owners, 'optimizer actor')}" + self._beside: self.owner_bytes,
            "staging": self.staging,
            "gradients for owners elsewhere": self.kept,
            "parameters of other hosts": self.copied,
            "offloaded activations": self.activations,
            f"{count(self.ranks, 'rank')} computing": self.compute,
            f"{count(self.ranks + self.owners + self.doors + self.coordinator, 'program')}": self.programs,
        }
        return f"{format_bytes(self.total)} = " + " + ".join(f"{k} {format_bytes(v)}" for k, v in terms.items() if v)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBytes:
    """All of a run's bytes."""

    device: DeviceBytes  # of every rank
    owners: tuple[OwnerPlan, ...]
    hosts: tuple[HostBytes, ...]  # hosts that have a process of the run

    @property
    def doors(self) -> list[int]:
        """The hosts of optimizer actors without shards, whose numbers follow those of ``owners``."""
        return [host.host for host in self.hosts if host.doors]

    def to_json(self) -> dict[str, Any]:
        """As plain values, sums included."""
        return {
            "device": asdict(self.device) | {"resting": self.device.resting, "peak": self.device.peak},
            "owners": [asdict(owner) | {"total": owner.total} for owner in self.owners],
            "hosts": [asdict(host) | {"total": host.total} for host in self.hosts],
        }


def plan_bytes(
    layout: ModelLayout,
    work: Work,
    zero: ZeroConfig,
    scaling: ScalingConfig,
    hosts: Hosts,
    *,
    state_bytes: float | Callable[[Shard], int],
    splits: bool,
    programs: Programs,
    measures_norms: bool = False,
    update_work: Sequence[int] | None = None,
    products: Collection[int] = (),
) -> RunBytes:
    """Sum up a run on these hosts. state_bytes, splits: see ``plan_owner``. update_work: by which shards are
    balanced, see protocol/products.py. products: shards whose matrices ranks multiply. measures_norms: owners measure
    norms by layer group. The coordinator is on the first host."""
    ranks = hosts_of_ranks(scaling, hosts)
    beside = device_owners(scaling.num_workers, zero.host_fraction)
    owners = hosts_of_owners(zero, scaling, hosts) + ranks[:beside]
    shards = shard_map_for(
        layout,
        len(owners),
        zero.shard_map,
        num_device_owners=beside,
        offload_fraction=zero.host_fraction,
        work=update_work,
    )
    accumulation = zero.gradient_accumulation_steps if zero.offload_grads else 1
    with_ranks, shared = set(ranks), zero.shared_directory is not None
    summed = summed_groups(ranks, zero, GradientBytes.of(layout.units, accumulation))
    plans = tuple(
        plan_owner(
            layout,
            shards,
            owner,
            scaling.num_workers,
            accumulation,
            state_bytes=state_bytes,
            splits=splits,
            own_gradients=shared and with_ranks == {owners[owner]},
            measures_norms=measures_norms,
            copies=zero.checkpoint_copies,
            products=products,
        )
        for owner in range(len(owners))
    )
    ranks_of, plans_of = Counter(ranks), defaultdict[int, list[OwnerPlan]](list)
    largest = max((layout.shards[shard].numel for shard in products), default=0)
    device = _device_bytes(layout, work, zero, hosts, max(plan.on_device for plan in plans), _PRODUCT * largest)
    for plan, host in zip(plans, owners, strict=True):
        plans_of[host].append(plan)
    each = tuple(
        _host_bytes(
            host,
            ranks_of[host],
            plans_of[host],
            owners,
            beside,
            layout,
            shards,
            work,
            device,
            zero,
            hosts,
            programs,
            adds=adds_up(scaling.num_workers, accumulation),
            sums=len(summed[host]),
        )
        for host in sorted({*ranks, *owners})
    )
    return RunBytes(device=device, owners=plans, hosts=each)


def summed_groups(
    hosts_of: Sequence[int], zero: ZeroConfig, gradients: GradientBytes
) -> defaultdict[int, set[tuple[int, ...]]]:
    """By host, the groups of ranks whose gradients leave it as one sum. ``hosts_of``: of the ranks."""
    here, found = defaultdict[int, set[int]](set), defaultdict[int, set[tuple[int, ...]]](set)
    for rank, host in enumerate(hosts_of):
        here[host].add(rank)
    for rank, host in enumerate(hosts_of if zero.pushes_for_host != "never" else ()):
        ranks = summed_with(rank, here[host])
        if ranks and (zero.host_push == "always" or gradients.sums_gain(len(ranks))):
            found[host].add(ranks)
    return found


def hosts_of_ranks(scaling: ScalingConfig, hosts: Hosts) -> list[int]:
    """Rank -> its host. Ranks fill one host's GPUs after another's; on CPUs they are placed round robin."""
    if not hosts.on_gpu:
        return [rank % hosts.count for rank in range(scaling.num_workers)]
    return [min(rank // hosts.gpus_each, hosts.count - 1) for rank in range(scaling.num_workers)]


def hosts_of_owners(zero: ZeroConfig, scaling: ScalingConfig, hosts: Hosts) -> list[int]:
    """Owner -> its host: beside its rank, or (packed, cpu_nodes) on the last hosts, which ranks fill last."""
    ranks = hosts_of_ranks(scaling, hosts)
    if zero.placement == "beside_rank":
        return [ranks[owner % len(ranks)] for owner in range(scaling.num_optimizers)]
    spread = hosts.count if zero.placement == "cpu_nodes" else 1
    return [hosts.count - 1 - owner % spread for owner in range(scaling.num_optimizers)]


def _device_bytes(
    layout: ModelLayout, work: Work, zero: ZeroConfig, hosts: Hosts, states: int, products: int
) -> DeviceBytes:
    sizes = [buffer_bytes(unit.size_bytes) for unit in layout.units]
    trained = sum(unit.numel for unit in layout.units if unit.trainable)
    return DeviceBytes(
        parameters=_gathered(sizes, zero.gpu_param_memory_budget),
        buffers=work.buffer_bytes,
        leaving=_leaving(layout) if hosts.on_gpu or zero.offload_grads else 0,
        sums=0 if zero.offload_grads else trained * FP32,
        states=states,
        forward=work.forward_peak_bytes,
        backward=work.backward_peak_bytes,
        products=products,
    )


def _gathered(sizes: Sequence[int], budget: int) -> int:
    """The most bytes of units that are up at once, if they are used in order and then in reverse. If there is no room,
    the unit whose next use is farthest away is resharded (engine/units/unit_cache.py)."""
    if sum(sizes) <= budget:
        return sum(sizes)
    last = 2 * len(sizes) - 1
    up: set[int] = set()
    used = peak = 0
    for at in range(last + 1):
        unit = min(at, last - at)
        used += 0 if unit in up else sizes[unit]
        up.add(unit)
        while used > budget and len(up) > 1:
            gone = max(up - {unit}, key=lambda other: _next_use(other, at, last))
            up.remove(gone)
            used -= sizes[gone]
        peak = max(peak, used)
    return peak


def _next_use(unit: int, at: int, last: int) -> int:
    """The number of the unit's next use after ``at``. Uses are numbered: forward ``unit``, backward ``last - unit``,
    the next forward ``last + 1 + unit``."""
    return next(use for use in (unit, last - unit, last + 1 + unit) if use > at)


def _host_bytes(
    host: int,
    num_ranks: int,
    own: Sequence[OwnerPlan],
    owners: Sequence[int],
    beside: int,
    layout: ModelLayout,
    shard_map: ShardMap,
    work: Work,
    device: DeviceBytes,
    zero: ZeroConfig,
    hosts: Hosts,
    programs: Programs,
    *,
    adds: bool,
    sums: int,
) -> HostBytes:
    """num_ranks, own: on this host. owners: all of the run's, of which the last ``beside`` run beside ranks. adds: a
    single rank adds its gradients up. sums: of ranks' gradients, which leave the host as one."""
    shares = zero.shared_directory is not None
    actors = sum(plan.owner < len(owners) - beside for plan in own)
    doors = int(shares and num_ranks > 0 and not own)
    ours = {shard for plan in own for shard in shard_map.shards_of(plan.owner)}
    others = [(layout.units[s.unit], s) for s in layout.shards if shares and num_ranks and s.index not in ours]
    copied = sum(kept_bytes(unit, shard) for unit, shard in others)
    sent = sum(shard.numel * gradient_dtype(unit, adds).itemsize for unit, shard in others if unit.trainable)
    apart = not shares or len(own) < len(owners)  # some bytes come through this process
    decoded = sum(buffer_bytes(unit.size_bytes) for unit in layout.units if unit.is_coded)  # into memory of the rank
    copies = apart and not copied  # of all that a rank on a CPU computes with
    parameters = 0 if hosts.on_gpu else device.parameters if copies else min(device.parameters, decoded)
    compute = 0 if hosts.on_gpu else parameters + device.peak - device.parameters
    arriving = device.parameters if hosts.on_gpu else 0
    staging = num_ranks * (device.products + (_leaving(layout) + arriving if apart else 0))  # pushes in flight, fetches
    # for a device, products of two shards
    kept, shared = num_ranks * sent, sum(plan.total - plan.staging - plan.private for plan in own) if shares else 0
    return HostBytes(
        host=host,
        ranks=num_ranks,
        owners=actors,
        shared=shared + copied + kept,
        owner_bytes=sum(plan.total for plan in own),
        staging=staging + (sums * AT_ONCE * FP32 * _most_elements(layout) if kept else 0),
        activations=num_ranks * work.offloaded_host_bytes,
        compute=num_ranks * compute,
        waiting=0 if hosts.on_gpu else num_ranks * device.waiting,
        kept=kept,
        beside=len(own) - actors,
        doors=doors,
        copied=copied,
        programs=programs.of_host(num_ranks, actors + doors, coordinators=host == 0),
        coordinator=host == 0,
    )


def _most_elements(layout: ModelLayout) -> int:
    """Of the largest trained unit, of which a host's door may have sums in memory (store/host/host_sums.py)."""
    return max((unit.numel for unit in layout.units if unit.trainable), default=0)


def _leaving(layout: ModelLayout) -> int:
    """The most bytes of pushes in flight (engine/units/transfers.py)."""
    return 2 * max((buffer_bytes(unit.size_bytes) for unit in layout.units if unit.trainable), default=0)


def check_budgets(run: RunBytes, zero: ZeroConfig) -> None:
    """Raise MemoryPlanError, with the sum, if an owner needs more than ``cpu_memory_budget``, where that is set."""
    if (budget := zero.cpu_memory_budget) is not None:
        for owner in run.owners:
            check_budget(owner, budget)


def check_window(layout: ModelLayout, root: Collection[int], zero: ZeroConfig) -> None:
    """Raise MemoryPlanError if ``gpu_param_memory_budget`` has no room for the root's units and the largest other one,
    which a forward uses at once. root: numbers of units."""
    sizes = [buffer_bytes(unit.size_bytes) for unit in layout.units]
    own = sum(sizes[unit] for unit in root)
    needed = own + max((size for unit, size in enumerate(sizes) if unit not in root), default=0)
    budget = zero.gpu_param_memory_budget
    if needed > budget:
        raise MemoryPlanError(
            f"zero.gpu_param_memory_budget is {count(budget, 'byte')}, but a forward uses the root unit ({own:,} "
            f"bytes) and one more (up to {needed - own:,}) at once; set it to at least {needed:,}"
        )


def check_fits(run: RunBytes, hardware: Hardware) -> None:
    """Raise MemoryPlanError, with the sum and the setting to change, if a device or a host is too small."""
    if hardware.device_bytes is not None and run.device.peak > hardware.device_bytes:
        raise MemoryPlanError(
            f"a rank needs {run.device.describe()} on its GPU, which has {format_bytes(hardware.device_bytes)}; lower "
            "zero.gpu_param_memory_budget, batch_size or seq_len, set zero.offload_activations, or use activation "
            "checkpointing"
        )
    for host in run.hosts:
        if host.total - host.copied > hardware.host_bytes:
            raise MemoryPlanError(
                f"host {host.host} needs {host.describe()}, but has {format_bytes(hardware.host_bytes)}; use more "
                f"hosts, fewer ranks on each, or precision='bf16'"
            )
        if host.shared - host.copied > hardware.shm_bytes:
            raise MemoryPlanError(
                f"host {host.host} needs {format_bytes(host.shared)} of shared memory, but zero.slab_dir has room "
                f"for {format_bytes(hardware.shm_bytes)}; set slab_dir to a directory with more room, "
                f"transport='grpc' or host_push='never'"
            )
