"""What a micro-batch is said to cost is what it costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import rayzero
from rayzero import ZeroConfig
from rayzero.activations.group import OffloadPolicy
from rayzero.activations.host_pool import HostPool
from rayzero.activations.offload import ActivationOffload
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.prepare import engine_of
from rayzero.engine.units.partition import build_layout
from rayzero.errors import ConfigError, UnsupportedError
from rayzero.lanes import ThreadLane
from rayzero.plan.tiers import Programs, plan_bytes
from rayzero.plan.work import Offload, leaving_gradients, measure_work
from rayzero.recipes.model import GPT
from rayzero.recipes.recipe import GPTConfig

from .machines import CPU_HOST

SHAPE = GPTConfig(vocab_size=256, seq_len=64, num_layers=3, num_heads=4, dim=128)


def gpt_loss(model: nn.Module) -> Tensor:
    tokens = torch.zeros(4, 64, dtype=torch.long)
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def convolutions() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(8192, 512))


def convolutions_loss(model: nn.Module) -> Tensor:
    return model(torch.zeros(4, 3, 32, 32)).square().mean()


MODELS = {
    "gpt fp32": (lambda: GPT(SHAPE), gpt_loss, ZeroConfig(min_unit_bytes=4096)),
    "gpt bf16, a third fits": (
        lambda: GPT(SHAPE),
        gpt_loss,
        ZeroConfig(precision="bf16", min_unit_bytes=4096, gpu_param_memory_budget=512 << 10),
    ),
    "convolutions": (convolutions, convolutions_loss, ZeroConfig(min_unit_bytes=4096)),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def peak_allocated(act: Callable[[], object]) -> int:
    """Bytes of the CPU allocator at its highest, beyond those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    events = (e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", MODELS)
def test_planned_device_bytes_are_those_of_a_real_step(name: str) -> None:
    build, loss, config = MODELS[name]
    with torch.device("meta"):
        layout = build_layout(
            build(), min_unit_bytes=config.min_unit_bytes, compute_dtype=DTYPES[config.precision]
        ).layout
    work = measure_work(build, loss, layout)
    planned = plan_bytes(
        layout,
        work,
        config,
        rayzero.ScalingConfig(num_workers=1, num_optimizers=1),
        CPU_HOST.hosts,
        state_bytes=8,
        splits=False,
        programs=Programs(rank=0, owner=0, coordinator=0, files=0),
    ).device
    with running_in(RankContext()):
        model = build()
        model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()), config)

        def step() -> None:
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        activations = peak_allocated(step)
        gathered = engine_of(model).residency.budget.peak
    assert planned.parameters == pytest.approx(gathered, rel=0.1)
    assert max(planned.forward, planned.backward) == pytest.approx(activations, rel=0.1)


FOUR_BLOCKS = GPTConfig(vocab_size=256, seq_len=64, num_layers=4, num_heads=4, dim=128)
BLOCK_BYTES = 2_232_320  # that one of them saves
POLICIES = {
    "all": OffloadPolicy(min_bytes=4096),
    "no margin, nothing ahead": OffloadPolicy(min_bytes=4096, margin=0, prefetch=0),
    "a half": OffloadPolicy(min_bytes=4096, fraction=0.5),
    "a bounded host": OffloadPolicy(min_bytes=4096, host_cap_bytes=2 << 20),
    "big tensors": OffloadPolicy(min_bytes=400_000),
    "nothing": OffloadPolicy(min_bytes=4096, fraction=0.0),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", POLICIES)
def test_planned_bytes_of_activations_that_leave_are_those_of_the_offload(name: str) -> None:
    policy = POLICIES[name]
    with torch.device("meta"):
        layout = build_layout(GPT(FOUR_BLOCKS), min_unit_bytes=4096).layout
    offload = Offload(modules=("blocks.?",), policy=policy)
    work = measure_work(lambda: GPT(FOUR_BLOCKS), gpt_loss, layout, offload=offload)
    model, lane = GPT(FOUR_BLOCKS), ThreadLane(overlap=False)  # it copies at once
    pool = HostPool(
        cap_bytes=policy.host_cap_bytes, allocate=lambda nbytes, _: torch.from_numpy(np.empty(nbytes, "u1"))
    )
    with (
        leaving_gradients(model, layout, gathers=False),
        ActivationOffload(model, policy, offload_modules=["blocks.?"], lane=lane, pool=pool) as offloaded,
    ):
        gpt_loss(model).backward()
        before = offloaded.summary().offloaded_bytes
        first = peak_allocated(lambda: gpt_loss(model).backward())
        moved = offloaded.summary().offloaded_bytes - before
    assert (work.offloaded_bytes, work.offloaded_host_bytes) == (moved, pool.status().peak_bytes)
    assert work.backward_peak_bytes == pytest.approx(first, abs=0.05 * first + min(moved, BLOCK_BYTES))
    assert work.backward_peak_bytes >= 0.95 * first


@pytest.mark.thorough
def test_a_device_budget_is_planned_as_what_stays() -> None:
    with torch.device("meta"):
        layout = build_layout(GPT(FOUR_BLOCKS), min_unit_bytes=4096).layout
    moved = {}
    for budget in (0, 2 * BLOCK_BYTES, 100 * BLOCK_BYTES):
        policy = OffloadPolicy(min_bytes=4096, margin=0, device_budget_bytes=budget)
        offload = Offload(modules=("blocks.?",), policy=policy)
        work = measure_work(lambda: GPT(FOUR_BLOCKS), gpt_loss, layout, offload=offload)
        moved[budget] = work.offloaded_bytes
    assert list(moved.values()) == [4 * BLOCK_BYTES, pytest.approx(2 * BLOCK_BYTES, abs=4), 0]


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with torch.device("meta"):
        layout = build_layout(nn.Linear(4, 4)).layout
    offload = Offload(modules=("layers.*",), policy=OffloadPolicy())
    with pytest.raises(ConfigError, match=r"'layers\.\*' matches no submodule of Linear"):
        measure_work(lambda: nn.Linear(4, 4), lambda model: model(torch.ones(2, 4)).sum(), layout, offload=offload)


def test_operations_are_counted_as_torch_counts_them() -> None:
    with torch.device("meta"):
        layout = build_layout(nn.Linear(64, 32)).layout
    work = measure_work(lambda: nn.Linear(64, 32), lambda model: model(torch.zeros(8, 64)).sum(), layout)
    assert work.forward_flops == 2 * 8 * 64 * 32
    assert work.backward_flops == 2 * 8 * 64 * 32, "the input wants no gradient"
    assert work.buffer_bytes == 0


def test_a_model_that_asks_for_data_is_refused_by_name() -> None:
    with torch.device("meta"):
        layout = build_layout(nn.Linear(4, 4)).layout

    def loss(model: nn.Module) -> Tensor:
        out = model(torch.ones(2, 4)).sum()
        return out if float(out) > 0 else -out

    with pytest.raises(UnsupportedError, match="cannot be planned: it fails without data"):
        measure_work(lambda: nn.Linear(4, 4), loss, layout)
