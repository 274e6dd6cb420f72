"""``accelerator.save_state`` and ``load_state``: a loop that goes back to a saved state goes on as it did before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from engine.models import VOCAB, relative_difference, same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.errors import CheckpointError
from rayzero.integrations.accelerate import ZeroAccelerator
from rayzero.testing import run_ranks

from .conftest import reset_accelerate
from .schedules import SCHEDULES, STEPS

WIDTH = 16


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def network() -> nn.Module:
    """Dropout asks for random states, batch norm has buffers."""
    torch.manual_seed(0)
    layers = (nn.Embedding(VOCAB, WIDTH), nn.Flatten(0, 1), nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))
    return nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(WIDTH, VOCAB))


class Loop:
    """A loop as Accelerate's documentation has it, over one epoch of batches that each rank gets its part of."""

    def __init__(self, accelerator: Accelerator, schedule: Callable[[Any], Any], *, world_size: int = 1) -> None:
        self.accelerator = accelerator
        model = network()
        groups = [{"params": list(model[2:].parameters())}, {"params": list(model[0].parameters()), "lr": 2e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        tokens = torch.randint(0, VOCAB, (4 * STEPS * world_size, 5), generator=torch.Generator().manual_seed(1))
        batches: Any = DataLoader(TensorDataset(tokens), batch_size=4, generator=torch.Generator())
        scheduler = schedule(optimizer)
        self.model, self.optimizer, self.batches, self.scheduler = accelerator.prepare(
            model, optimizer, batches, scheduler
        )
        self.rates: list[list[float]] = []

    def train(self, *, begin: int = 0, end: int = STEPS, after: Callable[[int], None] = lambda step: None) -> None:
        batches = self.accelerator.skip_first_batches(self.batches, begin)
        for step, (tokens,) in enumerate(batches, begin + 1):
            loss = F.cross_entropy(self.model(tokens), tokens.flatten())
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.rates.append([group["lr"] for group in self.optimizer.param_groups])
            after(step)
            if step == end:
                return

    @property
    def state(self) -> dict[str, Tensor]:
        """Weights, buffers and moments."""
        model: Any = self.model
        weights = self.accelerator.get_state_dict(model)
        moments = self.optimizer.state_dict()["state"]
        return dict(weights) | {
            f"{index}.{kind}": torch.as_tensor(moments[index][kind]).clone()
            for index in sorted(moments)
            for kind in sorted(moments[index])
        }


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_loop_interrupted_at_any_step_and_loaded_equals_one_that_was_not(name: str, tmp_path: Path) -> None:
    config = ZeroConfig(precision="bf16" if name == "StepLR" else "fp32", keep_fp32=("3",))

    def accelerator() -> Accelerator:
        reset_accelerate()
        return ZeroAccelerator(cpu=True, zero_config=config)

    with running_in(RankContext()):
        whole = Loop(accelerator(), SCHEDULES[name])
        whole.accelerator.save_state(str(tmp_path / "0"))
        whole.train(after=lambda step: whole.accelerator.save_state(str(tmp_path / str(step))))
        expected = whole.state
    assert sorted(path.name for path in (tmp_path / "3").iterdir()) == [
        "random_states_0.pkl",
        "rayzero",
        "scheduler.bin",
    ]
    for begin in range(STEPS):
        with running_in(RankContext()):
            torch.manual_seed(100)
            again = Loop(accelerator(), SCHEDULES[name])
            again.accelerator.load_state(str(tmp_path / str(begin)))
            again.train(begin=begin)
            assert again.rates == whole.rates[begin:]
            assert same_bits(again.state, expected)


def test_a_state_may_be_loaded_again_and_again_into_what_has_trained_on(tmp_path: Path) -> None:
    with running_in(RankContext()):
        loop = Loop(ZeroAccelerator(cpu=True), SCHEDULES["OneCycleLR"])
        loop.train(end=2)
        loop.accelerator.save_state(str(tmp_path))
        ends = []
        for _ in range(2):
            loop.train(begin=2)
            ends.append(loop.state)
            loop.accelerator.load_state(str(tmp_path))
        assert same_bits(*ends)
        assert len(loop.accelerator._optimizers) == 1
        assert same_bits(dict(loop.accelerator.get_state_dict(loop.model)), rayzero.full_state_dict(loop.model))


def test_what_a_plain_accelerator_saved_is_gone_on_with(tmp_path: Path) -> None:
    plain = Loop(Accelerator(cpu=True), SCHEDULES["OneCycleLR"])
    plain.train(end=3)
    plain.accelerator.save_state(str(tmp_path))
    plain.train(begin=3)
    reset_accelerate()
    with running_in(RankContext()):
        ours = Loop(ZeroAccelerator(cpu=True), SCHEDULES["OneCycleLR"])
        ours.accelerator.load_state(str(tmp_path))
        ours.train(begin=3)
        assert ours.rates == plain.rates[3:]
        assert relative_difference(ours.state, plain.state) <= 1e-6  # the fused kernel rounds a tail otherwise


def test_two_models_of_one_accelerator_have_a_checkpoint_each(tmp_path: Path) -> None:
    with running_in(RankContext()):
        accelerator = ZeroAccelerator(cpu=True)
        loops = [Loop(accelerator, SCHEDULES[name]) for name in ("StepLR", "OneCycleLR")]
        for end, loop in enumerate(loops, 2):
            loop.train(end=end)
        accelerator.save_state(str(tmp_path))
        before = [loop.state for loop in loops]
        for loop in loops:
            loop.train(end=1)
        accelerator.load_state(str(tmp_path))
        assert all(same_bits(loop.state, state) for loop, state in zip(loops, before, strict=True))


def test_a_state_of_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    with running_in(RankContext()):
        loop = Loop(ZeroAccelerator(cpu=True), SCHEDULES["StepLR"])
        other = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Flatten(0, 1), nn.Linear(WIDTH, WIDTH + 1, bias=False))
        _, optimizer = rayzero.prepare(other, torch.optim.AdamW(other.parameters()))
        rayzero.save_checkpoint(optimizer, tmp_path / "rayzero", {})
        before = loop.state
        with pytest.raises(
            CheckpointError,
            match=r"a trained parameter of shape \(17, 16\) as '2.weight', but the model has a trained parameter of "
            r"shape \(16, 16\); it is a checkpoint of another model",
        ):
            loop.accelerator.load_state(str(tmp_path))
        sgd = torch.optim.SGD(network().parameters(), lr=0.1)
        model = network()
        _, optimizer = rayzero.prepare(model, type(sgd)(model.parameters(), lr=0.1))
        rayzero.save_checkpoint(optimizer, tmp_path / "rayzero", {})
        with pytest.raises(
            CheckpointError, match=r"optimizer 'torch.optim.sgd:SGD', but this run has 'torch.optim.adamw"
        ):
            loop.accelerator.load_state(str(tmp_path))
        assert same_bits(loop.state, before)


# ---- several ranks ----------------------------------------------------------------------------------------------


def on_ranks(
    context: RankContext, *, resumed: bool = False
) -> tuple[list[dict[str, Tensor]], list[list[float]], Tensor]:
    """Train to the end, go back to a saved state and train to the end again; ``resumed``: begin at a saved state."""
    assert context.run_dir is not None
    naming = ProjectConfiguration(str(context.run_dir), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = ZeroAccelerator(cpu=True, project_config=naming)
    loop = Loop(accelerator, SCHEDULES["OneCycleLR"], world_size=2)
    torch.manual_seed(context.rank)  # ranks drop different elements
    begin, ends = 2, []
    if resumed:
        accelerator.load_state()
        loop.train(begin=begin)
        return [loop.state], loop.rates, torch.get_rng_state()
    loop.train(end=begin, after=lambda step: accelerator.save_state() and None)
    for _ in range(2):
        loop.train(begin=begin)
        ends.append(loop.state)
        random = torch.get_rng_state()
        accelerator.load_state()
    return ends, loop.rates, random


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_with_trainers")
def test_ranks_save_and_load_together_and_other_owners_go_on(tmp_path: Path) -> None:
    whole = run_ranks(on_ranks, 2, 2, "grpc", processes=True, run_dir=tmp_path)
    again = run_ranks(partial(on_ranks, resumed=True), 2, 1, "grpc", processes=True, run_dir=tmp_path)
    saved = tmp_path / "checkpoints" / "checkpoint_1"
    assert {path.name for path in saved.iterdir()} == {
        "random_states_0.pkl",
        "random_states_1.pkl",
        "rayzero",
        "scheduler.bin",
    }
    assert not torch.equal(whole[0][2], whole[1][2])
    for (ends, rates, random), (resumed, resumed_rates, resumed_random) in zip(whole, again, strict=True):
        assert same_bits(*ends)
        assert rates[2:STEPS] == rates[STEPS:] == resumed_rates
        assert same_bits(resumed[0], ends[0])
        assert torch.equal(random, resumed_random)
