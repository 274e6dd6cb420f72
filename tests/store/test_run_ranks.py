"""Ranks of ``run_ranks``: the first error ends the run at once, wherever the others wait; processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import rayzero
from rayzero.config import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.errors import ConfigError, RayZeroError
from rayzero.slabs.sweep import SHARED_MEMORY, held_in
from rayzero.store.shm.signals import why_no_sharing
from rayzero.telemetry.names import TRANSFER_BYTES, TRANSFER_RAW_BYTES
from rayzero.telemetry.recorder import MemoryRecorder
from rayzero.testing import run_ranks
from rayzero.testing.rank_processes import PRELOADED
from tests.support import needs
from tests.support.waiting import until

_STALL_S = 600.0
_AT_ONCE_S = 60.0  # far from the stall timeout, on a crowded machine


def _train(ctx: RankContext, lrs: tuple[float, ...], widths: tuple[int, ...]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(widths[ctx.rank], 4), torch.nn.Linear(4, 1))
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters(), lr=lrs[ctx.rank]))
    model(torch.ones(2, widths[ctx.rank])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    rayzero.full_state_dict(model)


@pytest.mark.parametrize("transport", ["inproc", "grpc"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_it_prepares_ends_the_others(
    transport: Literal["inproc", "grpc"], failing: int
) -> None:
    def train(ctx: RankContext) -> None:
        if ctx.rank == failing:
            raise ZeroDivisionError("before prepare")
        _train(ctx, (0.01, 0.01), (3, 3))

    began = time.monotonic()
    with pytest.raises((ZeroDivisionError, RayZeroError)) as caught:
        run_ranks(train, 2, 2, transport, stall_timeout=_STALL_S)
    assert isinstance(caught.value, ZeroDivisionError)
    assert time.monotonic() - began < _AT_ONCE_S


def _load_by_workers(ctx: RankContext) -> tuple[str, list[float]]:
    model = torch.nn.Linear(4, 1)
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()))
    seen = []
    for _ in range(2):
        for (batch,) in DataLoader(TensorDataset(torch.arange(16.0).view(4, 4)), batch_size=2, num_workers=2):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(batch.sum()))
    return multiprocessing.get_start_method(), seen


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_workers_of_a_ranks_loader_are_forked_as_in_any_program(
    transport: Literal["grpc", "shm"], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    if transport == "shm" and why_no_sharing() is not None:
        pytest.skip("no shared memory here")
    usual = multiprocessing.get_start_method()
    assert run_ranks(_load_by_workers, 2, 1, transport, processes=True) == [(usual, [28.0, 92.0] * 2)] * 2
    assert "fork" not in capfd.readouterr().err, "gRPC tells of each fork"
    assert "lost the link" not in caplog.text
    assert "has died" not in caplog.text, "ranks that are done leave, they are not killed"


def _environment(_: RankContext) -> str | None:
    return os.environ.get("RAYZERO_TEST_ENVIRONMENT")


def test_a_rank_process_has_the_environment_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that forks ranks has that of the first call."""
    monkeypatch.delenv("RAYZERO_TEST_ENVIRONMENT", raising=False)
    assert run_ranks(_environment, 1, 1, "grpc", processes=True) == [None]
    monkeypatch.setenv("RAYZERO_TEST_ENVIRONMENT", "now")
    assert run_ranks(_environment, 1, 1, "grpc", processes=True) == ["now"]


def test_what_ranks_are_forked_with_has_started_no_thread_of_torchs() -> None:
    """A fork has none of its parent's threads, and libgomp waits for those it had."""
    code = "import os, torch; before = len(os.listdir('/proc/self/task'))\n"
    code += "".join(f"import {name}\n" for name in PRELOADED)
    code += "print(len(os.listdir('/proc/self/task')) - before)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "0"


def _pushed(ctx: RankContext) -> tuple[float, float]:
    model = torch.nn.Linear(512, 64)
    model, optimizer = rayzero.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model(torch.ones(2, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(ctx.recorder, MemoryRecorder)
    return (
        ctx.recorder.total(TRANSFER_BYTES, direction="push", transport="grpc"),
        ctx.recorder.total(TRANSFER_RAW_BYTES, direction="push"),
    )


def _holds(ctx: RankContext, directories: list[Path]) -> tuple[str, list[set[str]]]:
    return ctx.lineage, [{held.lineage for held in held_in(directory)} for directory in directories]


@needs.shared_memory
def test_no_sweep_takes_what_a_host_has_while_all_of_its_members_are_dead_and_awaited(slab_dir: Path) -> None:
    """A sweep of another run on that host, at a moment when nobody there has the locks of the run's slabs."""
    directories, hosts = [SHARED_MEMORY, slab_dir], {"rank 1": slab_dir}
    found = run_ranks(partial(_holds, directories=directories), 2, 2, "shm", True, max_failures=1, hosts=hosts)
    (lineage,) = {lineage for lineage, _ in found}
    assert lineage
    assert all(lineage in held for _, holds in found for held in holds)
    until(lambda: not any(lineage == held.lineage for directory in directories for held in held_in(directory)))


@pytest.mark.parametrize(("compression", "part"), [("none", 1.0), ("bf16", 0.5), ("int8", 260 / 1024)])
def test_bytes_travel_as_the_config_says(compression: Literal["none", "bf16", "int8"], part: float) -> None:
    config = ZeroConfig(wire_compression=compression)
    ((sent, raw),) = run_ranks(_pushed, 1, 1, "grpc", config=config)
    assert raw > 2 * 4 * 512 * 64
    assert sent == pytest.approx(part * raw, rel=0.01)


def test_protected_connections_need_connections() -> None:
    with pytest.raises(ConfigError, match="tls=True needs connections, and transport='inproc' has none"):
        run_ranks(lambda ctx: ctx.rank, tls=True)
