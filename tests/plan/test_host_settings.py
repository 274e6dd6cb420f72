"""What the ranks of a host ask a lead together, as simulated and as counted in a run."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rayzero
from lab.simulation.planned_step import simulate_step
from rayzero.config import ScalingConfig, ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.engine.units.partition import build_layout
from rayzero.layout.model_layout import ModelLayout
from rayzero.plan.hardware import Hosts
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.host import lead_questions
from rayzero.store.owner.hosted import HostedModels
from rayzero.telemetry.names import GRPC_REQUESTS
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import members, run_ranks
from tests.lab.simulation.runs import MEASURED
from tests.support import needs

from .machines import GPU_HOSTS
from .test_tiers import WORK

shared = needs.shared_memory
LAYERS, WIDTH, STEPS = 6, 64, 4
ASKED = ("Finish", "Ask", "Collect", "Apply")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def layout_of(zero: ZeroConfig) -> ModelLayout:
    return build_layout(
        build(), min_unit_bytes=zero.min_unit_bytes, compute_dtype=torch.float32, units=zero.units
    ).layout


def train(ctx: RankContext) -> None:
    model = build()
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(STEPS):
        model(torch.ones(2, WIDTH)).square().sum().backward()
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
def test_the_lead_is_asked_as_often_as_a_simulated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of two ranks, and two of an owner each; the one that leads collects from the other, and applies there.
    What it asks itself takes it no message of gRPC, and is counted in the simulation."""
    zero = ZeroConfig(placement="cpu_nodes", units=("Linear",), max_grad_norm=1.0)
    counted = MemoryRecorder()
    monkeypatch.setattr(members, "HostedModels", functools.partial(HostedModels, recorder=counted))
    monkeypatch.setattr(lead_questions, "_PATIENCE_S", 60.0)  # for the last rank of a host on a busy machine, too
    with other_hosts(("rank 0", "rank 1"), ("rank 2", "rank 3"), ("optimizer 1",)) as hosts:
        run_ranks(train, 4, 2, "shm", config=zero, hosts=hosts)
    calls = {
        method: sum(counted.total(GRPC_REQUESTS, method=method, code=code) for code in ("OK", "CANCELLED"))
        for method in ASKED
    }
    four = ScalingConfig(num_workers=4, num_optimizers=2, use_gpu=True)
    hardware = replace(GPU_HOSTS, hosts=Hosts(count=4, gpus_each=2))
    found = simulate_step(layout_of(zero), {0}, WORK, zero, four, hardware, MEASURED, state_bytes=8, splits=False)
    assert found.lead_messages == 2 * (2 + 2 * 2)
    assert sum(calls.values()) == STEPS * (found.lead_messages / 2 - 2), calls
    assert not calls["Finish"]
