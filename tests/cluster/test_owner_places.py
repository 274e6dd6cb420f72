"""Where optimizer actors go that join a run."""

from __future__ import annotations

import pytest

from rayzero.cluster.nodes.owner_places import Host, check_memory, check_nodes, choose, is_placed
from rayzero.errors import ConfigError

GIB = 1 << 30
LABELS = {"rayzero.io/role": "optimizer"}
NODES = [
    Host("a", "10.0.0.1", {}, 4 * GIB),
    Host("b", "10.0.0.2", LABELS, 4 * GIB),
    Host("c", "10.0.0.3", LABELS, 4 * GIB),
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
