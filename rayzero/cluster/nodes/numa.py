"""Binds a process to the CPUs of one NUMA node, so that its memory is on the same node.

[Note: first touch] Linux allocates a page on the node whose CPU touches it first. So a process that is bound before it
makes its slabs has them on its own node, without a memory policy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch

NODES = Path("/sys/devices/system/node")
DEVICES = Path("/sys/bus/pci/devices")

log = logging.getLogger(__name__)


def parse_cpus(listed: str) -> frozenset[int]:
    """The kernel's lists of CPUs: "0-3,8"."""
    spans = [part.partition("-") for part in listed.strip().split(",") if part]
    return frozenset(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))


def numa_nodes(root: Path = NODES) -> tuple[frozenset[int], ...]:
    """The CPUs of each NUMA node that has some, in the kernel's order; empty if the kernel lists none."""
    found = sorted(root.glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    cpus = [parse_cpus((folder / "cpulist").read_text(encoding="ascii")) for folder in found]
    return tuple(filter(None, cpus))


def choose_cpus(
    index: int,
    threads: int,
    nodes: Sequence[AbstractSet[int]],
    allowed: AbstractSet[int],
    near: AbstractSet[int] | None,
) -> frozenset[int] | None:
    """The CPUs to bind process ``index`` of its kind to: those of the node that is ``near``, else of the nodes in turn,
    limited to ``allowed``. None if there is no choice: a single node, or none with a CPU for each of its
    ``threads``."""
    usable = [frozenset(node & allowed) for node in nodes if node & allowed]
    if len(usable) < 2:
        return None
    wide = [node for node in usable if len(node) >= threads]
    close = [node for node in wide if near is not None and node <= near]
    fitting = close or wide
    return fitting[index % len(fitting)] if fitting else None


def cpus_near_gpu(index: int, root: Path = DEVICES) -> frozenset[int] | None:
    """The CPUs nearest to a CUDA device of this process; None if the kernel does not list them."""
    told: Any = torch.cuda.get_device_properties(index)
    address = f"{told.pci_domain_id:04x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0"
    try:
        return parse_cpus((root / address / "local_cpulist").read_text(encoding="ascii")) or None
    except OSError:
        return None


def bind(who: str, index: int, threads: int, near: AbstractSet[int] | None = None) -> frozenset[int] | None:
    """Bind every present thread of this process, which later ones inherit, to the CPUs of ``choose_cpus``. Returns
    them, or None if nothing changes. Call it before the process allocates its memory. [Note: first touch]"""
    cpus = choose_cpus(index, threads, numa_nodes(), os.sched_getaffinity(0), near)
    if cpus is None:
        return None
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue  # it has ended since
    log.info("%s is bound to the CPUs %s of one NUMA node", who, sorted(cpus))
    return cpus
