"""What each process gets, and what is said when a cluster is too small."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayzero.cluster.nodes.resources import Node, matches, missing_resources, plan_optimizers, plan_resources, rescaled
from rayzero.config import ScalingConfig

LAPTOP = [Node(cpus=2)]


def test_two_cores_hold_two_ranks_and_two_optimizers_in_fractions():
    plan = plan_resources(ScalingConfig(num_workers=2, num_optimizers=2), LAPTOP)
    assert (plan.worker.cpus, plan.optimizer.cpus) == (0.5, 0.5)
    assert (plan.worker.threads, plan.optimizer.threads) == (1, 1)
    assert missing_resources(plan, LAPTOP) is None


def test_optimizers_alone_have_a_place_and_no_rank_takes_one():
    plan = plan_optimizers(ScalingConfig(num_workers=7, num_optimizers=2))
    assert (plan.cpus, plan.num_workers, [plan.place_of_optimizer(k) for k in (0, 1)]) == (2, 0, [(0, 0), (0, 1)])
    assert missing_resources(plan, LAPTOP) is None


def test_open_cpu_counts_share_a_large_node_in_whole_cpus_and_threads_follow():
    plan = plan_resources(ScalingConfig(num_workers=2, num_optimizers=3), [Node(cpus=32)])
    assert (plan.worker.cpus, plan.optimizer.cpus, plan.worker.threads) == (6, 6, 6)


def test_given_cpus_and_threads_are_used_as_they_are():
    scaling = ScalingConfig(
        num_workers=1, num_optimizers=1, cpus_per_worker=1.5, cpus_per_optimizer=4, threads_per_optimizer=3
    )
    plan = plan_resources(scaling, [Node(cpus=16)])
    assert (plan.worker.cpus, plan.worker.threads) == (1.5, 1)
    assert (plan.optimizer.cpus, plan.optimizer.threads) == (4, 3)


def test_an_optimizer_stands_beside_each_rank_and_more_of_them_go_round():
    plan = plan_resources(ScalingConfig(num_workers=2, num_optimizers=5), [Node(cpus=7)])
    assert [group.optimizers for group in plan.groups] == [(0, 2, 4), (1, 3)]
    assert plan.place_of_optimizer(3) == (1, 2), "behind rank 1 and optimizer 1"
    assert [sum(share.cpus for share in group.shares) for group in plan.groups] == [4, 3]


def test_fewer_optimizers_than_ranks_leave_ranks_alone():
    plan = plan_resources(ScalingConfig(num_workers=3, num_optimizers=1), LAPTOP)
    assert [group.optimizers for group in plan.groups] == [(0,), (), ()]


def test_a_smaller_cluster_keeps_as_many_ranks_as_have_a_place_and_then_as_many_optimizers():
    asked = ScalingConfig(num_workers=4, num_optimizers=4, cpus_per_worker=1, cpus_per_optimizer=1)
    assert rescaled(asked, [Node(cpus=4), Node(cpus=4)]) == asked
    fewer = rescaled(asked, [Node(cpus=3), Node(cpus=2)])
    assert (fewer.num_workers, fewer.num_optimizers) == (4, 1)
    one_each = rescaled(asked, [Node(cpus=2)])
    assert (one_each.num_workers, one_each.num_optimizers) == (1, 1)
    assert rescaled(asked, [Node(cpus=1)]) == asked, "there is no place for a rank and an optimizer"


@pytest.mark.parametrize(
    ("scaling", "nodes", "said"),
    [
        (
            {"use_gpu": True},
            LAPTOP,
            "the run needs 2 GPUs (scaling_config.use_gpu: 1 for each of 2 ranks), but the cluster has 0; "
            "lower num_workers or set use_gpu=False",
        ),
        (
            {"cpus_per_worker": 4, "cpus_per_optimizer": 1},
            LAPTOP,
            "the run needs 10 CPUs (2 ranks x 4 + 2 optimizers x 1), but the cluster has 2 CPUs; lower "
            "scaling_config.cpus_per_worker, cpus_per_optimizer, num_workers or num_optimizers",
        ),
        (  # enough, but only across nodes
            {"num_workers": 1, "num_optimizers": 1, "cpus_per_worker": 3, "cpus_per_optimizer": 3},
            [Node(cpus=4), Node(cpus=4)],
            "need one node: no way to place 6 CPUs on 2 nodes (4 CPUs; 4 CPUs)",
        ),
        (  # GPUs are on a node without enough CPUs
            {"use_gpu": True, "cpus_per_worker": 1, "cpus_per_optimizer": 1},
            [Node(cpus=1, gpus=2), Node(cpus=64)],
            "2 CPUs and 1 GPU",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_sum_and_the_settings(scaling, nodes, said):
    missing = missing_resources(plan_resources(ScalingConfig(**scaling), nodes), nodes)
    assert missing == said if said.startswith("the run") else said in str(missing)


OPTIMIZER_NODE = {"rayzero.io/role": "optimizer"}


def test_packed_optimizers_are_a_group_of_their_own_that_may_be_on_several_nodes():
    scaling = ScalingConfig(num_workers=2, num_optimizers=2, cpus_per_worker=1, cpus_per_optimizer=3)
    nodes = [Node(cpus=4), Node(cpus=4)]
    plan = plan_resources(scaling, nodes, "packed")
    assert [(group.rank, group.optimizers, group.strategy) for group in plan.groups] == [
        (0, (), "STRICT_PACK"),
        (1, (), "STRICT_PACK"),
        (None, (0, 1), "PACK"),
    ]
    assert plan.place_of_optimizer(1) == (2, 1)
    assert missing_resources(plan, nodes) is None
    assert missing_resources(plan, [Node(cpus=7), Node(cpus=1)]) is None
    assert "each needs one node: no way to place 1 CPU, 3 CPUs on 4 nodes" in str(
        missing_resources(plan, [Node(cpus=2)] * 4)
    )


def test_optimizers_on_cpu_nodes_need_the_label_and_the_room_there():
    scaling = ScalingConfig(num_workers=2, num_optimizers=2, use_gpu=True, cpus_per_worker=1, cpus_per_optimizer=2)
    gpu_node, cpu_node = Node(cpus=8, gpus=2), Node(cpus=4, labels=OPTIMIZER_NODE)
    plan = plan_resources(scaling, [gpu_node, cpu_node], "cpu_nodes")
    assert (plan.groups[-1].strategy, plan.groups[-1].labels) == ("SPREAD", OPTIMIZER_NODE)
    assert missing_resources(plan, [gpu_node, cpu_node]) is None
    assert "no way to place" in str(missing_resources(plan, [gpu_node, Node(cpus=2, labels=OPTIMIZER_NODE)]))
    assert missing_resources(plan, [gpu_node, Node(cpus=4, labels={"rayzero.io/role": "worker"})]) == (
        "placement='cpu_nodes' puts optimizer actors on nodes with rayzero.io/role=optimizer, and the cluster's 2 have "
        "none: they carry rayzero.io/role=worker; start nodes with ray start --labels=rayzero.io/role=optimizer, set "
        "scaling_config.optimizer_labels, or use placement='packed'"
    )


def test_memory_that_is_asked_for_counts_on_each_node():
    scaling = ScalingConfig(num_workers=2, num_optimizers=2, memory_per_worker="1GiB", memory_per_optimizer="3GiB")
    one, two = Node(cpus=4, memory=6 << 30), Node(cpus=4, memory=2 << 30)
    plan = plan_resources(scaling, [one, two], "packed")
    assert (plan.worker.memory, plan.optimizer.memory, plan.memory) == (1 << 30, 3 << 30, 8 << 30)
    assert missing_resources(plan, [one, two]) is None
    assert "and 8 GiB of memory" in str(missing_resources(plan, [Node(cpus=4, memory=2 << 30)] * 4))
    assert missing_resources(plan, [Node(cpus=8, memory=6 << 30)]) == (
        "the run needs 8 GiB of memory (2 ranks x 1 GiB + 2 optimizers x 3 GiB), but the cluster has 6 GiB; lower "
        "scaling_config.memory_per_worker, memory_per_optimizer, num_workers or num_optimizers"
    )


@pytest.mark.parametrize(
    ("condition", "value", "met"),
    [
        ("x", "x", True),
        ("x", "y", False),
        ("x", None, False),
        ("!x", "y", True),
        ("!x", None, True),
        ("in(x, y)", "y", True),
        ("in(x, y)", "z", False),
        ("!in(x,y)", "z", True),
        ("!in(x,y)", "x", False),
    ],
)
def test_label_conditions_are_rays(condition, value, met):
    assert matches({"role": condition}, {} if value is None else {"role": value}) is met


nodes = st.builds(
    Node,
    cpus=st.integers(0, 64).map(float),
    gpus=st.integers(0, 4).map(float),
    labels=st.sampled_from([{}, OPTIMIZER_NODE]),
)


@given(
    workers=st.integers(1, 9),
    optimizers=st.integers(1, 9),
    gpu=st.booleans(),
    nodes=st.lists(nodes, max_size=4),
    placement=st.sampled_from(["beside_rank", "packed", "cpu_nodes"]),
)
def test_a_plan_that_is_said_to_fit_never_asks_for_more_than_there_is(workers, optimizers, gpu, nodes, placement):
    plan = plan_resources(ScalingConfig(num_workers=workers, num_optimizers=optimizers, use_gpu=gpu), nodes, placement)
    if missing_resources(plan, nodes) is None:
        assert plan.cpus <= sum(node.cpus for node in nodes) + 1e-6
        assert plan.gpus <= sum(node.gpus for node in nodes)
    assert sorted(k for group in plan.groups for k in group.optimizers) == list(range(optimizers))
    assert plan.worker.cpus > 0
    assert plan.worker.threads >= 1


@pytest.mark.parametrize("cpus", [1, 2, 3, 64])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("optimizers", [1, 2, 7])
def test_open_cpu_counts_fit_any_single_node(cpus, workers, optimizers):
    node = [Node(cpus=cpus)]
    plan = plan_resources(ScalingConfig(num_workers=workers, num_optimizers=optimizers), node)
    assert missing_resources(plan, node) is None
