"""A parameter group that comes later to one of several optimizers: what its parameters keep is known also to an owner
that dies before it has updated them."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import seeded, token_loss, tokens
from torch import Tensor, nn

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext
from rayzero.testing import run_ranks
from tests.support import needs
from tests.support.faults import Fault, Faults

from .disturbed import named_leaves
from .test_scaling_cases import Small

STEPS, ADDED = 4, 1


def divided(model: nn.Module) -> tuple[nn.Parameter, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A matrix that comes later, Muon of the others, AdamW of what is no matrix of a block."""
    torch.set_num_threads(1)
    *matrices, late = [param for param in model.layers.parameters() if param.dim() == 2]
    known = set(map(id, [*matrices, late]))
    others = [param for param in model.parameters() if id(param) not in known]
    return late, torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)


def train(context: RankContext, base: nn.Module, folder: Path, *, loads: bool = False) -> dict[str, Tensor]:
    """AdamW gets a matrix before step 1: the classes' first takes matrices, too, and keeps others states of them. They
    are saved and read, and perhaps loaded, before they are first updated."""
    model = copy.deepcopy(base)
    late, muon, adamw = divided(model)
    model, optimizer = rayzero.prepare(model, [muon, adamw], ZeroConfig(units=["Block", "Embedding"]))
    for step in range(STEPS):
        if step == ADDED:
            adamw.add_param_group({"params": [late], "lr": 3e-3})
            rayzero.save_checkpoint(optimizer, folder / "added")
            if loads:
                optimizer.load_state_dict(with_states_of(optimizer.state_dict(), late))
            optimizer.state_dict()
        token_loss(model, tokens(step, context.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step < ADDED:
            late.grad = None  # torch keeps what no optimizer takes
        rayzero.mean_over_ranks(0.0)
    return rayzero.full_state_dict(model) | named_leaves(optimizer.state_dict()["state"])


def with_states_of(state_dict: dict[str, Any], late: nn.Parameter) -> dict[str, Any]:
    """The same with moments for the parameter that came last."""
    (number,) = state_dict["param_groups"][-1]["params"]
    numbers = torch.Generator().manual_seed(1)
    moments = {name: torch.rand(late.shape, generator=numbers) for name in ("exp_avg", "exp_avg_sq")}
    return {**state_dict, "state": {**state_dict["state"], number: {"step": torch.tensor(3.0), **moments}}}


def plain(base: nn.Module, *, loads: bool) -> dict[str, Tensor]:
    """What unsharded torch ends with, on the batches of both ranks."""
    model = copy.deepcopy(base)
    late, muon, adamw = divided(model)
    for step in range(STEPS):
        if step == ADDED:
            adamw.add_param_group({"params": [late], "lr": 3e-3})
            if loads:
                adamw.load_state_dict(with_states_of(adamw.state_dict(), late))
        of_ranks = []
        for rank in range(2):
            model.zero_grad()
            token_loss(model, tokens(step, rank)).backward()
            of_ranks.append([param.grad for param in model.parameters()])
        for param, ours, theirs in zip(model.parameters(), *of_ranks, strict=True):
            param.grad = (ours + theirs) * 0.5
        muon.step()
        adamw.step()
    count = len(muon.state_dict()["state"])
    states = {count + at: state for at, state in adamw.state_dict()["state"].items()}
    return dict(model.state_dict()) | named_leaves(muon.state_dict()["state"] | states)


DEATHS = {
    f"{who} at {point}": Fault(who, point, "kill", nth)
    for who in ("optimizer 0", "optimizer 1")
    for point, nth in {"owner.write": 1, "owner.save": 1, "owner.saved": 1, "owner.decided": 2, "owner.idle": 2}.items()
}


@needs.shared_memory
@pytest.mark.thorough
@pytest.mark.usefixtures("forked_with_compiler")
@pytest.mark.parametrize("fault", DEATHS.values(), ids=DEATHS)
@pytest.mark.parametrize("loads", [False, True], ids=["", "loaded"])
def test_an_owner_that_dies_about_a_later_group_changes_no_bit(fault: Fault, loads: bool, tmp_path: Path) -> None:
    base, faults = seeded(Small, 3), Faults(tmp_path, (fault,))
    loop = functools.partial(train, base=base, folder=tmp_path, loads=loads)
    found = run_ranks(loop, 2, 2, "shm", True, max_failures=1, faults=faults, stall_timeout=60.0)
    assert faults.struck(0) is not None
    expected = plain(base, loads=loads)
    for ours in found:
        assert ours.keys() == expected.keys()
        assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []


def test_a_resumed_run_adds_the_group_again_to_parameters_with_states(tmp_path: Path) -> None:
    """Owners restore these before they know the group."""
    base = seeded(Small, 3)

    def resumed(context: RankContext, path: Path | None) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        late, muon, adamw = divided(model)
        model, optimizer = rayzero.prepare(model, [adamw, muon], ZeroConfig(units=["Block", "Embedding"]), resume=path)
        adamw.add_param_group({"params": [late], "lr": 3e-3})
        for step in range(context.step, STEPS):
            token_loss(model, tokens(step, context.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and path is None:
                rayzero.save_checkpoint(optimizer, tmp_path / "two")
        return rayzero.full_state_dict(model) | named_leaves(optimizer.state_dict()["state"])

    expected = run_ranks(functools.partial(resumed, path=None), 2, 2)
    for ours, theirs in zip(run_ranks(functools.partial(resumed, path=tmp_path / "two"), 2, 3), expected, strict=True):
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
