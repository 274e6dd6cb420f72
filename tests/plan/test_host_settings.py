"""What the ranks of a host do together, planned and counted: bytes of units that they gather, calls of the lead."""

from __future__ import annotations

import functools
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rayzero
from lab.simulation.planned_step import simulate_step
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.units import gathering
from rayzero.engine.units.partition import build_layout
from rayzero.errors import UnsupportedError
from rayzero.layout.model_layout import ModelLayout
from rayzero.plan.bound import StepTraffic, bound_step, step_traffic
from rayzero.plan.hardware import Hosts
from rayzero.plan.tiers import RunBytes, check_gathers, plan_bytes, ranks_together
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.shm.same_host import why_no_sharing
from rayzero.telemetry.names import GRPC_REQUESTS, HOST_GATHER_BYTES
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import owners, run_ranks
from tests.lab.simulation.runs import MEASURED

from .machines import CPU_HOST, GPU_HOSTS
from .test_tiers import NOTHING, UNIT, WORK, four_layers

shared = pytest.mark.skipif(why_no_sharing() is not None, reason="no shared memory here")
LAYERS, WIDTH = 6, 64
GATHERS = ZeroConfig(host_gather=True, prefetch_buffer_size=1, auto_memory_management="off", units=("Linear",))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def layout_of(zero: ZeroConfig) -> ModelLayout:
    return build_layout(
        build(), min_unit_bytes=zero.min_unit_bytes, compute_dtype=torch.float32, units=zero.units
    ).layout


def on_one_host(ranks: int, zero: ZeroConfig) -> tuple[RunBytes, StepTraffic]:
    layout, scaling = layout_of(zero), ScalingConfig(num_workers=ranks, num_optimizers=2)
    together = ranks_together(zero, scaling, CPU_HOST.hosts)
    return (
        plan_bytes(layout, WORK, zero, scaling, CPU_HOST.hosts, state_bytes=8, programs=NOTHING),
        step_traffic(layout, WORK, zero, scaling, state_bytes=8, together=together),
    )


# ---- units that come up together --------------------------------------------------------------------------------


def gathered_by(ctx: RankContext, zero: ZeroConfig) -> tuple[dict[str, float], int]:
    """Bytes by source in one step, and those of its buffers. Counts are read at the end of a forward: what it needed is
    counted, and nothing of the next version is."""
    model = build()
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()), zero)
    recorder: Any = ctx.recorder
    seen = []
    for _ in range(3):
        out = model(torch.ones(2, WIDTH)).square().sum()
        seen.append({each: recorder.total(HOST_GATHER_BYTES, source=each) for each in ("own", "ranks", "whole")})
        out.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {each: (seen[2][each] - seen[0][each]) / 2 for each in seen[0]}, optimizer.engine.residency.allocated


