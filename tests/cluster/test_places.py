"""Where optimizer actors go that join a run, and which CPUs a process is bound to, on hosts that this one is not."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rayzero.cluster.nodes import numa
from rayzero.cluster.nodes.numa import bind, choose_cpus, cpus_near_gpu, numa_nodes, parse_cpus
from rayzero.cluster.nodes.places import (
    OwnerPlace,
    Places,
    check_memory,
    check_nodes,
    choose,
    is_placed,
)
from rayzero.cluster.nodes.resources import Node, plan_resources
from rayzero.config import ScalingConfig
from rayzero.errors import ConfigError
from rayzero.protocol.ownership import Ownership

GIB = 1 << 30
LABELS = {"rayzero.io/role": "optimizer"}
NODES = [
    Node(id="a", address="10.0.0.1", labels={}, memory=4 * GIB),
    Node(id="b", address="10.0.0.2", labels=LABELS, memory=4 * GIB),
    Node(id="c", address="10.0.0.3", labels=LABELS, memory=4 * GIB),
]
RANKS = ["a"]


@pytest.mark.parametrize(
    ("there", "placement", "avoid", "node"),
    [
        (["a"], "beside_rank", (), "a"),
        (["b"], "beside_rank", (), "a"),
        (["b"], "beside_rank", ("10.0.0.1",), "c"),
        (["b"], "packed", (), "b"),
        (["b", "c", "c"], "cpu_nodes", (), "b"),
        (["b"], "cpu_nodes", ("c",), "b"),
    ],
)
def test_the_node_for_one_more(there: list[str], placement: str, avoid: tuple[str, ...], node: str) -> None:
    assert choose(there, NODES, rank_nodes=RANKS, placement=placement, labels=LABELS, avoid=avoid) == node


def test_nodes_with_ranks_alone_are_found_where_all_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 on a, rank 2 on b, rank 3 on c; both optimizers on c. Ranks of another library may be anywhere."""
    plan = plan_resources(ScalingConfig(num_workers=4, num_optimizers=2), [Node(cpus=8)], "packed")
    groups = [SimpleNamespace(id=SimpleNamespace(hex=lambda name=name: name)) for name in "01234"]
    at = [{0: "a"}, {0: "a"}, {0: "b"}, {0: "c"}, {0: "c", 1: "c"}]
    table = {str(group): {"bundles_to_node_id": bundles} for group, bundles in enumerate(at)}
    monkeypatch.setattr("rayzero.cluster.nodes.places.placement_group_table", lambda: table)
    placed = Places(plan, groups)
    assert placed.nodes_without_optimizer(placed.rank_nodes()) == ["a", "b"]
    assert placed.nodes_without_optimizer(["d", "c", "d", "a"]) == ["d", "a"]


def test_the_place_of_an_optimizer_without_shards_is_beside_ranks_and_reserves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed: list[object] = []
    monkeypatch.setattr("rayzero.cluster.nodes.places.ray_answers", lambda: True)
    monkeypatch.setattr("rayzero.cluster.nodes.places.remove_placement_group", removed.append)
    nodes = ["a" * 56, "b" * 56]
    plan = plan_resources(ScalingConfig(num_workers=1, num_optimizers=1), [Node(cpus=2)])
    places = Places(plan, ["group"])
    assert places.add_doors(nodes, None, "here") == Ownership(3, doors=2)
    for door, node in enumerate(nodes, 1):
        options = places.options(door)
        assert (options["num_cpus"], options["scheduling_strategy"].node_id) == (0, node)
    places.free(OwnerPlace({}, group="of one that joined"))
    assert removed == ["of one that joined"], "no door needs it"


TWO_DOORS = Ownership(3, doors=2)


@pytest.mark.parametrize(
    ("before", "nodes", "at"),
    [(TWO_DOORS, "", "dd"), (TWO_DOORS, "a", "ad"), (TWO_DOORS, "abc", "ab"), (Ownership(1), "a", "")],
)
def test_a_run_that_goes_on_from_memory_has_as_many_doors_as_before(before: Ownership, nodes: str, at: str) -> None:
    plan = plan_resources(ScalingConfig(num_workers=1, num_optimizers=1), [Node(cpus=2)])
    places = Places(plan, ["group"])
    assert places.add_doors([node * 56 for node in nodes], before, "d" * 56) == before
    found = [places.options(door)["scheduling_strategy"].node_id for door in before.door_numbers]
    assert found == [node * 56 for node in at]


def test_where_there_is_none_it_says_so() -> None:
    with pytest.raises(ConfigError, match=r"of 3 nodes, there is none other than b, c that carries .* for another"):
        choose([], NODES, rank_nodes=RANKS, placement="cpu_nodes", labels=LABELS, avoid=("b", "c"))


@pytest.mark.parametrize(
    ("placement", "right"), [("beside_rank", {"a"}), ("packed", {"a", "b", "c"}), ("cpu_nodes", {"b", "c"})]
)
def test_who_is_where_a_placement_wants_it(placement: str, right: set[str]) -> None:
    found = {node.id for node in NODES if is_placed(node, rank_nodes=RANKS, placement=placement, labels=LABELS)}
    assert found == right


def test_a_name_that_is_no_nodes_is_refused() -> None:
    check_nodes(("a", "10.0.0.3"), NODES)
    with pytest.raises(ConfigError, match=r"'10.0.0.9' is no node of the cluster; it has 10.0.0.1, 10.0.0.2, 10.0.0.3"):
        check_nodes(("a", "10.0.0.9"), NODES)


def test_more_than_the_cluster_has_memory_for_is_refused_with_the_sum() -> None:
    check_memory(122, NODES)
    with pytest.raises(ConfigError, match=r"123 more optimizers would need 12.01 GiB for .* has 12 GiB: ask"):
        check_memory(123, NODES)
    with pytest.raises(ConfigError, match="999,998 more optimizers"):
        check_memory(999_998, NODES)


# ---- which CPUs a process is bound to -------------------------------------------------------------------------------


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
