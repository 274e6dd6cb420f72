"""A model is nowhere whole while it starts: the private memory of ranks and owners, each a process of its own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rayzero
from rayzero.convert.conversion import export_full
from rayzero.engine.context import RankContext, running_in
from rayzero.testing import run_ranks

from .test_release import owner_pid

pytestmark = pytest.mark.thorough

WIDTH, BLOCKS = 1024, 96
UNIT = WIDTH * WIDTH * 4  # bytes in fp32
MODEL = BLOCKS * UNIT  # 384 MiB
OWNERS = 2


def build(num_blocks: int = BLOCKS) -> nn.Module:
    with rayzero.empty_parameters():
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_blocks)])


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.reset_parameters()


# ---- measuring --------------------------------------------------------------------------------------------------


def private_bytes(process: str) -> int:
    """Anonymous memory of a process that is resident: neither files nor memory shared with others."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


class Peak:
    """The most private memory of a process, beyond what there was when it was first seen, until it is read."""

    def __init__(self, find: Callable[[], str] = lambda: "self") -> None:
        """``find``: names the process in /proc; raises ValueError while it is not there."""
        self._find, self._over = find, threading.Event()
        self._seen: list[int] = []
        self._look()
        self._thread = threading.Thread(target=self._keep_looking)
        self._thread.start()

    def _look(self) -> None:
        with suppress(ValueError):
            now = private_bytes(self._find())
            self._seen = [self._seen[0], max(now, self._seen[1])] if self._seen else [now, now]

    def _keep_looking(self) -> None:
        while not self._over.wait(0.002):
            self._look()

    def read(self) -> int:
        """Bytes."""
        self._over.set()
        self._thread.join()
        self._look()
        base, most = self._seen
        return most - base


def warm_up() -> None:
    """What modules, threads and torch itself take is no part of any model."""
    with running_in(RankContext()):
        model = nn.Linear(64, 64)
        model, _ = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 64))


# ---- processes --------------------------------------------------------------------------------------------------


def start(context: RankContext, **given: Any) -> list[int]:
    """Prepare and compute once; the process's peak, and on rank 0 those of the owners."""
    warm_up()
    owners = range(OWNERS if context.rank == 0 else 0)
    peaks = [Peak(), *(Peak(functools.cache(partial(owner_process, context.run, owner))) for owner in owners)]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = rayzero.ZeroConfig(gpu_param_memory_budget=4 * UNIT, prefetch_buffer_size=1)
    model, _ = rayzero.prepare(model, optimizer, config, **given)
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    return [peak.read() for peak in peaks]


def owner_process(run: str, owner: int) -> str:
    return str(owner_pid(run, owner))


def from_file(path: Path, context: RankContext) -> list[int]:
    return start(context, weights=path)


def by_init(path: Path, context: RankContext) -> list[int]:
    return start(context, init=reset)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    block = torch.ones(WIDTH, WIDTH)
    save_file({f"{i}.weight": block + i for i in range(BLOCKS)}, path)
    return path


@pytest.mark.timeout(400)  # four processes import torch
@pytest.mark.parametrize("how", [from_file, by_init])
def test_no_process_holds_the_model_that_starts(how: Callable[..., list[int]], file: Path) -> None:
    (rank, *owners), (other,) = run_ranks(partial(how, file), 2, OWNERS, "shm", processes=True)
    assert max(rank, other) < MODEL / 4
    assert 0 < max(owners) < MODEL / 3  # its shards, half of the model and of two ranks' gradients, are shared memory


def test_an_export_holds_a_few_parts_of_4_mib(tmp_path: Path) -> None:
    checkpoint, out = tmp_path / "step-000000", tmp_path / "out.safetensors"
    with running_in(RankContext()):
        model = build(24)
        _, optimizer = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), init=reset)
        rayzero.save_checkpoint(optimizer, checkpoint, {})
    peak = Peak()
    export_full(checkpoint, out)
    assert peak.read() < 24 * UNIT / 4
    assert out.stat().st_size > 24 * UNIT
