"""Classes that keep other shapes than a parameter's, in a whole loop: their bits, their state dicts, what resumes."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayzero
from rayzero.config.zero import ZeroConfig
from rayzero.convert.conversion import convert
from rayzero.engine.context import RankContext, running_in
from rayzero.engine.full_values import load_checkpoint
from rayzero.kernels.optimizer_states import leaves
from rayzero.slabs.sweep import list_slabs
from rayzero.testing import run_ranks
from tests.support import needs

from .models import prepared_copy

STEPS, SAVED = 6, 3


class Mixed(nn.Module):
    """A convolution, a stack of experts, matrices, vectors of odd lengths, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 5)
        self.experts = nn.Parameter(torch.randn(4, 112, 33) * 0.1)
        self.norm = nn.LayerNorm(33)
        self.last = nn.Linear(33, 130)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x).flatten(1))
        found: Tensor = self.last(self.norm(torch.einsum("bi,eio->bo", x, self.experts))) * self.scale
        return found


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same_states(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in theirs["state"].items():
        mine, found = leaves(ours["state"][key]), leaves(state)
        if mine.keys() != found.keys():
            return False
        if not all(torch.equal(torch.as_tensor(mine[k]).float(), torch.as_tensor(found[k]).float()) for k in found):
            return False
    return True


CASES = [
    "torch.optim:Adafactor",
    "pytorch_optimizer:SOAP",
    "pytorch_optimizer:Shampoo",
    "pytorch_optimizer:AdaFactor",
    "pytorch_optimizer:CAME",
    "pytorch_optimizer:AggMo",
]


@pytest.mark.promise("exact", "optimizers")
@pytest.mark.spread(2)
@pytest.mark.parametrize("case", CASES)
def test_a_loop_has_the_bits_of_plain_torch_also_resumed_or_loaded(case: str, tmp_path: Path) -> None:
    """Also convolutions and stacks of experts, which a class sees in their shapes."""
    module, _, name = case.partition(":")
    cls = getattr(importlib.import_module(module), name)
    plain, config = mixed(), ZeroConfig()
    theirs = cls(plain.parameters(), lr=1e-2)
    train(plain, theirs, range(STEPS))
    weights = plain.state_dict()
    found = []
    for resume in (None, tmp_path / "at-3"):
        with running_in(RankContext()):
            model, optimizer = prepared_copy(mixed(), cls, config, resume=resume, lr=1e-2)
            if resume is None:
                train(model, optimizer, range(SAVED))
                rayzero.save_checkpoint(optimizer, tmp_path / "at-3")
                half = copy.deepcopy(optimizer.state_dict())
            train(model, optimizer, range(SAVED, STEPS))
            found.append(rayzero.full_state_dict(model))
            assert same_states(optimizer.state_dict(), torch.optim.Optimizer.state_dict(theirs))
    with running_in(RankContext()):
        model, optimizer = prepared_copy(mixed(), cls, config, lr=1e-2)
        load_checkpoint(optimizer, tmp_path / "at-3")
        assert same_states(optimizer.state_dict(), half)
        train(model, optimizer, range(1))
        optimizer.load_state_dict(half)
        assert same_states(optimizer.state_dict(), half)
    for ours in found:
        assert [name for name, value in weights.items() if not torch.equal(ours[name], value)] == []
    convert(tmp_path / "at-3", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "back", to="rayzero", optimizer=f"{cls.__module__}:{cls.__qualname__}")
    with running_in(RankContext()):
        _, optimizer = prepared_copy(mixed(), cls, config, resume=tmp_path / "back", lr=1e-2)
        assert same_states(optimizer.state_dict(), half)


@needs.shared_memory
@pytest.mark.parametrize(("cls", "expected"), [(torch.optim.Muon, 8), (torch.optim.AdamW, 12)])
def test_masters_and_states_take_what_the_class_keeps(cls: Any, expected: int) -> None:
    """In bytes a parameter, as the kernel counts the pages of an owner: fp32 masters, and one moment or two."""

    def bytes_a_parameter(context: RankContext) -> float:
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
        count = sum(param.numel() for param in model.parameters())
        model, optimizer = rayzero.prepare(model, cls(model.parameters(), lr=1e-2), ZeroConfig())
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
        rayzero.full_state_dict(model)  # the update is over
        slabs = [slab for slab in list_slabs() if slab.header is not None and slab.header.facts.run == context.run]
        pages = [slab.path.stat().st_blocks for slab in slabs if slab.header.facts.role in ("params", "state")]
        return 512 * sum(pages) / count

    assert run_ranks(bytes_a_parameter, 1, 1, "shm") == [pytest.approx(expected, rel=0.01)]
