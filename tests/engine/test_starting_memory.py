"""A model is nowhere whole while it starts: the private memory of ranks and owners, each a process of its own."""

from __future__ import annotations

import multiprocessing
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rayzero
from rayzero.convert.conversion import export_full
from rayzero.engine.context import RankContext, running_in
from rayzero.protocol.store import ParameterStore
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.store.owner.hosted import HostedModels
from rayzero.store.owner.server import serve_models
from rayzero.store.rank.rank_store import RankStore
from rayzero.store.remote.remote_connection import RankTerms, RemoteConnection
from rayzero.telemetry.recorder import Recorder
from rayzero.testing import run_ranks

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


def private_bytes() -> int:
    """Anonymous memory of this process that is resident: neither files nor memory shared with others."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


class Peak:
    """The most private memory, beyond what there was at the start, until it is read."""

    def __init__(self) -> None:
        self._base = self._most = private_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self._most = max(self._most, private_bytes())

    def read(self) -> int:
        """Bytes."""
        self._over.set()
        self._thread.join()
        return max(self._most, private_bytes()) - self._base


def warm_up() -> None:
    """What modules, threads and torch itself take is no part of any model."""
    with running_in(RankContext()):
        model = nn.Linear(64, 64)
        model, _ = rayzero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(1, 64))


# ---- processes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    """Reaches the owners' processes from a rank's."""

    addresses: tuple[str, ...]
    token: str

    def __call__(self, rank: int, recorder: Recorder, model: int) -> ParameterStore:
        return RankStore(
            RemoteConnection(
                rank, self.addresses, RankTerms(token=self.token, share=SHARED_MEMORY, recorder=recorder, model=model)
            )
        )


def serve(owner: int, token: str, pipe: Connection) -> None:
    """One owner: tells its address, is told all, and at the end how much private memory it needed."""
    torch.set_num_threads(1)
    warm_up()
    models = HostedModels(owner, OWNERS, share=SHARED_MEMORY)
    with serve_models(models, token=token) as server:
        pipe.send(server.address)
        server.connect_peers(pipe.recv())
        peak = Peak()
        pipe.recv()
        pipe.send(peak.read())
    models.close()


@contextmanager
def owner_processes() -> Iterator[tuple[Connect, Callable[[], list[int]]]]:
    """The way to them, and a function that ends them and gives each one's peak."""
    spawn, token = multiprocessing.get_context("spawn"), secrets.token_hex(8)
    pipes, processes = [], []
    try:
        for owner in range(OWNERS):
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=serve, args=(owner, token, theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        addresses = tuple(pipe.recv() for pipe in pipes)
        for pipe in pipes:
            pipe.send(addresses)

        def end() -> list[int]:
            for pipe in pipes:
                pipe.send("end")
            return [pipe.recv() for pipe in pipes]

        yield Connect(addresses, token), end
    finally:
        for process in processes:
            process.terminate()
            process.join()


def start(context: RankContext, **given: Any) -> int:
    """Prepare and compute once; the process's peak."""
    warm_up()
    peak = Peak()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = rayzero.ZeroConfig(gpu_param_memory_budget=4 * UNIT, prefetch_buffer_size=1)
    model, _ = rayzero.prepare(model, optimizer, config, **given)
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    return peak.read()


def from_file(path: Path, context: RankContext) -> int:
    return start(context, weights=path)


def by_init(context: RankContext) -> int:
    return start(context, init=reset)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    block = torch.ones(WIDTH, WIDTH)
    save_file({f"{i}.weight": block + i for i in range(BLOCKS)}, path)
    return path


@pytest.mark.timeout(400)  # five processes import torch: 15 s on a quiet machine
def test_no_process_holds_the_model_that_comes_from_a_file(file: Path) -> None:
    with owner_processes() as (connect, end):
        ranks = run_ranks(partial(from_file, file), 2, OWNERS, connect, processes=True)
        owners = end()
    assert max(ranks) < MODEL / 4
    assert max(owners) < MODEL / 3  # its shards, half of the model and of two ranks' gradients, are shared memory


@pytest.mark.timeout(400)
def test_no_process_holds_the_model_that_init_makes() -> None:
    (peak,) = run_ranks(by_init, 1, OWNERS, "shm", processes=True)
    assert peak < MODEL / 4


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
