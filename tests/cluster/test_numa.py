"""Which CPUs a process is bound to, on hosts that this one is not."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rayzero.cluster.nodes import numa
from rayzero.cluster.nodes.numa import bind, choose_cpus, cpus_near_gpu, numa_nodes, parse_cpus

TWO = (frozenset(range(4)), frozenset(range(4, 8)))
ALL = frozenset(range(8))


def test_lists_of_cpus_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cpus("0-3,8\n") == {0, 1, 2, 3, 8}
    assert parse_cpus("5") == {5}
    assert parse_cpus("\n") == frozenset()


def test_nodes_are_in_the_kernels_order_and_those_without_cpus_are_left_out(tmp_path: Path) -> None:
    for node, cpus in {"node10": "6-7", "node2": "0-1", "node3": ""}.items():  # node3: memory alone
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus + "\n")
    (tmp_path / "has_cpu").write_text("0-1,6-7")
    assert numa_nodes(tmp_path) == ({0, 1}, {6, 7})
    assert numa_nodes(tmp_path / "nothing") == ()


@pytest.mark.parametrize(
    ("index", "threads", "nodes", "allowed", "near", "cpus"),
    [
        (0, 2, TWO, ALL, None, TWO[0]),
        (1, 2, TWO, ALL, None, TWO[1]),
        (2, 2, TWO, ALL, None, TWO[0]),
        (0, 2, TWO, ALL, TWO[1], TWO[1]),  # beside its GPU
        (0, 2, TWO, frozenset({2, 3, 4}), None, {2, 3}),  # as far as it is allowed
        (1, 2, TWO, frozenset({2, 3, 4}), None, {2, 3}),  # the other has one CPU for two threads
        (0, 2, TWO, frozenset({2, 3, 4}), TWO[1], {2, 3}),  # also where that is the near one
        (0, 5, TWO, ALL, None, None),  # no node has so many
        (0, 1, TWO, TWO[1], None, None),  # one node is all there is
        (0, 1, TWO[:1], ALL, None, None),
        (0, 1, (), ALL, None, None),
    ],
)
def test_processes_take_nodes_in_turn(index, threads, nodes, allowed, near, cpus) -> None:
    assert choose_cpus(index, threads, nodes, allowed, near) == cpus


def test_a_gpus_cpus_are_those_of_its_place_on_the_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: told)
    (tmp_path / "0000:c1:00.0").mkdir()
    (tmp_path / "0000:c1:00.0" / "local_cpulist").write_text("4-7\n")
    assert cpus_near_gpu(0, tmp_path) == TWO[1]
    assert cpus_near_gpu(0, tmp_path / "nothing") is None


def test_every_thread_of_the_process_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: dict[int, frozenset[int]] = {}
    monkeypatch.setattr(numa, "numa_nodes", lambda: TWO)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL))
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    threads = {int(thread) for thread in os.listdir("/proc/self/task")}
    assert bind("optimizer 1", 1, 2) == TWO[1]
    assert threads & bound.keys()
    assert os.getpid() in bound
    assert set(bound.values()) == {TWO[1]}
