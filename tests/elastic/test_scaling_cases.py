"""Other owners while training goes on, in runs of other kinds: ranks over gRPC, accumulation, bf16, moments in codes,
frozen parts in codes, several models, optimizers whose owners cannot change."""

from __future__ import annotations

import copy
import functools
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import VOCAB, Block, seeded, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import rayzero
from rayzero import ZeroConfig
from rayzero.elastic.scaling import ScaleRequest, ask
from rayzero.engine.context import RankContext
from rayzero.slabs.sweep import SHARED_MEMORY
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.waiting import until

pytestmark = needs.shared_memory

STEPS = 12
UNITS = ("Block", "Embedding")
UP_AND_DOWN = {2: 4, 5: 1}  # step -> owners


class Small(nn.Module):
    """Without buffers, so that it computes in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 64)
        self.layers = nn.ModuleList(Block(64) for _ in range(2))
        self.head = nn.Linear(64, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wait_for_epoch(optimizer: Any, number: int) -> None:
    """Wait until the owners have changed so often: a change that is asked for takes the place of one that waits."""
    epochs = optimizer.engine.store.connection.epochs
    until(lambda: epochs.number >= number, 60, f"epoch {number} has not begun")


def muon_and_adamw(params: Iterable[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the embedding and the head, AdamW for everything else."""
    params = list(params)
    matrices = [param for param in params[1:-2] if param.dim() == 2]
    known = set(map(id, matrices))
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW([p for p in params if id(p) not in known], lr=lr)]


momentum = functools.partial(torch.optim.SGD, momentum=0.9)


@dataclass(frozen=True)
class Training:
    """A loop that asks for other owners on its way."""

    config: ZeroConfig
    wanted: Mapping[int, int]  # step -> owners
    folder: Path
    base: nn.Module
    make: Callable[..., Any] = torch.optim.AdamW  # an optimizer, or several, of Parameters and ``lr``
    models: int = 1
    frozen: tuple[str, ...] = ()
    saves: bool = False  # a checkpoint after each step
    resume: Path | None = None

    def __call__(self, context: RankContext) -> Any:
        torch.set_num_threads(1)
        made = []
        for _ in range(self.models):
            model = copy.deepcopy(self.base)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(self.frozen) if self.frozen else True)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            made.append(rayzero.prepare(model, self.make(trained, lr=1e-2), self.config, resume=self.resume))
        rayzero.track()
        for step in range(context.step, STEPS):
            if context.rank == 0 and step in self.wanted:
                wait_for_epoch(made[0][1], list(self.wanted).index(step))
                ask(self.folder, ScaleRequest(num_optimizers=self.wanted[step]))
            if step == STEPS - 2:
                wait_for_epoch(made[0][1], len(self.wanted))
            self.take_step(made, step, context.rank)
            if self.saves:
                rayzero.save_checkpoint(made[0][1], self.folder / f"step-{step + 1}")
            if self.wanted:
                time.sleep(0.02)
        return [rayzero.full_state_dict(model) for model, _ in made]

    def take_step(self, made: list[Any], step: int, rank: int) -> None:
        for part in range(self.config.gradient_accumulation_steps):
            x, y = tokens(10 * step + part, rank)
            for model, _ in made:
                F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten()).backward()
        for _, optimizer in made:
            if step % 2:
                optimizer.clip_grad_norm_(0.5)
            elif step % 3 == 0:
                optimizer.clip_grad_value_(0.01)
            optimizer.step()
            optimizer.zero_grad()


def assert_same(found: Any, plain: Any) -> None:
    for ours, theirs in zip(found, plain, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.keys() == other.keys()
            assert [name for name in mine if not torch.equal(mine[name], other[name])] == []


CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"config": ZeroConfig(units=UNITS, gradient_accumulation_steps=3)},
    "bf16": {"config": ZeroConfig(units=UNITS, precision="bf16")},
    "moments in int8": {"config": ZeroConfig(units=UNITS, moments="int8")},
    "a frozen base, lossless": {
        "config": ZeroConfig(units=UNITS, precision="bf16", cpu_compression="lossless"),
        "frozen": ("embed", "layers.0", "layers.1"),
    },
    "amsgrad": {"config": ZeroConfig(units=UNITS), "make": functools.partial(torch.optim.AdamW, amsgrad=True)},
    "momentum": {"config": ZeroConfig(units=UNITS), "make": momentum},
    "momentum, bf16": {"config": ZeroConfig(units=UNITS, precision="bf16"), "make": momentum},
    "factors": {"config": ZeroConfig(units=UNITS), "make": torch.optim.Adafactor},
    "factors, bf16": {"config": ZeroConfig(units=UNITS, precision="bf16"), "make": torch.optim.Adafactor},
    "muon and adamw": {"config": ZeroConfig(units=UNITS), "make": muon_and_adamw},
    "muon and adamw, bf16": {"config": ZeroConfig(units=UNITS, precision="bf16"), "make": muon_and_adamw},
    "two models": {"config": ZeroConfig(units=UNITS), "models": 2},
}


@pytest.mark.promise("scalable", "precisions", "moments", "accumulation", "codecs")
@pytest.mark.spread(2)
@pytest.mark.parametrize("there", [(), ("optimizer 1", "optimizer 3", "rank 1")], ids=["one host", "two hosts"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_bit_changes(case: dict[str, Any], there: tuple[str, ...], tmp_path: Path) -> None:
    loop = Training(base=seeded(Small, 3), folder=tmp_path, wanted=UP_AND_DOWN, **case)
    plain = Training(base=seeded(Small, 3), folder=tmp_path, wanted={}, **case)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="test-host-") as other:
        hosts = dict.fromkeys(there, Path(other))
        found = run_ranks(loop, 2, 2, "shm", True, max_failures=1, run_dir=tmp_path, stall_timeout=60.0, hosts=hosts)
    assert_same(found, run_ranks(plain, 2, 2))


@pytest.mark.promise("scalable", "recoverable", "optimizers")
@pytest.mark.thorough
@pytest.mark.parametrize("case", ["momentum", "factors", "muon and adamw", "muon and adamw, bf16"])
def test_a_run_whose_owners_change_is_resumed_from_any_step(case: str, tmp_path: Path) -> None:
    training = functools.partial(Training, base=seeded(Small, 3), folder=tmp_path, **CASES[case])
    plain = run_ranks(training(wanted={}), 2, 2)
    saved = training(wanted=UP_AND_DOWN, saves=True)
    assert_same(run_ranks(saved, 2, 2, "shm", True, max_failures=1, run_dir=tmp_path, stall_timeout=60.0), plain)
    for step in range(1, STEPS):
        assert_same(run_ranks(training(wanted={}, resume=tmp_path / f"step-{step}"), 2, 1 + step % 4), plain)
