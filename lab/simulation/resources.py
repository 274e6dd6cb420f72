"""What works take of hosts: the table of resources, and the demands of moving, computing and updating."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.simulation.fluid import Demand
from lab.simulation.groups import Groups, OwnerGroup, RankGroup
from lab.simulation.machines import Costs, Machine, Moving, Options, Stream
from rayzero.errors import ConfigError
from rayzero.kernels.rank_sum import GROUP
from rayzero.layout.model_layout import UnitLayout
from rayzero.store.shm.words import adding_threads
from rayzero.store.wire.tensor_stream import moving_threads

__all__ = ["Load", "Resources"]

_OF_HOST = ("cores", "memory", "network out", "network in")
_FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Work: seconds alone, and what it takes meanwhile."""

    seconds: float
    demands: tuple[Demand, ...]


class Resources:
    """The resources of one host of each kind, and of one rank of each group.

    Knows who shares what; not when."""

    def __init__(self, groups: Groups, machine: Machine, costs: Costs, options: Options) -> None:
        self.groups, self.machine, self.costs, self.options = groups, machine, costs, options
        self._flows: dict[tuple[int, int, str], tuple[float, tuple[Demand, ...]]] = {}  # of each pair
        self.names = [f"{what} of host kind {kind}" for kind in range(len(groups.hosts)) for what in _OF_HOST]
        capacities = [machine.cores, machine.memory, machine.network, machine.network] * len(groups.hosts)
        streams = [f"{way} streams of rank group {i}" for i in range(len(groups.ranks)) for way in ("fetch", "push")]
        movers = [f"tensor threads of owner group {i}" for i in range(len(groups.owners))]
        self.names += streams + movers
        number, threads = float(self.streams_of_rank), float(moving_threads(int(machine.cores)))
        self.capacities: list[float] = [
            *capacities,
            *[number] * len(streams),
            *[threads] * len(movers),
        ]

    def of_host(self, what: str, kind: int) -> int:
        """The number of a host's resource."""
        return len(_OF_HOST) * kind + _OF_HOST.index(what)

    def streams(self, ranks: int, way: str) -> int:
        """The number of the streams of a rank of group ``ranks``."""
        return len(_OF_HOST) * len(self.groups.hosts) + 2 * ranks + ("fetch", "push").index(way)

    def movers(self, owners: OwnerGroup) -> int:
        """The number of the threads of an owner of a group that move bytes, one connection each."""
        before = len(_OF_HOST) * len(self.groups.hosts) + 2 * len(self.groups.ranks)
        return before + self.groups.owners.index(owners)

    @property
    def streams_of_rank(self) -> int:
        """The most streams of one rank in one direction; see ``transfer_threads``."""
        owners = sum(len(each.owners) for each in self.groups.owners)
        return min(self.options.most_streams, max(2, owners))

    # ---- what is done once for a host

    def share(self, ranks: RankGroup, way: str) -> float:
        """Of a part that each rank of a host needs, or has a gradient of, how much is counted for one rank: what
        the host's door moves for all of them is spread evenly."""
        if way == "fetch":
            return 1 / ranks.each if self.options.fetch_once_per_host else 1.0
        return self.sums(ranks) / ranks.each if self.options.push_once_per_host else 1.0

    def sums(self, ranks: RankGroup) -> int:
        """The sums that the ranks of a host send; see ``GROUP``."""
        return -(-ranks.each // GROUP)

    def pushed_itemsize(self, ranks: RankGroup, itemsize: int) -> int:
        """Bytes of a pushed element; ``itemsize``: of the gradient."""
        return _FP32 if self.adds_up(ranks) else itemsize

    def adds_up(self, ranks: RankGroup) -> bool:
        """Whether ranks of a host push a sum."""
        return self.options.push_once_per_host and ranks.each > 1

    def asks_once(self, ranks: RankGroup) -> bool:
        """Whether the door of a host asks the lead for its ranks."""
        return ranks.host != self.groups.lead and self.options.ask_once_per_host

    def does_once(self) -> bool:
        """Whether anything is done once for the ranks of a host."""
        options = self.options
        return options.fetch_once_per_host or options.push_once_per_host or options.ask_once_per_host

    def add_up(self, ranks: RankGroup, elements: int, itemsize: int) -> Load:
        """For each sum of a host, its door adds up gradients and writes an fp32 one."""
        read, written = ranks.each * elements * itemsize, self.sums(ranks) * elements * _FP32
        threads = self.sums(ranks) * adding_threads(int(self.machine.cores), ranks.each, on_gpu=self.machine.gpus)
        seconds = read / threads / self.machine.host_sum_core
        return Load(
            seconds,
            (
                (self.of_host("cores", ranks.host), float(threads)),
                (self.of_host("memory", ranks.host), (read + written) / seconds),
            ),
        )

    # ---- one process

    def compute(self, ranks: RankGroup, seconds: float, extra: float) -> Load:
        """A rank computes for ``seconds``, and its Python code for ``extra`` seconds of one core. On a GPU the code
        runs ahead, so that the longer of both counts."""
        cores = self.of_host("cores", ranks.host)
        if self.machine.gpus:
            both = max(seconds, extra)
            return Load(both, ((cores, ranks.each * extra / both),) if both else ())
        both = seconds + extra
        if not both:
            return Load(0.0, ())
        threads = (seconds * self.options.compute_threads + extra) / both
        memory = self.options.compute_memory * seconds / both
        return Load(
            both,
            ((cores, ranks.each * threads), (self.of_host("memory", ranks.host), ranks.each * memory)),
        )

    def aside(self, ranks: RankGroup) -> Load:
        """What a rank's other threads do for a unit beside moving its bytes."""
        return Load(self.costs.aside_s, ((self.of_host("cores", ranks.host), float(ranks.each)),))

    def gather(self, ranks: RankGroup, size: int) -> Load:
        """A rank's gradients are copied to host memory: by a thread, or over the link of its GPU."""
        memory = self.of_host("memory", ranks.host)
        if self.machine.gpus:
            return Load(size / self.machine.link, ((memory, ranks.each * self.machine.link),))
        speed = self.machine.copy_core
        return Load(
            size / speed, ((self.of_host("cores", ranks.host), float(ranks.each)), (memory, 2 * ranks.each * speed))
        )

    def to_device(self, ranks: RankGroup, unit: UnitLayout) -> Load:
        """A unit goes from host memory to a GPU."""
        speed = self.machine.link
        return Load(unit.size_bytes / speed, ((self.of_host("memory", ranks.host), ranks.each * speed),))

    def passes(
        self, owners: OwnerGroup, sizes: Sequence[tuple[float, float]], shards: int, threads: int | None = None
    ) -> Load:
        """An owner's threads read and write bytes in so many shards. ``sizes``: (bytes, bytes per second of a
        thread). ``threads``: None: all that it has."""
        threads = threads or self.machine.owner_threads
        moving = sum(size / (threads * core) for size, core in sizes)
        alone, size = shards * self.costs.shard_s, sum(size for size, _ in sizes)
        seconds = moving + alone
        if not seconds:
            return Load(0.0, ())
        cores = (threads * moving + alone) / seconds
        return Load(
            seconds,
            (
                (self.of_host("cores", owners.host), owners.each * cores),
                (self.of_host("memory", owners.host), owners.each * size / seconds),
            ),
        )

    def questions(self, ranks: RankGroup) -> tuple[int, int]:
        """What a group asks the lead in one round, or is answered: (messages, ranks whose questions are in them)."""
        number = len(ranks.ranks)
        return (number // ranks.each, number) if self.asks_once(ranks) else (number, 0)

    def messages(self, number: float, asking: int = 0) -> Load:
        """The lead takes or sends so many messages. ``asking``: ranks whose questions doors have put into them."""
        seconds = number * self.costs.message_s + asking * self.costs.asked_s
        return Load(seconds, ((self.of_host("cores", self.groups.lead), 1.0),))

    def listeners(self, ranks: RankGroup, number: int) -> int:
        """Notices with which an owner tells ``number`` of these ranks, which are on other hosts: one to each door."""
        return number // ranks.each if self.options.ask_once_per_host else number

    def notices(self, owners: OwnerGroup, number: int) -> Load:
        """Each owner of a group sends so many notices."""
        return Load(number * self.costs.told_s, ((self.of_host("cores", owners.host), float(owners.each)),))

    # ---- between two processes

    def stream(self, which: int, owners: OwnerGroup, size: int, way: str) -> Load:
        """Between a rank of group ``which`` and each owner of a group on another host, ``size`` bytes, one stream for
        each."""
        speed, demands = self._flow(which, owners, way)
        return Load(size / speed, demands)

    def _flow(self, which: int, owners: OwnerGroup, way: str) -> tuple[float, tuple[Demand, ...]]:
        """Bytes per second of such a stream alone, and what it takes meanwhile."""
        known = self._flows.get((which, id(owners), way))
        if known is not None:
            return known
        ranks, costs = self.groups.ranks[which], self._stream(way)
        others, callers = self.groups.remote(ranks, owners)
        share, outward, speed = self.share(ranks, way), way == "push", min(costs.speed, self.machine.network)
        at_rank = share * ranks.each * others * speed
        at_owner = share * owners.each * callers * speed
        demands = (
            *self._end(ranks.host, at_rank, costs.rank_byte_s, "network out" if outward else "network in"),
            *self._end(owners.host, at_owner, costs.owner_byte_s, "network in" if outward else "network out"),
            (self.streams(which, way), share * others),
            (self.movers(owners), share * callers),
        )
        return self._flows.setdefault((which, id(owners), way), (speed, demands))

    def loopback(self, which: int, owners: OwnerGroup, size: int, way: str) -> Load:
        """The same to each owner of the rank's own host, without shared memory."""
        ranks, costs = self.groups.ranks[which], self._stream(way)
        moved = ranks.each * owners.each * costs.speed
        return Load(
            size / costs.speed,
            (
                (self.of_host("cores", ranks.host), moved * (costs.rank_byte_s + costs.owner_byte_s)),
                (self.of_host("memory", ranks.host), moved * 2 * self.costs.touches),
                (self.streams(which, way), float(owners.each)),
                (self.movers(owners), float(ranks.each)),
            ),
        )

    def _stream(self, way: str) -> Stream:
        moving: Moving = "encrypted" if self.options.encrypted else "plain"
        of_both = self.costs.moving.get(moving)
        if of_both is None:
            raise ConfigError(
                f"costs have nothing of {moving} bytes that travel; measure it: python -m lab simulation --save FILE"
            )
        return of_both.push if way == "push" else of_both.fetch

    def _end(self, kind: int, speed: float, byte_s: float, card: str) -> Sequence[Demand]:
        wire = [] if math.isinf(self.machine.network) else [(self.of_host(card, kind), speed)]
        return [
            *wire,
            (self.of_host("cores", kind), speed * byte_s),
            (self.of_host("memory", kind), speed * self.costs.touches),
        ]