@shared
@pytest.mark.parametrize(("ranks", "own"), [(2, 2048 + 64), (3, 1344 + 128)])
def test_a_rank_copies_what_the_plan_says_and_has_the_rest_from_the_others(
    ranks: int, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each unit of 4,160 elements, its part and what is left behind the last one."""
    monkeypatch.setattr(gathering, "PATIENCE_S", 30.0)  # so that bytes are exact on a loaded machine
    planned, traffic = on_one_host(ranks, GATHERS)
    assert (traffic.fetch, traffic.copied) == (LAYERS * 4 * 4160, LAYERS * 4 * own)
    for sources, buffers in run_ranks(functools.partial(gathered_by, zero=GATHERS), ranks, 2, "shm"):
        assert sources == {"own": traffic.copied, "ranks": traffic.fetch - traffic.copied, "whole": 0}
        assert buffers == planned.device.parameters, "in memory of its own, as on a device"
    alone, without = on_one_host(ranks, GATHERS.replace(host_gather=False))
    assert without.copied == without.fetch == traffic.fetch
    assert planned.hosts[0].compute - alone.hosts[0].compute == ranks * (
        planned.device.parameters + planned.device.leaving
    ), "otherwise it reads the owners' memory, and gathers gradients there"


def test_ranks_on_cpus_gather_into_buffers_of_their_own_as_to_a_device() -> None:
    """Gradients of two units are gathered before they are copied, too. Parameters that come to each rank by itself wait
    in staging, unless the host has them once."""
    two = ScalingConfig(num_workers=2, num_optimizers=2)
    zero = ZeroConfig(precision="bf16", host_gather=True)

    def planned(scaling: ScalingConfig, hosts: Hosts, zero: ZeroConfig) -> RunBytes:
        return plan_bytes(four_layers(), WORK, zero, scaling, hosts, state_bytes=8, programs=NOTHING)

    here = planned(two, CPU_HOST.hosts, zero).hosts[0]
    assert (here.compute, here.staging) == (2 * (4 * UNIT + 7100 + 2 * UNIT), 0)
    four, packed = two.replace(num_workers=4), zero.replace(placement="packed")
    each = planned(four, Hosts(count=2), packed.replace(host_fetch="never")).hosts[0]
    once = planned(four, Hosts(count=2), packed).hosts[0]
    assert (each.staging, once.staging) == (2 * (2 * UNIT + 4 * UNIT), 2 * 2 * UNIT)
    assert each.compute == once.compute == here.compute


def test_gpus_of_a_host_share_the_link() -> None:
    """Four layers of 4,096 elements on two hosts of two GPUs each: half of every unit over the own link."""
    four = ScalingConfig(num_workers=4, num_optimizers=4, use_gpu=True)
    zero = ZeroConfig(precision="bf16", host_gather=True)
    together = ranks_together(zero, four, GPU_HOSTS.hosts)
    traffic = step_traffic(four_layers(), WORK, zero, four, state_bytes=8, together=together)
    assert (together, traffic.fetch, traffic.copied) == (2, 4 * UNIT, 2 * UNIT)
    assert bound_step(traffic, zero, four, GPU_HOSTS).fetch == 2 * UNIT / 5e10
    tight = zero.replace(gpu_param_memory_budget=3 * UNIT)
    again = step_traffic(four_layers(), WORK, tight, four, state_bytes=8, together=2)
    assert (again.fetch, again.copied) == (5 * UNIT, 5 * UNIT / 2)


def test_ranks_gather_where_every_host_has_several_and_at_most_16() -> None:
    zero = ZeroConfig(host_gather=True)

    def together(ranks: int, gpus: int, zero: ZeroConfig = zero) -> int:
        scaling = ScalingConfig(num_workers=ranks, num_optimizers=1, use_gpu=True)
        return ranks_together(zero, scaling, Hosts(count=2, gpus_each=gpus))

    def check(zero: ZeroConfig, ranks: int) -> None:
        scaling = ScalingConfig(num_workers=ranks, num_optimizers=1)
        run = plan_bytes(four_layers(), WORK, zero, scaling, CPU_HOST.hosts, state_bytes=8, programs=NOTHING)
        check_gathers(run, zero)

    assert (together(8, 4), together(6, 4), together(5, 4)) == (4, 2, 1), "the fewest; one rank copies whole units"
    assert together(8, 4, ZeroConfig()) == 1
    check(zero, 16)
    check(ZeroConfig(), 17)
    with pytest.raises(UnsupportedError, match="host_gather=True with 17 ranks on a host: at most 16 gather"):
        check(zero, 17)


# ---- what the lead is asked -------------------------------------------------------------------------------------

STEPS = 4
ASKED = ("Finish", "Speak", "Collect", "Apply")


def train(ctx: RankContext, at_once: threading.Barrier) -> None:
    model = build()
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(STEPS):
        model(torch.ones(2, WIDTH)).square().sum().backward()
        at_once.wait(60.0)  # a voice waits half a second for the last rank, and then asks for those that it has heard
        optimizer.step()
        optimizer.zero_grad()
    rayzero.full_state_dict(model)  # the last step is decided


@contextmanager
def other_hosts(*members: tuple[str, ...]) -> Iterator[dict[str, Path]]:
    """A directory of their own for each group of members."""
    with ExitStack() as stack:
        folders = [
            stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-")) for _ in members
        ]
        yield {member: Path(folder) for folder, group in zip(folders, members, strict=True) for member in group}


@shared
@pytest.mark.parametrize(("voice", "finishes"), [("always", 2), ("auto", 4)])
def test_the_lead_is_asked_as_often_as_a_simulated_one(
    voice: Any, finishes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts of two ranks, and two of an owner each; the one that leads collects from the other, and applies there.
    What it asks itself takes it no message of gRPC, and is counted in the simulation."""
    zero = ZeroConfig(host_voice=voice, placement="cpu_nodes", units=("Linear",), max_grad_norm=1.0)
    counted = MemoryRecorder()
    monkeypatch.setattr(owners, "HostedModels", functools.partial(HostedModels, recorder=counted))
    with other_hosts(("rank 0", "rank 1"), ("rank 2", "rank 3"), ("optimizer 1",)) as hosts:
        run_ranks(functools.partial(train, at_once=threading.Barrier(4)), 4, 2, "shm", config=zero, hosts=hosts)
    calls = {
        method: sum(counted.total(GRPC_REQUESTS, method=method, code=code) for code in ("OK", "CANCELLED"))
        for method in ASKED
    }
    four = ScalingConfig(num_workers=4, num_optimizers=2, use_gpu=True)
    hardware = replace(GPU_HOSTS, hosts=Hosts(count=4, gpus_each=2))
    found = simulate_step(layout_of(zero), {0}, WORK, zero, four, hardware, MEASURED, state_bytes=8)
    assert found.lead_messages == 2 * (finishes + 2 * 2)
    more = sum(calls.values()) - STEPS * (found.lead_messages / 2 - 2)
    assert 0 <= more <= STEPS // 2, calls  # on a loaded machine a rank may come late, and its voice ask twice
    assert (calls["Speak"] > 0) == (voice == "always")
