"""The least time of a step: the arithmetic, and that no real step is faster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import pytest
import torch

import rayzero
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.units.partition import build_layout
from rayzero.plan.bound import bound_step, products_by_host, step_traffic
from rayzero.plan.hardware import Hosts, measure_here
from rayzero.plan.work import measure_work

from .machines import CPU_HOST, GPU_HOSTS
from .test_tiers import BF16, UNIT, WORK, four_layers
from .test_work import DTYPES, MODELS

FOUR = ScalingConfig(num_workers=4, num_optimizers=4, use_gpu=True)
ELEMENTS = 4 * 64 * 64


def test_traffic_of_a_step() -> None:
    traffic = step_traffic(four_layers(), WORK, BF16, FOUR, state_bytes=8, splits=False)
    assert (traffic.flops, traffic.fetch, traffic.push) == (3 * 10**12, 4 * UNIT, 4 * UNIT)
    assert traffic.update == ELEMENTS * (2 * 4 * 2 + 24 + 2), "gradients of 4 ranks twice, states, published"


def test_what_does_not_fit_comes_anew_in_each_pass() -> None:
    tight = BF16.replace(gpu_param_memory_budget=3 * UNIT, gradient_accumulation_steps=2)
    traffic = step_traffic(four_layers(), WORK, tight, FOUR, state_bytes=8, splits=False)
    assert traffic.fetch == 4 * UNIT + 3 * UNIT, "one unit of four, in three of four passes"
    assert traffic.push == 2 * 4 * UNIT
    summed = tight.replace(offload_grads=False)
    assert step_traffic(four_layers(), WORK, summed, FOUR, state_bytes=8, splits=False).push == 4 * UNIT


def test_the_longest_stage_binds_and_without_overlap_the_update_comes_on_top() -> None:
    traffic = step_traffic(four_layers(), WORK, BF16, FOUR, state_bytes=8, splits=False)
    bound = bound_step(traffic, BF16, FOUR, GPU_HOSTS)
    assert bound.compute == 3e12 / 1e15
    assert bound.fetch == 4 * UNIT / 5e10
    assert bound.network == (4 * UNIT / 2 + 2 * 4 * UNIT / 2) / 1e10, "half of it: once for two ranks, from two others"
    each = BF16.replace(transport="grpc")
    assert bound_step(traffic, each, FOUR, GPU_HOSTS).network == (2 * 4 * UNIT / 2 + 2 * 4 * UNIT / 2) / 1e10
    assert bound.update == traffic.update / 2 / 3e11, "two hosts share it"
    assert (bound.seconds, bound.binds) == (bound.compute, "compute")
    alone = bound_step(traffic, BF16.replace(overlap="none"), FOUR, GPU_HOSTS)
    assert alone.seconds == pytest.approx(alone.compute + alone.update)
    slow = bound_step(traffic, BF16, FOUR, replace(GPU_HOSTS, memory=1e3))
    assert slow.binds == "update"


def test_muons_products_are_made_by_the_cpus_of_the_host_that_has_most() -> None:
    of_units = [100, 100, 200, 100]
    traffic = step_traffic(four_layers(), WORK, BF16, FOUR, state_bytes=4, splits=False, update_work=of_units)
    assert sorted(traffic.products) == sorted(of_units)
    hardware = replace(GPU_HOSTS, host_flops=10.0)
    assert products_by_host(traffic, BF16, FOUR, hardware.hosts) == {0: 200, 1: 300}
    bound, without = bound_step(traffic, BF16, FOUR, hardware), bound_step(traffic, BF16, FOUR, GPU_HOSTS)
    assert bound.update == pytest.approx(without.update + 300 / 10.0)
    assert bound.binds == "update"


def test_what_ranks_multiply_is_made_by_their_devices() -> None:
    work, ranks = [100, 100, 200, 100], BF16.replace(matrix_updates="rank")
    traffic = step_traffic(four_layers(), WORK, ranks, FOUR, state_bytes=4, splits=False, product_work=work)
    assert (traffic.products, traffic.multiplied) == ((), 200), "of four ranks, one has the largest alone"
    bound, without = (
        bound_step(traffic, zero, FOUR, GPU_HOSTS).update for zero in (ranks, ranks.replace(precision="fp32"))
    )
    assert bound - without == pytest.approx(200 / GPU_HOSTS.flops), "what GPUs do in bf16 is not known from fp32"
    slow = replace(CPU_HOST, host_flops=10.0)
    on_cpus = bound_step(traffic, ranks, FOUR.replace(use_gpu=False), slow)
    assert on_cpus.update > 4 * 200 / 10.0, "four ranks share a host's CPUs"


def test_eight_ranks_of_a_host_push_one_fp32_sum() -> None:
    many = FOUR.replace(num_workers=16, num_optimizers=16)
    hosts = replace(GPU_HOSTS, hosts=Hosts(count=2, gpus_each=8))
    traffic = step_traffic(four_layers(), WORK, BF16, many, state_bytes=8, splits=False)
    assert bound_step(traffic, BF16, many, hosts).network == (4 * UNIT / 2 + 2 * 4 * UNIT / 2) / 1e10
    each = BF16.replace(host_push="never")
    assert bound_step(traffic, each, many, hosts).network == (4 * UNIT / 2 + 8 * 4 * UNIT / 2) / 1e10


def test_ranks_on_one_cpu_host_share_its_speed() -> None:
    traffic = step_traffic(four_layers(), WORK, BF16, FOUR, state_bytes=8, splits=False)
    assert bound_step(traffic, BF16, FOUR.replace(use_gpu=False), CPU_HOST).compute == 4 * 3e12 / 1e12


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_no_real_step_is_faster_than_its_bound(name: str) -> None:
    build, loss, config = MODELS[name]
    dtype = DTYPES[config.precision]
    with torch.device("meta"):
        layout = build_layout(build(), min_unit_bytes=config.min_unit_bytes, compute_dtype=dtype).layout
    alone = ScalingConfig(num_workers=1, num_optimizers=1)
    traffic = step_traffic(layout, measure_work(build, loss, layout), config, alone, state_bytes=8, splits=False)
    here = partial(measure_here, dtype, traffic.update // 2, Path("/dev/shm"))
    machines, seconds = [here()], []
    with running_in(RankContext()):
        model = build()
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()), config)
        for _ in range(3):
            start = perf_counter()
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(perf_counter() - start)
    machines.append(here())
    fastest = replace(
        machines[0], flops=max(m.flops for m in machines), memory=max(m.memory for m in machines)
    )  # others slow the machine down, sometimes just while it is measured
    assert bound_step(traffic, ZeroConfig(), alone, fastest).seconds <= min(seconds[1:])
