"""A training interrupted after any step and resumed equals one that was not: weights bit by bit, and rates.

In transformers' Trainer, Lightning and Ray Train; Accelerate's is in test_accelerate_state.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models import Net, same_bits, seeded, token_loss, tokens
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

import rayzero
from rayzero import ZeroConfig
from rayzero.engine.context import RankContext, running_in
from rayzero.integrations.lightning import ZeroStrategy
from rayzero.integrations.transformers import Trainer as ZeroTrainer

from .schedules import SCHEDULES, STEPS
from .test_lightning import Learner, trainer
from .test_lightning import pytestmark as filters
from .test_ray_train import served
from .test_trainer import arguments, dataset, history
from .training import build
from .zoo import gpt2

Trained = tuple[dict[str, Tensor], list[Any]]  # weights, and the rate of each step or all that is logged in it


pytestmark = filters


def assert_resumes(train: Callable[[Path | None], Trained], saved: Callable[[int], Path]) -> None:
    """``train`` saves after each step; from any of these states on it does what it has done without a stop."""
    with running_in(RankContext()):
        expected, rates = train(None)
    assert len(rates) == STEPS
    for done in range(1, STEPS):
        with running_in(RankContext()):
            torch.manual_seed(100 + done)
            state, resumed_rates = train(saved(done))
        assert resumed_rates == rates[done:], f"after step {done}"
        assert same_bits(state, expected), f"after step {done}"


@pytest.mark.promise("recoverable", "integrations")
@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["OneCycleLR", "CosineAnnealingLR", "StepLR"])
def test_in_transformers_trainer(name: str, tmp_path: Path) -> None:
    class Scheduled(ZeroTrainer):
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = SCHEDULES[name](optimizer if optimizer is not None else self.optimizer)
            return self.lr_scheduler

    def trained(resume: Path | None) -> Trained:
        trainer = Scheduled(
            model=build(gpt2, dropout=0.1),
            args=arguments(tmp_path, save_strategy="no" if resume else "steps", save_steps=1),
            train_dataset=dataset(4 * STEPS),
        )
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        logged = [entry for entry in history(trainer) if "learning_rate" in entry]  # also before the stop
        return rayzero.full_state_dict(trainer.model), logged[int(resume.name[11:]) if resume else 0 :]

    assert_resumes(trained, lambda step: tmp_path / f"checkpoint-{step}")


class ScheduledLearner(Learner):
    """An epoch is a step."""

    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        super().__init__()
        self.schedule = schedule

    def training_step(self, batch: Any, index: int) -> Tensor:
        return token_loss(self.net, tokens(self.global_step))

    def configure_optimizers(self) -> Any:
        first, *others = self.net.parameters()
        groups = [{"params": [first]}, {"params": others, "lr": 2e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need")
@pytest.mark.spread(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_in_lightning(name: str, tmp_path: Path) -> None:
    def trained(resume: Path | None) -> Trained:
        module = ScheduledLearner(SCHEDULES[name])
        saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
        fitting = trainer(
            max_epochs=STEPS,
            callbacks=[saving] if resume is None else [],
            enable_checkpointing=resume is None,
            strategy=ZeroStrategy(ZeroConfig(precision="bf16")),
        )
        fitting.fit(module, DataLoader([0]), ckpt_path=resume)  # type: ignore[arg-type]
        return rayzero.full_state_dict(module), module.lrs

    assert_resumes(trained, lambda step: tmp_path / f"epoch={step - 1}.ckpt")


def train_in_ray_train(config: dict[str, Any]) -> Trained:
    """What a worker of Ray Train runs: a loop that saves after each step, as the example does."""
    with config["owners"].rank(resume=config["resume"]) as context:
        model = seeded(Net)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = rayzero.prepare(model, optimizer)
        scheduler = SCHEDULES[config["schedule"]](optimizer)
        begin, rates = 0, []
        if context.loop_state is not None:
            begin = context.loop_state["steps"]
            scheduler.load_state_dict(context.loop_state["scheduler"])
        for step in range(begin + 1, STEPS + 1):
            token_loss(model, tokens(step, context.rank)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
            if context.resume is None:
                state = {"steps": step, "scheduler": scheduler.state_dict()}
                rayzero.save_checkpoint(optimizer, Path(config["place"]) / f"step-{step}", state)
        assert rayzero.mean_over_ranks(float(context.rank)) == (context.world_size - 1) / 2
        return rayzero.full_state_dict(model), rates


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_in_a_worker_of_ray_train(name: str, in_a_worker: None, tmp_path: Path) -> None:
    def trained(resume: Path | None) -> Trained:
        with served() as owners:
            return train_in_ray_train({"owners": owners, "resume": resume, "schedule": name, "place": tmp_path})

    assert_resumes(trained, lambda step: tmp_path / f"step-{step}")
