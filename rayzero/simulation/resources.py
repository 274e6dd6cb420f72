"""What works take of hosts: the table of resources, and the demands of moving, computing and updating."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayzero.simulation.fluid import Demand
from rayzero.simulation.groups import Groups, OwnerGroup, RankGroup
from rayzero.simulation.machines import Costs, Machine, Options

__all__ = ["Load", "Resources"]

_OF_HOST = ("cores", "memory", "network out", "network in")


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
        self.names = [f"{what} of host kind {kind}" for kind in range(len(groups.hosts)) for what in _OF_HOST]
        capacities = [machine.cores, machine.memory, machine.network, machine.network] * len(groups.hosts)
        streams = [f"{way} streams of rank group {i}" for i in range(len(groups.ranks)) for way in ("fetch", "push")]
        self.names += streams
        self.capacities: list[float] = [*capacities, *[float(options.streams)] * len(streams)]

    def of_host(self, what: str, kind: int) -> int:
        """The number of a host's resource."""
        return len(_OF_HOST) * kind + _OF_HOST.index(what)

    def streams(self, ranks: int, way: str) -> int:
        """The number of the streams of a rank of group ``ranks``."""
        return len(_OF_HOST) * len(self.groups.hosts) + 2 * ranks + ("fetch", "push").index(way)

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

    def gather(self, ranks: RankGroup, size: int) -> Load:
        """A rank's gradients are copied to host memory: by a thread, or over the link of its GPU."""
        memory = self.of_host("memory", ranks.host)
        if self.machine.gpus:
            return Load(size / self.machine.link, ((memory, ranks.each * self.machine.link),))
        speed = self.machine.copy_core
        return Load(
            size / speed, ((self.of_host("cores", ranks.host), float(ranks.each)), (memory, 2 * ranks.each * speed))
        )

    def to_device(self, ranks: RankGroup, size: int) -> Load:
        """A unit goes from host memory to a GPU."""
        speed = self.machine.link
        return Load(size / speed, ((self.of_host("memory", ranks.host), ranks.each * speed),))

    def passes(self, owners: OwnerGroup, size: float, core: float, shards: int) -> Load:
        """An owner's threads read and write ``size`` bytes at ``core`` bytes per second each, in so many shards."""
        threads = self.machine.owner_threads
        moving, alone = size / (threads * core), shards * self.costs.shard_s
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

    def messages(self, kind: int, number: float, processes: int = 1) -> Load:
        """So many messages are taken or sent by each of ``processes`` of a host."""
        return Load(number * self.costs.message_s, ((self.of_host("cores", kind), float(processes)),))

    # ---- between two processes

    def stream(self, which: int, owners: OwnerGroup, size: int, way: str) -> Load:
        """Between a rank of group ``which`` and each owner of a group on another host, ``size`` bytes, one stream for
        each."""
        ranks = self.groups.ranks[which]
        others, callers = self.groups.remote(ranks, owners)
        once = self.options.fetch_once_per_host if way == "fetch" else self.options.push_once_per_host
        share = 1 / ranks.each if once else 1.0  # of the ranks of a host, one has a stream
        outward = way == "push"
        speed = min(self._stream(way), self.machine.network)
        at_rank = share * ranks.each * others * speed
        at_owner = share * owners.each * callers * speed
        return Load(
            size / speed,
            (
                *self._end(ranks.host, at_rank, self.costs.rank_byte_s, "network out" if outward else "network in"),
                *self._end(owners.host, at_owner, self.costs.owner_byte_s, "network in" if outward else "network out"),
                (self.streams(which, way), float(others)),
            ),
        )

    def loopback(self, which: int, owners: OwnerGroup, size: int, way: str) -> Load:
        """The same to each owner of the rank's own host, over gRPC."""
        ranks = self.groups.ranks[which]
        speed = self._stream(way)
        moved = ranks.each * owners.each * speed
        byte_s = self.costs.rank_byte_s + self.costs.owner_byte_s
        return Load(
            size / speed,
            (
                (self.of_host("cores", ranks.host), moved * byte_s),
                (self.of_host("memory", ranks.host), moved * 2 * self.costs.touches),
                (self.streams(which, way), float(owners.each)),
            ),
        )

    def _stream(self, way: str) -> float:
        return self.costs.push_stream if way == "push" else self.costs.fetch_stream

    def _end(self, kind: int, speed: float, byte_s: float, card: str) -> Sequence[Demand]:
        wire = [] if math.isinf(self.machine.network) else [(self.of_host(card, kind), speed)]
        return [
            *wire,
            (self.of_host("cores", kind), speed * byte_s),
            (self.of_host("memory", kind), speed * self.costs.touches),
        ]
